"""A corrupt document costs that document, a planner that fails one step's balance; both counted."""

from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_hdp.data.steps import planning
from tests.support.gradients import write_corpus
from tests.support.ranks import RankError
from tests.training.runs import LENGTHS, largest_difference, run, trained

MAKE_PLAN = planning.make_plan
STEPS = {"steps": 4, "global_batch_size": 4}


def test_corrupt_documents_are_skipped_alike_on_any_ranks(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, LENGTHS, corrupt=[1, 6])
    alone, _ = run_ranks(1, trained, run(prefix, **STEPS, hdp_tokens_per_rank=100))[0]
    three, output = run_ranks(3, trained, run(prefix, **STEPS))[0]
    assert [m.skipped_documents for m in three] == [m.skipped_documents for m in alone]
    assert three[-1].skipped_documents == 4  # two epochs
    assert [m.loss_tokens for m in three] == [m.loss_tokens for m in alone]
    assert three[-1].consumed_sequences == 16
    assert three[-1].consumed_tokens == 2 * (sum(LENGTHS) - LENGTHS[1] - LENGTHS[6])
    losses, expected = ([m.loss for m in one] for one in (three, alone))
    assert largest_difference(losses, expected) <= 1e-10
    for document in (1, 6):
        assert f"skipped corrupt document {document} of {prefix}" in output
    assert "token ids from 0 to 256" in output


def test_a_corrupt_document_may_be_twice_in_a_step(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, LENGTHS, corrupt=[1])
    twice = run(prefix, steps=1, global_batch_size=16)
    (metrics,), _ = run_ranks(2, trained, twice)[0]
    assert metrics.skipped_documents == 2
    assert metrics.tokens == 2 * (sum(LENGTHS) - LENGTHS[1])
    assert metrics.loss_tokens == metrics.tokens - 14


def test_too_many_corrupt_documents_in_a_row(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, LENGTHS, corrupt=range(8))
    arguments = run(prefix, **STEPS, hdp_corrupt_limit=5)
    with pytest.raises(RankError) as caught:
        run_ranks(2, trained, arguments)
    assert "6 corrupt documents in a row" in str(caught.value)
    assert "--hdp-corrupt-limit" in str(caught.value)
    (tmp_path / "some").mkdir()
    some = write_corpus(tmp_path / "some", LENGTHS, corrupt=range(5))
    records, _ = run_ranks(2, trained, run(some, **STEPS, hdp_corrupt_limit=5))[0]
    assert len(records) == 4


def steps_with_planner(arguments, odd_rank, verdicts):
    """Body of a rank: `trained`, the planner of one or all ranks raising or giving a broken plan.

    By the number of the call: 0 is the check at the start, n is step n.
    """
    is_odd, calls = odd_rank is None or dist.get_rank() == odd_rank, []

    def make_plan(problem, strategy):
        made, verdict = MAKE_PLAN(problem, strategy), None
        if strategy != "static" and is_odd:
            verdict = verdicts.get(len(calls))
            calls.append(strategy)
        if verdict == "raise":
            raise MemoryError("no room")
        return replace(made, sequences=0 * made.sequences) if verdict == "invalid" else made

    with mock.patch.object(planning, "make_plan", make_plan):
        return trained(arguments)


@pytest.mark.parametrize(
    "odd_rank, verdict",
    [
        *(pytest.param(one, "raise", marks=pytest.mark.slow) for one in (None, 1)),
        (None, "invalid"),
    ],
)
def test_a_failing_planner_costs_balance_only(run_ranks, tmp_path, odd_rank, verdict):
    arguments = run(write_corpus(tmp_path, LENGTHS), **STEPS)
    expected, _ = run_ranks(2, trained, arguments)[0]
    verdicts = {2: verdict, 4: verdict}
    found, output = run_ranks(2, steps_with_planner, arguments, odd_rank, verdicts)[0]
    assert [m.planner_failures for m in found] == [0, 1, 1, 2]
    losses, expected = ([m.loss for m in one] for one in (found, expected))
    assert largest_difference(losses, expected) <= 1e-10
    assert output.count("this step runs the static plan") == 2


def test_a_planner_that_fails_twice_in_a_row_is_fatal(run_ranks, tmp_path):
    arguments = run(write_corpus(tmp_path, LENGTHS), **STEPS)
    with pytest.raises(RankError) as caught:
        run_ranks(2, steps_with_planner, arguments, None, {2: "raise", 3: "raise"})
    assert "the planner failed in two steps in a row (MemoryError: no room)" in str(caught.value)
