"""Megatron's assignment becomes a plan that means the same, or an error that says why not."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.megatron import hybrid_cp
from megatron_hdp.megatron.hybrid_cp import plan_hybrid_cp
from megatron_hdp.planner import LLAMA_7B, evaluate


def planned(lengths, ranks=8, tokens_per_rank=1000):
    return plan_hybrid_cp(
        np.array(lengths), ranks=ranks, tokens_per_rank=tokens_per_rank, cost_model=LLAMA_7B
    )


def scheduler_that_answers(*groups):
    class Scheduler:
        def __init__(self, tokens_per_rank, group):
            assert (tokens_per_rank, group.size()) == (1000, 2)

        def get_groups_and_subsamples(self, numbered, config):
            return None, list(groups)

    return lambda: Scheduler


def test_a_worked_example(monkeypatch):
    groups = ([[0, 3], [0, 3]], [[1], [2, 4]])  # by group and rank
    monkeypatch.setattr(hybrid_cp, "_scheduler_class", scheduler_that_answers(*groups))
    made = planned([1600, 900, 10, 1200, 20], ranks=2)
    made.validate()
    assert made.strategy == "megatron-hybrid-cp"
    assert made.sequences.tolist() == [0, 3, 1, 2, 4]
    assert made.ranks.tolist() == [0, 1, 0, 1, 0, 1, 1]
    assert np.diff(made.rank_offsets).tolist() == [2, 2, 1, 1, 1]
    evaluation = evaluate(made, LLAMA_7B)
    assert made.summary["makespan_s"] == evaluation.makespan_s
    assert made.summary["efficiency"] == evaluation.efficiency
    assert made.summary["ring_tokens"] == 1600 + 1200
    assert made.summary["max_tokens_on_a_rank"] == 900


def test_ranks_that_disagree_on_the_order_are_refused(monkeypatch):
    groups = ([[0, 1], [1, 0]],)
    monkeypatch.setattr(hybrid_cp, "_scheduler_class", scheduler_that_answers(*groups))
    with pytest.raises(ValueError, match="sequence 1 to ranks .0, 1. at different positions"):
        planned([1600, 1600], ranks=2)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8, 16, 6, 7]),
    st.lists(st.integers(1, 100) | st.integers(1, 800), min_size=1, max_size=60),
)
def test_every_answer_is_a_plan_that_runs(ranks, lengths):
    try:
        made = planned(lengths, ranks=ranks, tokens_per_rank=100)
    except ValueError as error:
        assert "BalancedCPScheduler gave up" in str(error)
        return
    made.validate()
    degrees = set(np.diff(made.rank_offsets).tolist())
    assert all(degree & (degree - 1) == 0 or degree == ranks for degree in degrees)
    assert evaluate(made, LLAMA_7B).makespan_s > 0


def test_the_installed_scheduler_plans_a_batch():
    lengths = np.random.default_rng(0).integers(1, 8000, size=200)
    one, other = planned(lengths), planned(lengths)
    assert one.fingerprint() == other.fingerprint()
    assert set(np.diff(one.rank_offsets).tolist()) <= {1, 2, 4, 8}
    assert one.summary["planning_ms"] > 0


def test_what_the_scheduler_cannot_do_is_said():
    with pytest.raises(ValueError, match=r"gave up on 1 sequences, .* 5,500 tokens, and 6 ranks"):
        planned([5500], ranks=6)  # needs eight


def test_without_megatron_core_the_remedy_is_named(monkeypatch):
    name = "megatron.core.pipeline_parallel.hybrid_cp_schedule"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"does not import \(.*\): pip install 'megatron-core"):
        planned([10])
