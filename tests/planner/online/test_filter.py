"""What is learnt of a machine that is known: coefficients, slow ranks, and nothing from noise."""

from dataclasses import replace

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.presets import preset_lengths
from megatron_hdp.planner import LLAMA_7B, evaluate, tight_bound_s
from megatron_hdp.planner.online import COLUMNS, Corrections, FilterState, observe
from megatron_hdp.planner.online import filter as learning
from megatron_hdp.planner.online.fitting import fit
from tests.support.machine import train

CAPACITY = 8192
SLOW = 3
OTHER = replace(LLAMA_7B, a=1.7 * LLAMA_7B.a, b=1.3 * LLAMA_7B.b, g=0.004)


def batches(name, ranks, steps):
    longest = min(ranks * CAPACITY // 2, 2**18)
    return [
        preset_lengths(name, num_tokens=4 * ranks * CAPACITY, max_length=longest, seed=step)
        for step in range(steps)
    ]


def slowed(machine, ranks, speed=0.5):
    speeds = tuple(speed if rank == SLOW else 1.0 for rank in range(ranks))
    return replace(machine, rank_speeds=speeds)


def run(machines, noise=0.0, seed=0, name="github", ranks=16, base=LLAMA_7B):
    """Every step of a run: step, plan, machine, what is known, findings."""
    lengths = batches(name, ranks, len(machines))
    problem = {"ranks": ranks, "tokens_per_rank": CAPACITY}
    return list(train(lengths, machines, base, noise, seed, **problem))


def over_bound(made, machine):
    problem = {"ranks": made.num_ranks, "tokens_per_rank": CAPACITY}
    bound_s = tight_bound_s(made.lengths, cost_model=machine, **problem)
    return evaluate(made, machine).makespan_s / bound_s


def found(steps):
    """Steps, from 0, in which each rank's speed changed."""
    return [(step, one.rank) for step, *_, findings in steps for one in findings]


@pytest.mark.parametrize("name", ["github", "byted"])
@pytest.mark.parametrize("ranks", [16, 256])
def test_a_slow_rank_is_found_and_its_work_moves(name, ranks):
    slow_from = 4
    machines = [OTHER] * slow_from + [slowed(OTHER, ranks)] * 8
    steps = run(machines, name=name, ranks=ranks)
    assert found(steps) == [(slow_from + 2, SLOW)]
    (finding,) = steps[slow_from + 2][-1]
    assert (finding.before, finding.now, finding.steps) == (1.0, 0.5, 3)
    ratios = [over_bound(made, machine) for _, made, machine, *_ in steps]
    assert min(ratios[slow_from : slow_from + 4]) > 1.5  # plans follow two steps later
    assert max(ratios[slow_from + 4 :]) < 1.05


def test_one_that_was_slow_from_the_start_is_found_in_the_third_step():
    steps = run([slowed(OTHER, 16)] * 8)
    assert found(steps) == [(2, SLOW)]
    assert max(over_bound(made, machine) for _, made, machine, *_ in steps[4:]) < 1.05


def test_one_that_recovers_gets_its_work_back():
    steps = run([slowed(LLAMA_7B, 16)] * 8 + [LLAMA_7B] * 8)
    assert found(steps) == [(2, SLOW), (10, SLOW)]
    *_, seen, _ = steps[-1]
    assert seen.at(16).speeds == ()


def test_one_that_gets_slower_and_slower_is_told_again_and_again():
    machines = [slowed(LLAMA_7B, 16, 0.96**step) for step in range(24)]
    steps = run(machines, noise=0.02)
    changes = found(steps)
    assert len(changes) >= 3 and {rank for _, rank in changes} == {SLOW}
    *_, seen, _ = steps[-1]
    ((rank, speed),) = seen.at(26).speeds
    assert rank == SLOW and abs(speed / 0.96**23 - 1) < 0.25


LONG = [pytest.param(ranks, 200, marks=pytest.mark.slow) for ranks in (16, 1024)]


@pytest.mark.parametrize("noise", [0.05, 0.1])
@pytest.mark.parametrize(("ranks", "steps"), [(2, 60), (16, 60), (128, 30), *LONG])
def test_noise_changes_nothing(noise, ranks, steps):
    *_, (*_, seen, _) = run([LLAMA_7B] * steps, noise, ranks=ranks)
    assert seen.num_changes == 0


@pytest.mark.parametrize("threshold", ["SPEED_FLOOR", "AGREE"])
def test_without_hysteresis_noise_would(monkeypatch, threshold):
    monkeypatch.setattr(learning, threshold, 1 if threshold == "AGREE" else 0.0)
    monkeypatch.setattr(learning, "DEVIATIONS", 1.0)
    *_, (*_, seen, _) = run([LLAMA_7B] * 40, 0.1)
    assert seen.num_changes > 0


@pytest.mark.parametrize("noise", [0.05, 0.1])
@pytest.mark.parametrize("ranks", [16, 128])
def test_a_slow_rank_is_found_in_noise(noise, ranks):
    steps = run([LLAMA_7B] * 6 + [slowed(LLAMA_7B, ranks)] * 14, noise, ranks=ranks)
    changes = found(steps)
    assert {rank for _, rank in changes} == {SLOW}
    assert changes[0][0] - 6 < 5
    assert over_bound(*steps[-1][1:3]) < 1.06


def test_the_cost_model_is_found():
    *_, (_, made, _, seen, _) = run([OTHER] * 12)
    learnt = seen.at(20).of(LLAMA_7B, 16)
    expected, told = evaluate(made, OTHER), evaluate(made, learnt)
    assert told.makespan_s == pytest.approx(expected.makespan_s, rel=0.01)
    assert learnt.a == pytest.approx(OTHER.a, rel=0.02)
    assert seen.num_changes == 1


def test_a_drift_is_followed_in_few_changes():
    machines = [replace(LLAMA_7B, b=LLAMA_7B.b * 1.02**step) for step in range(60)]
    *_, (_, made, machine, seen, _) = run(machines, noise=0.03)
    told = evaluate(made, seen.at(62).of(LLAMA_7B, 16)).makespan_s
    assert told == pytest.approx(evaluate(made, machine).makespan_s, rel=0.15)
    assert seen.num_changes < 20


def test_a_first_step_that_compiles_counts_for_nothing():
    compiling = replace(LLAMA_7B, a=10 * LLAMA_7B.a, b=20 * LLAMA_7B.b)
    *_, (*_, seen, _) = run([compiling] + [LLAMA_7B] * 10)
    assert seen.num_changes == 0


def rows(ranks, steps, seed):
    """Observations of ranks with mixtures of their own, one of them slow."""
    generator = np.random.default_rng(seed)
    work = generator.uniform(0.1, 1.0, (steps, ranks, 3)) * [1.0, 1.0, 8.0]
    seconds = work @ [1.4, 0.7, 0.05] * np.exp(0.05 * generator.normal(size=(steps, ranks)))
    seconds[:, 0] *= 2.5
    return np.concatenate([work, seconds[..., None]], axis=2)


@settings(max_examples=40)
@given(st.integers(2, 70), st.integers(3, 12), st.integers(0, 2**20), st.randoms())
def test_the_order_of_ranks_does_not_matter(ranks, steps, seed, random):
    order = list(range(ranks))
    random.shuffle(order)
    plain = shuffled = FilterState.begin(LLAMA_7B, ranks)
    for observations in rows(ranks, steps, seed):
        plain, here = observe(plain, observations)
        shuffled, there = observe(shuffled, observations[order])
        assert sorted(one._replace(rank=order[one.rank]) for one in there) == sorted(here)
        back = np.argsort(order)
        again = replace(
            shuffled,
            speeds=shuffled.speeds[back],
            ages=shuffled.ages[back],
            rows=shuffled.rows[:, back],
        )
        assert orjson.dumps(again.to_record()) == orjson.dumps(plain.to_record())


def test_the_order_of_ranks_changes_no_bit_of_a_fit():
    window = rows(67, 8, 3)
    order = np.random.default_rng(0).permutation(67)
    given = np.array([1.0, 1.0, 0.01]), np.ones(67), learning.SPEED_FLOOR
    here = fit(window[..., :-1], window[..., -1], *given)
    there = fit(window[:, order, :-1], window[:, order, -1], *given)
    assert here.coefficients.tobytes() == there.coefficients.tobytes()
    assert here.excess[:, order].tobytes() == there.excess.tobytes()
    assert here.noise == there.noise


def test_a_record_gives_the_same_state():
    state = FilterState.begin(slowed(LLAMA_7B, 5), 5)
    for observations in rows(5, 10, 1):
        state, _ = observe(state, observations)
    record = orjson.loads(orjson.dumps(state.to_record()))
    again = FilterState.from_record(record)
    assert again.to_record() == state.to_record()
    for observations in rows(5, 3, 2):
        state, findings = observe(state, observations)
        again, others = observe(again, observations)
        assert findings == others and again.to_record() == state.to_record()
    assert state.began_as(FilterState.begin(slowed(LLAMA_7B, 5), 5))
    for other in (LLAMA_7B, slowed(OTHER, 5)):
        assert not state.began_as(FilterState.begin(other, 5))


def test_a_rank_that_cannot_tell_leaves_all_as_it_was():
    state = FilterState.begin(LLAMA_7B, 3)
    observations = np.ones((3, len(COLUMNS)))
    for value in (np.nan, np.inf, 0.0):
        observations[1, -1] = value
        assert observe(state, observations) == (state, [])
    with pytest.raises(ValueError, match=r"shape \(2, 4\), expected \(3, 4\)"):
        observe(state, np.ones((2, 4)))


@pytest.mark.parametrize("num_idle", [1, 2, 3])
def test_a_rank_that_ran_nothing_says_nothing_of_itself(num_idle):
    """It did so for a few steps, and keeps the speed that it had; others are judged as ever."""
    state, idle = FilterState.begin(LLAMA_7B, 5), slice(5 - num_idle, 5)
    for observations in rows(5, 8, 0):  # one of them is found to be slow, behind which some idle
        state, _ = observe(state, observations)
    speeds = state.speeds
    assert speeds[0] < 0.5 and (speeds[1:] == 1).all()
    for observations in rows(5, 20, 1):
        observations[idle, :-1], observations[idle, -1] = 0.0, 1e-4
        state, findings = observe(state, observations)
        assert state.error < 0.5 and np.isfinite(state.coefficients).all(), findings
    assert (state.speeds[1:] == 1).all() and state.speeds[0] == pytest.approx(speeds[0], rel=0.1)
    nothing = np.concatenate([np.zeros((5, len(COLUMNS) - 1)), np.ones((5, 1))], axis=1)
    assert observe(state, nothing) == (state, [])


def test_corrections_change_what_they_name():
    base = replace(LLAMA_7B, block_s=1e-5, b_experts=1e-6)
    found = Corrections(attention_factor=2.0, linear_factor=3.0, g=0.5, speeds=((1, 0.5),)).of(
        base, 3
    )
    assert (found.a, found.block_s) == (2 * base.a, 2e-5)
    assert found.linear_s_per_token == pytest.approx(3 * base.linear_s_per_token)
    assert (found.g, found.rank_speeds) == (0.5, (1.0, 0.5, 1.0))
    assert found.kv_bytes_per_token == base.kv_bytes_per_token
    assert Corrections().of(base, 3) is base
