"""Every block of Python that the docs show runs as printed; its batches are ones that can run."""

import pytest

from megatron_hdp import plugin
from megatron_hdp.megatron import dynamic_cp
from megatron_hdp.session import TokenBatch
from megatron_hdp.session.batch import CheckedBatch
from tests.docs.pages import all_blocks

BLOCKS = [one for one in all_blocks() if one.language == "python"]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda one: f"{one.page}-{BLOCKS.index(one)}")
def test_python_runs(block, monkeypatch, capsys):
    # they need a Megatron-LM checkout: tests/test_plugin.py, tests/megatron/test_dynamic_cp.py
    monkeypatch.setattr(plugin, "activate", lambda: print("activated"))
    monkeypatch.setattr(dynamic_cp, "install", lambda: print("installed"))
    found = {}
    exec(compile(block.text, block.page, "exec"), found)
    printed = capsys.readouterr().out
    for call, note in (("activate()", "activated"), ("install()", "installed")):
        assert (call in block.text) == (note in printed)
    for batch in [one for one in found.values() if isinstance(one, TokenBatch)]:
        assert CheckedBatch(batch, vocab_size=257, max_length=8192).num_loss_tokens(1).all()


def test_there_are_some():
    assert len(BLOCKS) >= 5 and any("TokenBatch(" in one.text for one in BLOCKS)
