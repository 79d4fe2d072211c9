"""Losses of preferences in a stock checkout: the same steps on any ranks, and those of our command.

Needs MEGATRON_LM_PATH, see `test_training`.
"""

import json
import math
from functools import partial

import pytest

from tests.data.prepare.corpora import run as prepare_rows
from tests.megatron.lm.runs import (
    HDP,
    LENGTHS,
    MARKS,
    MODEL,
    SHARDED,
    STAGES,
    TENSOR,
    TRAINING,
    drive,
    own,
    planned,
    scalars,
    wanted,
)
from tests.support.gradients import write_corpus
from tests.support.preferences import write_rows

pytestmark = [*MARKS, pytest.mark.slow]
STEPS = 4
LAYOUTS = {  # flags, ranks, tokens of a rank
    "four": ([], 4, "100"),
    "sharded": (SHARDED, 2, "160"),
    "tensor": (TENSOR, 4, "160"),
    "stages": (STAGES, 4, "160"),
    "adapters": (["--lora-rank", "2", "--lora-alpha", "4"], 2, "160"),
    "kto": (["--hdp-objective", "kto", "--hdp-undesirable-weight", "0.1"], 2, "160"),
}
BESIDE = {"adapters": "adapters alone", "kto": "kto alone"}
"""Those that another run of one rank is compared with."""


ANSWERS, RUN = "HdpSteps.answers", "HdpSteps.run"
LOST = {  # whose rank dies in which call, and how many run
    "in the reference": (2, ANSWERS, 3),
    "in the reference of an evaluation": (0, ANSWERS, 5),
    "in the step": (2, RUN, 4),  # one is of an evaluation; another rank joins
}


def preferred_over(prefix, folder, name, ranks=1, tokens="400", flags=(), reference="base", **more):
    """A run of DPO over pairs, from the checkpoint of a run on text."""
    data = ["--data-path", prefix, "--metrics-path", str(folder / f"{name}.jsonl")]
    objective = ["--hdp-objective", "dpo", "--hdp-reference-checkpoint", str(folder / reference)]
    given = [*HDP, tokens, *objective, *flags, "--split", "80,20,0"]
    if "--lora-rank" in flags:
        given += ["--pretrained-checkpoint", str(folder / "base")]
    elif "load" not in more:
        given += ["--load", str(folder / "base"), "--finetune"]
    return planned(folder, name, ranks, given, data=data, **more)


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("preference")
    write_corpus(folder, LENGTHS)
    rows = write_rows(folder / "pairs.jsonl", 60)
    prefix = prepare_rows(rows, folder / "cache", format="pairs").prefix
    preferred = partial(preferred_over, prefix, folder)
    plan = [planned(folder, "text", 1, [*HDP, "400"], steps=2, save="base")]
    plan.append(preferred("one", save="saved"))
    plan.append(preferred("again", flags=["--ckpt-step", "2"], load="saved", save="saved"))
    for name in wanted(request, LAYOUTS):
        flags, ranks, tokens = LAYOUTS[name]
        if name in BESIDE:
            plan.append(preferred(BESIDE[name], flags=flags))
        plan.append(preferred(name, ranks, tokens, flags))
    for name in wanted(request, LOST):
        member, function, calls = LOST[name]
        fault = {"function": function, "step": calls}
        fault["module"] = "megatron_hdp.megatron.step.hdp_steps"
        more = {"survives": {str(member): fault}}
        more |= {"replaces": True, "waits_at": STEPS} if name == "in the step" else {}
        plan.append(preferred(name, 4, "100", ["--hdp-survive"], **more))
    plan.append(ours(prefix, folder))
    drive(folder, plan)
    return folder


def ours(prefix, folder):
    steps = TRAINING[TRAINING.index("--lr ") : TRAINING.index("--split")].split()
    flags = [*HDP, "400", "--global-batch-size", "8", "--train-iters", str(STEPS), "--finetune"]
    flags += ["--make-vocab-size-divisible-by", "384", "--split", "80,20,0", "--eval-iters", "1"]
    flags += ["--eval-interval", "2", "--load", str(folder / "base"), "--data-path", prefix]
    flags += ["--hdp-objective", "dpo", "--hdp-reference-checkpoint", str(folder / "base")]
    return own(folder, 1, [*MODEL.split(), *steps, *flags])


def lines_of(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def require_same(found, expected, validated=(2, 4)):
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        for key in (
            *("loss", "grad_norm", "reward_margin", "reward_accuracy", "kto_divergence"),
            *("pairs", "validation_loss", "validation_reward_margin"),
        ):
            if key.startswith("validation") and one["step"] not in validated:
                continue
            if other[key] is None:
                assert one[key] is None, key
            else:
                assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), (one, key)


def test_the_first_step_stands_where_the_reference_does(trained):
    first, *_, last = lines_of(trained, "one")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and first["pairs"] == 8
    assert first["reward_margin"] == pytest.approx(0.0, abs=1e-6) and last["reward_margin"] != 0
    logged = scalars(trained, "one")
    assert logged["lm loss"][1] == pytest.approx(math.log(2), abs=1e-6)
    assert logged["hdp/reward-margin"][STEPS] == pytest.approx(last["reward_margin"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_has_the_steps_of_one_rank(trained, name):
    found = lines_of(trained, name)
    require_same(found, lines_of(trained, BESIDE.get(name, "one")))
    assert name != "kto" or found[-1]["kto_divergence"] > 1e-2


@pytest.mark.parametrize("name", LOST)
def test_a_rank_is_lost(trained, name):
    require_same(lines_of(trained, name), lines_of(trained, "one"))
    said = (trained / f"log {name}.said").read_text()
    assert "was killed by SIGKILL" in said
    assert ("HDP ranks join" in said) == (name == "in the step")


def test_a_resumed_run_computes_no_answer_again(trained):
    require_same(lines_of(trained, "again"), lines_of(trained, "one")[2:])
    text = (trained / "log again.0").read_text()
    assert "reference: has run over the answers" not in text


def test_our_command_trains_the_same(trained):
    """Whose evaluations begin at the same pairs each time; Megatron's go on."""
    require_same(lines_of(trained, "own"), lines_of(trained, "one"), validated=(2,))
