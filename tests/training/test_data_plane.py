"""A run that loads through the data plane is the run that loads in its ranks, bit for bit."""

import hashlib
import io
import re
from contextlib import redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megatron_hdp.megatron.execution.executor import HdpExecutor
from megatron_hdp.training.loop import pretrain
from tests.support.metric_lines import TIMES
from tests.support.plane import processes_of
from tests.support.sources import WEIGHTS, data_file, mixed_arguments, write_sources

pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")


def trained(arguments, fault=None):
    """Body of a rank: metrics of every step, what its micro-batches held, and the log."""
    held, log = [], io.StringIO()
    run = HdpExecutor.run

    def noting(self, micro_batches, *rest, **named):
        held.append([digest(one) for one in micro_batches])
        if fault is not None:
            fault(len(held))
        return run(self, micro_batches, *rest, **named)

    with redirect_stdout(log), mock.patch.object(HdpExecutor, "run", noting):
        found = pretrain(arguments)
    return found, held, log.getvalue()


def digest(micro_batch):
    """Of everything in it but tokens and labels that its rank does not need."""
    found = hashlib.blake2b(digest_size=8)
    for item in fields(micro_batch):
        value = getattr(micro_batch, item.name)
        found.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return found.hexdigest()


def figures(found):
    return [{k: v for k, v in vars(one).items() if k not in TIMES} for one in found]


def run(folder, path=None, **overrides):
    settings = {"train_iters": 5, "lr_decay_iters": 5, "global_batch_size": 6, "lr": 1e-2}
    settings["hdp_tokens_per_rank"] = 100
    return mixed_arguments(folder, path or data_file(folder), **(settings | overrides))


LAYOUTS = {
    "1": (1, {}),
    "2": (2, {}),
    "4": (4, {}),
    "5": (5, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2-v2": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "num_layers": 4,
            "num_virtual_stages_per_pipeline_rank": 2,
        },
    ),
}


RUN_S = 240  # and three times as long where more ranks share a machine that is busy


@pytest.mark.slow  # Ray gives its processes a time to start, which a busy machine may not keep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_run(run_ranks, tmp_path, layout):
    ranks, more = LAYOUTS[layout]
    path = data_file(
        write_sources(tmp_path),
        f"{WEIGHTS}\nvalidation: {{web: 2}}\nloaders: {{max: 2, shadows: 1}}",
    )
    local = run(tmp_path, path, eval_iters=1, eval_interval=2, **more)
    limit = {"timeout_s": RUN_S if layout == "2" else 3 * RUN_S}
    expected = run_ranks(ranks, trained, local, **limit)
    found = run_ranks(ranks, trained, replace(local, hdp_loaders="ray"), **limit)
    for (here, held_here, _), (there, held_there, _) in zip(found, expected, strict=True):
        for one, other in zip(figures(here), figures(there), strict=True):
            assert {k: (v, other[k]) for k, v in one.items() if v != other[k]} == {}
        assert held_here == held_there
    (records, _, log), *_ = found
    assert "data plane: hdp-data-" in log
    assert all(3 * 2 <= one.loaders <= 3 * 3 for one in records)  # a shadow each
    assert all(one.data_wait_ms is not None for one in records)
    assert expected[0][0][0].loaders is None
    (folder,) = re.findall(r"its log is (\S+)/log", log)
    assert not Path(folder).exists() and processes_of(Path(folder)) == []
