"""Runs whose pipeline stages hold several parts of the model: same curves, same checkpoints."""

from dataclasses import replace

import pytest

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
        (VIRTUAL, FEWER_RANKS, SHARDED | BUCKETS, 1e-10),
        pytest.param(VIRTUAL, PLAIN, SHARDED | BUCKETS, 1e-10, marks=pytest.mark.slow),
        pytest.param(PLAIN, VIRTUAL, SHARDED | BUCKETS, 1e-10, marks=pytest.mark.slow),
        pytest.param(VIRTUAL, ALONE, {}, 1e-10, marks=pytest.mark.slow),
        pytest.param(
            VIRTUAL, VIRTUAL, SHARDED | {"fp64": False, "bf16": True}, 2e-3, marks=pytest.mark.slow
        ),
    ],
    ids=["fewer-ranks", "to-plain", "from-plain", "to-one-rank", "bfloat16"],
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
