"""Pictures in a stock Megatron-LM: the losses of one rank, the encoder in its checkpoints.

Needs what test_training.py needs.
"""

import pytest
import torch

from tests.data.media import sources
from tests.megatron.lm.runs import (
    HDP,
    LENGTHS,
    MARKS,
    MODEL,
    OVERLAPPED,
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
from tests.training.test_pictures import model_folder

pytestmark = [*MARKS, pytest.mark.slow]

SMALL = f"""{MODEL} --hidden-size 24 --num-attention-heads 2 --kv-channels 12
--group-query-attention --num-query-groups 1"""
DEEP = f"{SMALL} --num-layers 4"
SIZES = ["--make-vocab-size-divisible-by", "384", "--eval-iters", "0"]
ONE = [*HDP, "400"]
LAYOUTS = {
    "tensor": (2, [*ONE, *TENSOR, "--make-vocab-size-divisible-by", "192"]),
    "stages": (4, [*HDP, "130", *STAGES]),
}
VIRTUAL = (2, [*ONE, *STAGES, "--num-virtual-stages-per-pipeline-rank", "2", "--ckpt-step", "2"])
REFUSED = {
    "optimizer": (["--load"], "found no encoder in"),
    "dropout": (["--hidden-dropout", "0.1"], "found --hidden-dropout 0.1, which does not work"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of text, then of one rank with pictures, and that resumed on other layouts."""
    runs = tmp_path_factory.mktemp("pictures")
    write_corpus(runs, LENGTHS)
    data = ["--hdp-data", str(sources.write_mixture(runs, "some text without pictures\n" * 3))]
    encoder = ["--hdp-encoder", str(model_folder(runs / "model"))]

    def pictured(name, ranks, flags, model=SMALL, **more):
        flags = [*SIZES, *flags, *encoder]
        return planned(runs, name, ranks, flags, model=model, data=data, **more)

    plan = [
        planned(runs, "base", 1, SIZES, model=SMALL, plugin=False, save="base", steps=2),
        pictured("one", 1, [*ONE, "--finetune"], load="base", save="one"),
        pictured("rings", 4, [*HDP, "100", "--finetune", *OVERLAPPED], load="base"),
        pictured("fresh", 1, ONE),
        pictured("frozen", 2, [*HDP, "200", "--hdp-frozen", "hdp_encoder.*"], save="frozen"),
        pictured("half", 2, [*HDP, "200", "--finetune"], load="base", save="half"),
        pictured("plane", 2, [*HDP, "200", "--finetune", "--hdp-loaders", "ray"], load="base"),
        pictured("deep", 1, ONE, DEEP, save="deep"),
        pictured("virtual", *VIRTUAL, DEEP, load="deep"),
    ]
    for name, (ranks, flags) in LAYOUTS.items():
        flags = [*flags, "--ckpt-step", "2"]
        plan.append(pictured(name, ranks, flags, load="half", save=name))
    for name, (flags, _) in REFUSED.items():
        more = {"load": "base", "save": f"refused {name}"} if flags == ["--load"] else {}
        flags = [one for one in flags if one != "--load"]
        plan.append(pictured(f"refused {name}", 1, [*ONE, *flags], exits=[1], **more))
    drive(runs, plan)
    return runs


@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_on_another_layout(runs, name):
    one = scalars(runs, "one")
    require_same(scalars(runs, "half"), one, rel=2e-6)
    require_same(scalars(runs, name), one, rel=2e-6, steps=(3, 4))
    require_same_states(runs, name, "one", iteration=4, rel=1e-4)


def test_rings_with_a_sharded_optimizer(runs):
    require_same(scalars(runs, "rings"), scalars(runs, "one"), rel=2e-6)


def test_loaders_beside_the_ranks_give_the_same(runs):
    require_same(scalars(runs, "plane"), scalars(runs, "half"), rel=0)
    assert "data plane: hdp-data-" in (runs / "log plane.0").read_text()


def test_virtual_stages(runs):
    require_same(scalars(runs, "virtual"), scalars(runs, "deep"), rel=2e-6, steps=(3, 4))


def test_text_alone_gets_an_encoder(runs):
    """The language model comes from a checkpoint, the encoder from its folder."""
    loaded, fresh = scalars(runs, "one"), scalars(runs, "fresh")
    assert abs(loaded["lm loss"][1] - fresh["lm loss"][1]) > 1e-3
    text, whole, frozen = (weights(runs, one, 2) for one in ("base", "one", "frozen"))
    added = {name for name in whole if name.startswith("hdp_encoder.")}
    assert added and not any(name.startswith("hdp_encoder.") for name in text)
    last = weights(runs, "one", 4)
    moved = [name for name in added if not torch.equal(whole[name], last[name])]
    kept = weights(runs, "frozen", 4)
    assert len(moved) > len(added) / 2
    assert all(torch.equal(frozen[name], kept[name]) for name in added)


def test_figures_reach_megatrons_log(runs):
    found = scalars(runs, "one")
    assert all(one > 0 for one in found["hdp/media-rows"].values())
    assert all(one > 0 for one in found["hdp/encoder-ms"].values())
    assert "pictures: " in (runs / "log one.0").read_text()


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together(runs, name):
    assert REFUSED[name][1] in (runs / f"log refused {name}.0").read_text()
