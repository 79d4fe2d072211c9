"""Adapters in a stock Megatron-LM: the losses of one rank, and checkpoints that hold them alone.

Needs what test_training.py needs.
"""

import pytest

from megatron_hdp.convert.adapters import record_of
from tests.megatron.lm.runs import (
    HDP,
    LENGTHS,
    MARKS,
    MODEL,
    STAGES,
    TENSOR,
    drive,
    planned,
    require_same,
    require_same_states,
    scalars,
    weights,
)
from tests.support.gradients import write_corpus

pytestmark = [*MARKS, pytest.mark.slow]

SIZES = ["--make-vocab-size-divisible-by", "384"]  # the same vocabulary in every layout
ADAPTERS = ["--lora-rank", "4", "--lora-alpha", "8"]
EXPERTS = f"""{MODEL} --num-experts 4 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall"""
ONE = [*HDP, "256", *SIZES]
ACROSS = [*ONE, "--expert-model-parallel-size", "2"]
LAYOUTS = {
    "tensor": (2, [*ONE, *TENSOR, "--make-vocab-size-divisible-by", "192"]),
    "stages": (4, [*HDP, "160", *SIZES, *STAGES]),
}
REFUSED = {
    "rank": "found --lora-rank 3, expected --lora-rank 4 --lora-alpha 8 --lora-targets",
    "whole": "holds adapters alone, expected the weights of a whole model: add --lora-rank 4",
    "base": "holds the weights of a whole model, expected adapters (--lora-rank)",
    "none": "holds no checkpoint, expected the weights that adapters are trained beside",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of one rank, of a base, its adapters in one go and resumed; of experts; of wrong flags."""
    runs = tmp_path_factory.mktemp("adapters")
    write_corpus(runs, LENGTHS)
    beside = [*ADAPTERS, "--pretrained-checkpoint", str(runs / "base")]
    plan = [
        planned(runs, "base", 1, SIZES, plugin=False, save="base", steps=2),
        planned(runs, "one", 1, [*ONE, *beside], save="one"),
        planned(runs, "half", 2, [*HDP, "160", *SIZES, *beside], save="half"),
        planned(runs, "experts base", 1, SIZES, model=EXPERTS, plugin=False, save="e", steps=2),
    ]
    for name, (ranks, flags) in LAYOUTS.items():
        flags = [*flags, *beside, "--ckpt-step", "2"]
        plan.append(planned(runs, name, ranks, flags, load="half", save=name))
    experts = [*ADAPTERS, "--pretrained-checkpoint", str(runs / "e")]
    for name, ranks, flags in (("experts one", 1, ONE), ("experts apart", 2, ACROSS)):
        plan.append(planned(runs, name, ranks, [*flags, *experts], model=EXPERTS))
    wrong = {
        "rank": ("half", [*ADAPTERS, *beside, "--lora-rank", "3"]),
        "whole": ("half", []),
        "base": ("base", beside),
        "none": ("half", [*ADAPTERS, "--pretrained-checkpoint", str(runs / "nothing")]),
    }
    for name, (load, flags) in wrong.items():
        more = {"load": load, "save": f"refused {name}", "exits": [1]}
        plan.append(planned(runs, f"refused {name}", 1, [*ONE, *flags], **more))
    drive(runs, plan)
    return runs


@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_on_another_layout(runs, name):
    one = scalars(runs, "one")
    require_same(scalars(runs, "half"), one, rel=2e-6)
    require_same(scalars(runs, name), one, rel=2e-6, steps=(3, 4))
    require_same_states(runs, name, "one", iteration=4, rel=1e-4)


def test_experts_across_ranks(runs):
    one = scalars(runs, "experts one")
    require_same(scalars(runs, "experts apart"), one, rel=1e-5)


def test_a_checkpoint_holds_adapters_alone(runs):
    """As `megatron-hdp convert` finds them; the base is trained no further."""
    held = [name for name in weights(runs, "one") if not name.startswith("optimizer")]
    held = [name for name in held if "rng_state" not in name and "rerun" not in name]
    assert held and all(name.rpartition(".")[-1] in ("lora_a", "lora_b") for name in held)
    (place,) = (runs / "one").glob("iter_0000004")
    targets = ["linear_fc1", "linear_fc2", "linear_proj", "linear_qkv"]
    assert record_of(place) == {"rank": 4, "alpha": 8.0, "targets": targets}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_belong_together(runs, name):
    log = (runs / f"log refused {name}.0").read_text()
    assert REFUSED[name] in log
    assert not [*(runs / f"refused {name}").glob("iter_*")]
