"""Adapters in a model that a framework has built: a session trains them as our own command does."""

from dataclasses import replace

import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.adapters import is_adapter
from megatron_hdp.session import HdpSession, add_adapters
from tests.support import gradients
from tests.support.gradients import VOCABULARY, largest_error, whole_gradients
from tests.support.own_loop import arguments_of, batch_of, session_of, stock_chunk

ADAPTERS = {"rank": 3, "alpha": 6.0, "targets": ("linear_qkv", "linear_proj", "linear_fc2")}
FLAGS = {"lora_rank": 3, "lora_alpha": 6.0, "lora_targets": ADAPTERS["targets"]}


def step_of(session, arguments):
    """Loss and gradients of a step, B drawn so that A has some."""
    generator = torch.Generator().manual_seed(4)
    for chunk in session.chunks:
        for name, one in sorted(chunk.named_parameters()):
            if name.endswith("lora_b"):
                one.data = torch.randn(one.shape, generator=generator, dtype=one.dtype)
    return session.step(batch_of()).loss, whole_gradients(session.chunks, arguments)


@gradients.seldom_compiled
def errors_of(arguments):
    """Body of a rank: how far both are apart, and names of what has gradients."""
    parallel.initialise(arguments)
    own = session_of(arguments)
    mine = step_of(own, arguments)
    parallel.set_seeds(arguments.seed)
    chunk = stock_chunk(arguments, 0, lambda model: add_adapters(model, seed=0, **ADAPTERS))
    of_model = {"seq_length": 200, "hdp_tokens_per_rank": arguments.hdp_tokens_per_rank}
    session = HdpSession.of_model([chunk], vocab_size=VOCABULARY, **of_model, **FLAGS)
    assert session.cost_model == own.cost_model
    assert session.cost_model.b < session_of(replace(arguments, lora_rank=None)).cost_model.b
    for ours, its in zip(
        sorted(session_of(arguments).chunks[0].named_parameters()),
        sorted(chunk.named_parameters()),
        strict=True,
    ):
        its[1].data.copy_(ours[1].data)
    found = step_of(session, arguments)
    parallel.finish()
    return largest_error(found, mine), sorted(mine[1])


def test_of_model(run_ranks):
    """Rings of two ranks; nothing but adapters has a gradient."""
    error, names = run_ranks(2, errors_of, arguments_of(**FLAGS))[0]
    assert error < 1e-12
    assert names and all(map(is_adapter, names))
