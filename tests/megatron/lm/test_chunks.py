"""A step of Megatron's loop over several model chunks: the gradients of one rank with all data.

What Megatron builds and sets at a run's start is built here; its loop is in
test_pipelines.py, with a real checkout.
"""

import argparse
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.lm.model import adapt
from megatron_hdp.megatron.lm.run import LmRun
from megatron_hdp.megatron.options import num_model_chunks
from megatron_hdp.planner.lockstep import slots
from megatron_hdp.runtime.timeline import Timeline
from tests.support.drawn import first_rows
from tests.support.gradients import (
    EXPERTS,
    VOCABULARY,
    largest_error,
    reference_on_first_rank,
    tiny_arguments,
    whole_gradients,
    write_corpus,
)
from tests.support.own_loop import stock_chunk
from tests.support.random_plans import random_plan

LENGTHS = [1, 2, 30, 100, 64, 65, 7, 200, 129]
STEPS = 3
VIRTUAL = {
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
    "use_distributed_optimizer": True,
    "hdp_tokens_per_rank": 128,
    "seq_length": 200,
    "max_position_embeddings": 200,
}


LAYOUT = {
    "num_layers": 6,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_model_parallel_layout": "E|tt|ttt|tL",  # the first chunk has no layer
}


def built_by_megatron(arguments):
    """The chunks of this rank as Megatron's own training builds them, with every overlap."""
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000}
    return [
        stock_chunk(arguments, number, partial(adapt, fused_loss=True), **overlaps)
        for number in range(num_model_chunks(arguments))
    ]


def as_megatron_has_them(arguments):
    """Megatron's arguments of such a run, as far as HDP reads them."""
    names = "skip_train check_for_nan_in_loss_and_grad check_for_spiky_loss"
    args = argparse.Namespace(**vars(arguments), **dict.fromkeys(names.split(), False))
    args.hdp_validation_sets, args.eval_iters, args.curr_iteration = None, 0, 0
    args.consumed_train_samples, args.padded_vocab_size = 0, VOCABULARY
    return args


def plan_of_unequal_pipelines(arguments):
    """A plan under which one of two pipelines runs more micro-batches, padding included."""
    lengths = np.array(LENGTHS)[first_rows(len(LENGTHS), arguments.seed)]
    for seed in range(200):
        plan = random_plan(lengths, ranks=2, tokens_per_rank=128, seed=seed)
        first, second = slots(plan, aligned=True, group_size=2)
        if len(first) != len(second):
            return plan
    raise AssertionError("every plan has equal counts")


def errors_of_steps(arguments, plan):
    """Body of a rank: the error of the gradients of several steps, and of an evaluation's loss."""
    size = arguments.global_batch_size
    with (
        mock.patch("megatron_hdp.data.steps.planning.make_plan", lambda *_, **__: plan),
        # Megatron sets its calculator of batches up when it parses arguments
        mock.patch("megatron_hdp.megatron.lm.run.get_current_global_batch_size", lambda: size),
    ):
        found = results_of_steps(arguments)
    expected = reference_on_first_rank(arguments)
    if expected is None:
        return None
    *trained, (evaluated, _) = found
    return [
        *(largest_error(one, expected) for one in trained),
        abs(evaluated / expected[0] - 1),
    ]


def results_of_steps(arguments):
    """Loss and whole gradients of several steps, then of an evaluation, which has none."""
    parallel.initialise(arguments)
    chunks = built_by_megatron(arguments)
    config = chunks[0].config
    config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    done = SimpleNamespace(begin_step=lambda step: None, close=lambda: None)
    done.begin = lambda *_: done
    job = SimpleNamespace(timeline=Timeline(), begin_step=lambda step: None)
    run = LmRun(as_megatron_has_them(arguments), VOCABULARY, job, lambda *_: done)
    iterators = [run.data_iterators()[0] for _ in chunks]
    found = []
    for forward_only in [False] * STEPS + [True]:
        # as the loop has it from the second step on
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
        for chunk in chunks:
            chunk.zero_grad_buffer()
        with torch.no_grad() if forward_only else nullcontext():
            (losses,) = run.forward_backward(
                data_iterator=iterators, model=chunks, forward_only=forward_only
            )
        total, num_tokens = losses["lm loss"].tolist()
        gradients = {} if forward_only else whole_gradients(chunks, arguments)
        found.append((total / num_tokens, gradients))
    run.close()
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(LAYOUT, marks=pytest.mark.slow),
        pytest.param(EXPERTS | {"expert_model_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["dense", "layout", "experts"],
)
def test_gradients_of_all_chunks(run_ranks, tmp_path, overrides):
    arguments = tiny_arguments(write_corpus(tmp_path, LENGTHS), **VIRTUAL | overrides)
    plan = plan_of_unequal_pipelines(arguments)
    errors = run_ranks(4, errors_of_steps, arguments, plan)[0]
    assert len(errors) == STEPS + 1 and max(errors) <= 1e-10, errors
