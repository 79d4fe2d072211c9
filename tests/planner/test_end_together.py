"""Which ranks may reduce gradients inside of their last backward: where it cannot hang.

No CPU shows it: gloo's threads send whatever a rank's main thread waits for. So it is proved on a
model of streams. Where a driver waits for its device, less can run; waiting after every launch is
the worst case, and what does not hang then never does.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.planner import CostModel, plan
from megatron_hdp.planner.lockstep import PADDING, begin_together, end_together, slots
from tests.planner.launch_model import Step, hangs
from tests.planner.problems import rings_of
from tests.support.examples import some
from tests.support.random_plans import random_plan

LAYERS = 2


def always():
    return True


def step_of(made, stages=1, lockstep_ranks=1, layers=LAYERS):
    aligned = stages > 1 or lockstep_ranks > 1
    lists = slots(made, aligned=aligned, lockstep_ranks=lockstep_ranks)
    return Step(made, lists, stages, layers, lockstep_ranks)


def rule(step):
    return end_together(step.plan, step.slots, lockstep_ranks=step.lockstep_ranks)


def two_rings():
    """Rank 1 runs a ring with rank 0, which has then ended, and another one with rank 2."""
    return rings_of([[0, 1], [1, 2]], [4, 4])


def test_the_hang_that_the_rule_prevents():
    step = step_of(two_rings())
    assert rule(step).tolist() == [False, True, True]
    assert hangs(step, [True, True, True], always), "rank 0 owes its ring the first layer"
    assert not hangs(step, rule(step), always)
    assert not hangs(step, [True, True, True], lambda: False), "it takes a driver that waits"


def test_a_ring_that_all_its_members_end_with_may_overlap():
    made = random_plan(np.array([8]), ranks=2, tokens_per_rank=4)
    step = step_of(made)
    assert rule(step).all() and not hangs(step, rule(step), always)


def test_in_lockstep_what_ranks_beside_wait_for_counts_too():
    """Ranks 0 and 1 share experts; rank 1's last ring is not the last of rank 2, nor of 3 then."""
    made = rings_of([[1, 2], [2]], [4, 4], num_ranks=4)
    lists = [np.array(one) for one in ([PADDING], [0], [0, 1], [PADDING, PADDING])]
    step = Step(made, lists, 1, LAYERS, 2)
    assert end_together(made, lists).tolist() == [True, False, True, True]
    assert hangs(step, end_together(made, lists), always)
    assert rule(step).tolist() == [False, False, True, True]
    assert not hangs(step, rule(step), always)


def test_reductions_of_two_communicators_begin_in_one_order_everywhere():
    """Ranks 2 and 3 begin after their last backward: dense and experts as the others' layers do."""
    made = plan([4, 4, 4, 4], ranks=4, tokens_per_rank=4)
    step = step_of(made, lockstep_ranks=2)
    overlaps = [True, True, False, False]
    assert hangs(step, overlaps, always, "by kind")
    assert not hangs(step, overlaps, always, "by layer")


@settings(max_examples=some(150))
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=14),
    ranks=st.sampled_from([2, 3, 4, 6]),
    stages=st.sampled_from([1, 1, 2, 3]),
    lockstep_ranks=st.sampled_from([1, 1, 2, 3]),
    density=st.sampled_from([0.1, 0.5, 1.0]),
    seed=st.integers(0, 9999),
)
def test_random_plans_do_not_hang(lengths, ranks, stages, lockstep_ranks, density, seed):
    lockstep_ranks = lockstep_ranks if ranks % lockstep_ranks == 0 else 1
    made = random_plan(np.array(lengths), ranks=ranks, tokens_per_rank=64, seed=seed)
    step = step_of(made, stages, lockstep_ranks)
    random = np.random.default_rng(seed)
    assert not hangs(step, rule(step), lambda: bool(random.random() < density))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("lockstep_ranks", [1, 2])
def test_no_rank_that_the_rule_holds_back_may_overlap(stages, lockstep_ranks):
    """The rule is not stricter than it must be: let one more rank overlap, and it hangs."""
    num_held_back = 0
    for seed in range(60):
        lengths = np.random.default_rng(seed).integers(1, 60, 8)
        made = random_plan(lengths, ranks=4, tokens_per_rank=64, seed=seed)
        step = step_of(made, stages, lockstep_ranks)
        found = rule(step)
        for rank in np.flatnonzero(~found):
            num_held_back += 1
            assert hangs(step, found | (np.arange(4) == rank), always)
    assert num_held_back >= 20, num_held_back


def test_our_plans_end_together():
    """So the rule costs nothing: the short sequences, which need no ring, come last."""
    random = np.random.default_rng(0)
    model = CostModel.of_tensor_ranks(
        1, num_layers=32, hidden_size=4096, num_parameters=7 * 10**9, kv_bytes_per_token=131072
    )
    for strategy, stages in (("dp-balance", 1), ("pp-balance", 4), ("static", 1)):
        shares = []
        for ranks in (8, 32, 64):
            lengths = np.minimum(random.lognormal(7, 1.6, 12 * ranks).astype(np.int64) + 1, 65536)
            arguments = {"ranks": ranks, "tokens_per_rank": 16384, "pipeline_stages": stages}
            made = plan(lengths, strategy=strategy, cost_model=model, **arguments)
            shares.append(rule(step_of(made, stages)).mean())
            assert begin_together(made, step_of(made, stages).slots)
        assert min(shares) > 0.9, (strategy, shares)


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_begin_together_if_every_first_ring_does(stages):
    answers = []
    for seed in range(60):
        lengths = np.random.default_rng(seed).integers(1, 60, 4)
        made = random_plan(lengths, ranks=4, tokens_per_rank=64, seed=seed)
        lists = step_of(made, stages).slots
        expected = all(
            lists[member][0] == first
            for first in {one[0] for one in lists} - {PADDING}
            for member in made.ranks[made.rank_offsets[first] : made.rank_offsets[first + 1]]
        )
        assert begin_together(made, lists) == expected
        answers.append(expected)
    assert sum(answers) > 5 and (stages == 2 or sum(answers) < 55)  # pipelines run in rounds
