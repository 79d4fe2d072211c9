"""Runs whose pipeline stages hold several parts of the model: same curves, same checkpoints."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_hdp.megatron.step import NonFiniteError
from megatron_hdp.training import job, loop
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import write_corpus
from tests.training.test_checkpoint import BUCKETS, LENGTHS, SHARDED, largest_difference, run

ALONE = (1, {"hdp_tokens_per_rank": 200})
PLAIN = (4, {"pipeline_model_parallel_size": 2})
VIRTUAL = (4, PLAIN[1] | {"num_virtual_stages_per_pipeline_rank": 2})
FEWER_RANKS = (2, PLAIN[1] | {"num_layers_per_virtual_pipeline_stage": 1})


def losses(arguments):
    """Body of a rank: step, loss, and loss of the validation, of every step."""
    return [(one.step, one.loss, one.validation_loss) for one in pretrain(arguments)]


def whole_run(folder, **overrides):
    prefix = write_corpus(folder, LENGTHS * 3)
    settings = {"num_layers": 4, "split": "2,1,0", "eval_iters": 1, "eval_interval": 1}
    return run(prefix, **(settings | {"hdp_tokens_per_rank": 100} | overrides))


def trained(run_ranks, arguments, layout):
    num_ranks, overrides = layout
    return run_ranks(num_ranks, losses, replace(arguments, **overrides))[0]


@pytest.mark.parametrize(
    "before, after, overrides, tolerance",
    [
        (VIRTUAL, FEWER_RANKS, {}, 1e-10),
        pytest.param(VIRTUAL, FEWER_RANKS, SHARDED | BUCKETS, 1e-10, marks=pytest.mark.slow),
        pytest.param(VIRTUAL, PLAIN, SHARDED | BUCKETS, 1e-10, marks=pytest.mark.slow),
        pytest.param(PLAIN, VIRTUAL, SHARDED | BUCKETS, 1e-10, marks=pytest.mark.slow),
        pytest.param(VIRTUAL, ALONE, {}, 1e-10, marks=pytest.mark.slow),
        pytest.param(
            VIRTUAL, VIRTUAL, SHARDED | {"fp64": False, "bf16": True}, 2e-3, marks=pytest.mark.slow
        ),
    ],
    ids=["fewer-ranks", "fewer-ranks-sharded", "to-plain", "from-plain", "to-one-rank", "bfloat16"],
)
def test_resumed_on_another_layout(run_ranks, tmp_path, before, after, overrides, tolerance):
    whole = whole_run(tmp_path, **overrides)
    expected = trained(run_ranks, whole, ALONE)
    folder = tmp_path / "checkpoints"
    first = trained(run_ranks, replace(whole, train_iters=3, save=folder), before)
    assert largest_difference(first, expected[:3]) <= tolerance
    found = trained(run_ranks, replace(whole, load=folder), after)
    assert [step for step, _, _ in found] == [4, 5, 6]
    assert largest_difference(found, expected[3:]) <= tolerance


def poisoned(arguments):
    """Body of a rank: what a run says whose last part of the model has a weight that is NaN."""
    build = job.build_chunks

    def build_poisoned(*args):
        chunks = build(*args)
        with torch.no_grad():
            chunks[-1].module.decoder.layers[0].mlp.linear_fc1.weight[0] = float("nan")
        return chunks

    with mock.patch.object(job, "build_chunks", build_poisoned):
        try:
            pretrain(arguments)
        except NonFiniteError as error:
            return str(error)


def test_a_gradient_that_is_not_finite_is_named_with_its_part(run_ranks, tmp_path):
    arguments = replace(whole_run(tmp_path, eval_iters=0), **VIRTUAL[1])
    words = run_ranks(4, poisoned_gradient, arguments)
    assert "part 0: " in words[0]


def poisoned_gradient(arguments):
    """Body of a rank: likewise, the loss not looked at."""
    with mock.patch.object(loop, "_require_finite_loss"):
        return poisoned(arguments)
