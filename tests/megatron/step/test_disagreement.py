"""A rank that would run something else stops every rank, by name."""

import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_hdp.data.steps import planning
from megatron_hdp.megatron.execution.executor import HdpExecutor
from megatron_hdp.megatron.step import hdp_steps
from megatron_hdp.options import flag_of
from megatron_hdp.planner import CostModel
from megatron_hdp.runtime.health.agreement import DisagreementError
from megatron_hdp.training import loop
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import tiny_arguments, write_corpus

TOKENS = "tokens in the .bin of corpus"
LENGTHS = [1, 2, 30, 100, 64, 65, 7, 130, 129]
NUM_RANKS = 3
ODD_RANK = 1


def arguments(prefix, **overrides):
    settings = {"seq_length": 130, "max_position_embeddings": 130, "train_iters": 1}
    return tiny_arguments(prefix, **(settings | overrides))


def plan_otherwise(problem, strategy):
    """A valid plan, not the one that the other ranks make."""
    return MAKE_PLAN(problem, "naive")


MAKE_PLAN = planning.make_plan


def outcome(run, rank, odd_run, odd_plan):
    """Body of a rank: what it raised, and whether a micro-batch was begun."""
    is_odd = dist.get_rank() == rank
    planner = plan_otherwise if odd_plan and is_odd else MAKE_PLAN
    with (
        mock.patch.object(planning, "make_plan", planner),
        mock.patch.object(HdpExecutor, "run", autospec=True, side_effect=HdpExecutor.run) as began,
    ):
        try:
            pretrain(odd_run if is_odd else run)
            error = None
        except DisagreementError as found:
            error = str(found)
    return error, began.called


def check(run_ranks, run, odd_run, odd_plan=False):
    """Runs with one odd rank; returns the facts that differ, as every rank named them."""
    outcomes = run_ranks(NUM_RANKS, outcome, run, ODD_RANK, odd_run, odd_plan)
    errors = {error for error, _ in outcomes}
    assert len(errors) == 1, errors
    (error,) = errors
    assert error is not None, "the ranks ran different things and nobody noticed"
    assert not any(began for _, began in outcomes)
    assert "expected" in error and "start every rank with the same" in error
    lines = (line.strip() for line in error.splitlines() if line.startswith("  "))
    facts = dict(line.split(": ", 1) for line in lines)
    for values in facts.values():
        assert f"on rank {ODD_RANK}" in values and "on ranks 0, 2" in values, values
    return set(facts)


@pytest.fixture
def prefix(tmp_path):
    return write_corpus(tmp_path, LENGTHS)


@pytest.mark.slow
def test_another_plan(run_ranks, prefix):
    run = arguments(prefix)
    assert check(run_ranks, run, run, odd_plan=True) == {"plan"}


@pytest.mark.parametrize(
    "lengths",
    [[*LENGTHS[:-1], LENGTHS[-1] - 1], [*LENGTHS, *range(5, 15)]],
    ids=["other", "more"],
)
def test_other_data(run_ranks, prefix, tmp_path, lengths):
    (tmp_path / "other").mkdir()
    other = write_corpus(tmp_path / "other", lengths)
    facts = check(run_ranks, arguments(prefix), replace(arguments(prefix), data_path=(other,)))
    assert facts == {"sequences of corpus", TOKENS}


@pytest.mark.slow
def test_more_sources(run_ranks, prefix, tmp_path):
    """Ranks that know different numbers of sources say so, instead of talking past each other."""
    (tmp_path / "other").mkdir()
    other = write_corpus(tmp_path / "other", LENGTHS)
    run = arguments(prefix)
    facts = check(run_ranks, run, replace(run, data_path=("1", prefix, "1", other)))
    assert facts == {"names of the sources", "weights and lengths over time", "max-epochs"}


def another_bin(folder, prefix):
    """A copy of the pair, with other tokens under the same index; returns its prefix."""
    folder.mkdir()
    other = folder / "corpus"
    shutil.copy(f"{prefix}.idx", f"{other}.idx")
    tokens = bytearray(Path(f"{prefix}.bin").read_bytes())
    tokens[-2] ^= 1
    Path(f"{other}.bin").write_bytes(tokens)
    return str(other)


def test_other_tokens_under_the_same_index(run_ranks, prefix, tmp_path):
    run = arguments(prefix)
    other = replace(run, data_path=(another_bin(tmp_path / "other", prefix),))
    assert check(run_ranks, run, other) == {TOKENS}


def test_a_rank_that_reads_no_tokens_is_not_asked_for_them(run_ranks, prefix, tmp_path):
    run = arguments(prefix, tensor_model_parallel_size=2, hdp_tokens_per_rank=130)
    other = replace(run, data_path=(another_bin(tmp_path / "other", prefix),))
    outcomes = run_ranks(2, outcome, run, ODD_RANK, other, False)
    assert [error for error, _ in outcomes] == [None, None]


@pytest.mark.parametrize(
    "name, value",
    [
        ("hdp_tokens_per_rank", 96),
        ("hybrid_data_parallel", False),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("seed", 7), ("hidden_size", 32), ("lr", 2e-3))
        ),
    ],
)
def test_other_flags(run_ranks, prefix, name, value):
    run = arguments(prefix)
    assert check(run_ranks, run, replace(run, **{name: value})) == {flag_of(name)}


@pytest.mark.slow
def test_paths_may_differ(run_ranks, prefix, tmp_path):
    run = arguments(prefix)
    outcomes = run_ranks(
        NUM_RANKS, outcome, run, ODD_RANK, replace(run, metrics_path=tmp_path / "m.jsonl"), False
    )
    assert [error for error, _ in outcomes] == [None] * NUM_RANKS


def test_another_cost_model(run_ranks, prefix, tmp_path):
    path = tmp_path / "cost.json"
    cost_model = CostModel.from_model_shape(2, 16, 10_000, 64)
    path.write_bytes(replace(cost_model, a=cost_model.a * 1e3).to_json())
    run = arguments(prefix)
    facts = check(run_ranks, run, replace(run, hdp_cost_model=path))
    assert "cost model" in facts and facts <= {"cost model", "plan"}


@pytest.mark.slow
def test_ranks_that_agree_run(run_ranks, prefix):
    run = arguments(prefix)
    outcomes = run_ranks(NUM_RANKS, outcome, run, ODD_RANK, run, False)
    assert [error for error, _ in outcomes] == [None] * NUM_RANKS
    assert any(began for _, began in outcomes)


def outcome_unchecked(*args):
    """Body of a rank: `outcome` when ranks do not compare what they planned."""
    with (
        mock.patch.object(hdp_steps, "require_agreement"),
        mock.patch.object(loop, "require_agreement"),
    ):
        return outcome(*args)


def test_the_check_fails_when_ranks_do_not_compare(run_ranks, prefix, tmp_path):
    def unchecked(num_ranks, function, *args):
        return run_ranks(num_ranks, outcome_unchecked, *args)

    run = arguments(prefix, hdp_strategy="static", hdp_tokens_per_rank=130)  # no rings
    with pytest.raises(AssertionError, match="nobody noticed"):
        check(unchecked, run, replace(run, seed=7))
    other = replace(run, data_path=(another_bin(tmp_path / "other", prefix),))
    with pytest.raises(AssertionError, match="nobody noticed"):
        check(unchecked, run, other)
