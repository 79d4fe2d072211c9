"""Each primitive by its name, built in and in the user's own words."""

import re

import numpy as np
import pytest

from megatron_hdp.data.mixture import Position, SeenLosses
from megatron_hdp.data.steps import PrimitiveError, costed
from megatron_hdp.planner import CostModel, plan
from tests.support.thread_plane import WEIGHTS, plan_settings, planner_of, setup_of, write_pairs

RECIPE = """
import numpy as np
from megatron_hdp.planner import plan

def only_web(weights, position, losses):
    assert list(weights) == ["web", "chat", "code"]
    return {"web": 2.0}

def after_losses(weights, position, losses):
    return {"web": 1.0, "code": sum(one["code"] for one in losses)}

def cubic(lengths):
    return 1e-9 * lengths.astype(float) ** 3 + 1e-6 * lengths

def statically(lengths, settings):
    return plan(lengths, ranks=settings.num_ranks, tokens_per_rank=settings.tokens_per_rank,
                strategy="static", max_length=settings.max_length)

def of_other_lengths(lengths, settings):
    return statically(lengths[:-1], settings)

def turned(made, position, settings):
    return (np.arange(made.num_ranks) + position.steps + 1) % made.num_ranks

def twice(made, position, settings):
    return [0] * made.num_ranks

def nowhere(from_plane):
    return []

def tensor(from_plane):
    return ["tensor"]


def whole(planner, position):
    from megatron_hdp.data.steps import PlannedStep
    step = planner.mix(position)
    assert (planner.cost(step.lengths) > 0).all()
    made = planner.distribute(planner.balance(step.lengths, "naive"), position)
    return PlannedStep(step, made)

def breaks(*arguments):
    raise KeyError("no such thing")

def unknown(weights, position, losses):
    return {"pages": 1.0}

def nothing(weights, position, losses):
    return {"web": 0.0}

def negative(weights, position, losses):
    return {"web": -1.0}

def sideways(from_plane):
    return ["sideways"]
"""


@pytest.fixture
def planner(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)

    def made(**functions):
        behind = functions.pop("behind", 4)
        named = "".join(f", {name}: recipe.py:{one}" for name, one in functions.items())
        more = f"{WEIGHTS}\nprimitives: {{losses-behind: {behind}{named}}}"
        return planner_of(setup_of(write_pairs(tmp_path, more=more)))

    return made


def test_all_of_them_make_a_step(planner):
    built_in = planner()
    step = built_in.mix(Position())
    assert step.weights == (0.5, 0.2, 0.3)
    assert built_in.cost(np.array([100])) == pytest.approx([1e-9 * 100**2 + 1e-6 * 100])
    made = built_in.distribute(built_in.balance(step.lengths), step.before)
    planned = built_in.plan(Position())
    assert planned.plan.fingerprint() == made.fingerprint() and planned.failure is None
    (share,) = built_in.shares(planned).of([0])
    assert share.hdp_rank == 0
    assert built_in.broadcast_at(from_plane=False) == {"tensor"}
    assert built_in.broadcast_at(from_plane=True) == frozenset()
    assert built_in.losses_behind is None


def test_mix_gives_the_weights(planner):
    step = planner(mix="only_web").mix(Position())
    assert step.weights == (1.0, 0.0, 0.0)
    assert set(step.sources.tolist()) == {0}


def test_mix_sees_losses_that_lie_behind(planner):
    follows = planner(mix="after_losses", behind=2)
    assert follows.losses_behind == 2
    seen = SeenLosses(2)
    for number in range(3):
        seen = seen.with_step(number, {"code": 10.0**number})
    weights = follows.mix(Position(steps=3, losses=seen)).weights
    assert weights == pytest.approx((1 / 12, 0, 11 / 12))  # of steps 0 and 1, not 2
    assert follows.mix(Position(steps=1, losses=seen)).weights == (1.0, 0.0, 0.0)
    assert not follows.is_over(Position(steps=3, losses=seen))


def test_cost_enters_the_cost_model(planner):
    model = CostModel(a=1e-9, b=1e-6, kv_bytes_per_token=100, g=1e-3)
    spec = planner(cost="cubic").corpus.spec.primitives
    found = costed(model, spec, 100)
    assert found.g == model.g and found.kv_bytes_per_token == model.kv_bytes_per_token
    lengths = np.array([1, 7, 50, 100])
    expected = 1e-9 * lengths.astype(float) ** 3 + 1e-6 * lengths
    settings = plan_settings(cost_model=found)
    of_planner = planner(cost="cubic")
    of_planner.settings = settings
    assert of_planner.cost(lengths) == pytest.approx(expected, rel=2e-3)
    assert costed(model, planner().corpus.spec.primitives, 100) is model


def test_balance_makes_the_plan(planner):
    planned = planner(balance="statically").plan(Position())
    lengths = planned.step.lengths
    expected = plan(lengths, ranks=4, tokens_per_rank=64, strategy="static", max_length=100)
    assert planned.failure is None and planned.plan.fingerprint() == expected.fingerprint()


def test_a_plan_that_breaks_a_rule_is_replaced(planner):
    built_in, wrong = planner(), planner(balance="of_other_lengths")
    planned = wrong.plan(Position())
    assert planned.failure is not None and "expected a plan for the step" in planned.failure
    expected = built_in.statically(Position(), "why").plan
    assert planned.plan.fingerprint() == expected.fingerprint()


def test_distribute_says_where_ranks_of_the_plan_run(planner):
    built_in, turned = planner(), planner(distribute="turned")
    here, there = built_in.plan(Position()), turned.plan(Position())
    assert here.plan.fingerprint() != there.plan.fingerprint()
    ours = built_in.shares(here).of(range(4))
    theirs = turned.shares(there).of(range(4))
    for rank in range(4):
        moved = theirs[(rank + 1) % 4]
        assert moved.ids.tolist() == ours[rank].ids.tolist()
        assert moved.ring.tolist() == [(one + 1) % 4 for one in ours[rank].ring.tolist()]
    later = turned.plan(here.step.after)
    assert later.plan.fingerprint() == turned.plan(here.step.after).plan.fingerprint()


@pytest.mark.parametrize("from_plane", [True, False])
def test_broadcast_at_names_axes(planner, from_plane):
    assert planner(**{"broadcast-at": "nowhere"}).broadcast_at(from_plane=from_plane) == set()
    assert planner(**{"broadcast-at": "tensor"}).broadcast_at(from_plane=from_plane) == {"tensor"}


def test_plan_does_all_of_it(planner):
    planned = planner(plan="whole").plan(Position())
    lengths = planned.step.lengths
    model = plan_settings().cost_model
    expected = plan(
        lengths, ranks=4, tokens_per_rank=64, strategy="naive", max_length=100, cost_model=model
    )
    assert planned.plan.fingerprint() == expected.fingerprint()


@pytest.mark.parametrize(
    ("primitive", "function", "message"),
    [
        ("mix", "unknown", "mix: found {'pages': 1.0}, expected a weight for each of web, chat"),
        ("mix", "nothing", "mix: found no weight above 0 for step 1, expected at least one"),
        ("mix", "negative", "mix: found the weight -1.0 of 'web', expected a finite number"),
        ("mix", "breaks", "recipe.py:breaks raised KeyError: 'no such thing' in .*, line "),
        ("distribute", "twice", r"distribute: found \[0, 0, 0, 0\], expected each of the"),
        ("plan", "breaks", "plan: .*raised KeyError"),
    ],
)
def test_what_cannot_be_used_is_told(planner, primitive, function, message):
    with pytest.raises(PrimitiveError, match=message):
        planner(**{primitive: function}).plan(Position())


def test_an_unknown_axis_is_told(planner):
    with pytest.raises(PrimitiveError, match="found .'sideways'., expected some of tensor"):
        planner(**{"broadcast-at": "sideways"}).broadcast_at(from_plane=True)


def test_a_function_that_is_not_there_is_told(planner, tmp_path):
    with pytest.raises(PrimitiveError, match="mix: found no function lost in .*recipe.py"):
        planner(mix="lost")
    (tmp_path / "data.yaml").unlink()
    path = write_pairs(tmp_path, more=f"{WEIGHTS}\nprimitives: {{mix: no_such_module:f}}")
    with pytest.raises(PrimitiveError, match="cannot be imported .ModuleNotFoundError.*PYTHONPATH"):
        planner_of(setup_of(path))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{mix: recipe.py}", "mix: found 'recipe.py', expected MODULE:FUNCTION or FILE.py:FUNC"),
        ("{mix: 'a:b c'}", "mix: found 'a:b c', expected MODULE:FUNCTION"),
        ("{mx: a:b}", "unknown key of primitives 'mx': did you mean 'mix'"),
        ("{losses-behind: 1}", "losses-behind: found '?1'?, expected a whole number from 2 on"),
    ],
)
def test_the_file_is_checked(tmp_path, value, message):
    path = write_pairs(tmp_path, more=f"{WEIGHTS}\nprimitives: {value}")
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}, line 6: .*{message}"):
        setup_of(path)
