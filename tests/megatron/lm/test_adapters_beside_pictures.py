"""Adapters of the language model beside a frozen encoder, in a stock Megatron-LM.

Needs what test_training.py needs.
"""

import json

import pytest
import torch

from megatron_hdp.encoders import Qwen3VLEncoder
from tests.data.media import sources
from tests.megatron.lm.runs import (
    HDP,
    LENGTHS,
    MARKS,
    OVERLAPPED,
    STAGES,
    TENSOR,
    TRAINING,
    drive,
    own,
    planned,
    require_same,
    require_same_states,
    scalars,
    weights,
)
from tests.megatron.lm.test_pictures import ONE, SIZES, SMALL
from tests.support.gradients import write_corpus
from tests.training.test_pictures import CONFIG, model_folder, write_encoder

pytestmark = [*MARKS, pytest.mark.slow]

ADAPTERS = ["--lora-rank", "4", "--lora-alpha", "8"]
HALF = ["--make-vocab-size-divisible-by", "192"]
LAYOUTS = {  # of the second half: whose first, ranks, flags
    "tensor": ("half", 2, [*ONE, *TENSOR, *HALF]),
    "stages": ("half", 4, [*HDP, "130", *STAGES]),
    "whole on stages": ("whole", 2, [*ONE, *STAGES]),
}
WIDER = CONFIG | {"vision_config": CONFIG["vision_config"] | {"intermediate_size": 28}}
REFUSED = {
    "other encoder": "does not fit this model: give the flags of the saved one",
    "no encoder": "found no encoder in",
    "adapters": "holds adapters alone, expected the weights of a whole model",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of text, of both together, then of adapters beside each, and in whole checkpoints."""
    runs = tmp_path_factory.mktemp("adapters")
    write_corpus(runs, LENGTHS)
    data = ["--hdp-data", str(sources.write_mixture(runs, "some text without pictures\n" * 3))]
    encoder = model_folder(runs / "model")
    wider = write_encoder(runs / "wider", Qwen3VLEncoder, WIDER)

    def pictured(name, ranks, flags, *, folder=encoder, **more):
        flags = [*SIZES, *flags, "--hdp-encoder", str(folder)]
        return planned(runs, name, ranks, flags, model=SMALL, data=data, **more)

    beside = [*ADAPTERS, "--pretrained-checkpoint", str(runs / "base")]
    on_text = [*ADAPTERS, "--pretrained-checkpoint", str(runs / "text")]
    plan = [
        planned(runs, "text", 1, SIZES, model=SMALL, plugin=False, save="text", steps=2),
        pictured("base", 1, [*ONE, "--finetune"], load="text", save="base", steps=2),
        pictured("one", 1, [*ONE, *beside], save="one"),
        own_command(runs, [*beside, *data, "--hdp-encoder", str(encoder)]),
        pictured("half", 2, [*HDP, "200", *beside], save="half"),
        pictured("rings", 4, [*HDP, "100", *beside, *OVERLAPPED]),
        pictured("on text", 2, [*HDP, "200", *on_text]),
        pictured("further", 1, [*ONE, "--finetune"], load="base", steps=1),
        pictured("whole one", 1, [*ONE, *ADAPTERS], save="whole one"),
        pictured("whole", 2, [*HDP, "200", *ADAPTERS], save="whole"),
    ]
    for name, (first, ranks, flags) in LAYOUTS.items():
        flags = [*flags, *(beside if first == "half" else ADAPTERS), "--ckpt-step", "2"]
        plan.append(pictured(name, ranks, flags, load=first, save=name))
    wrong = {
        "other encoder": {"flags": beside, "folder": wider},
        "no encoder": {"flags": ADAPTERS, "load": "no encoder"},
        "adapters": {"flags": [], "load": "half"},
    }
    text = [*SIZES, *ONE, *ADAPTERS]
    more = {"model": SMALL, "data": data_of_text(runs), "save": "no encoder", "steps": 2}
    plan.append(planned(runs, "no encoder", 1, text, **more))
    for name, more in wrong.items():
        flags = [*ONE, *more.pop("flags")]
        plan.append(
            pictured(f"refused {name}", 1, flags, save=f"refused {name}", exits=[1], **more)
        )
    drive(runs, plan)
    return runs


def data_of_text(folder):
    path = folder / "text.yaml"
    path.write_text("sources:\n  text: {path: x.txt, tokenizer: hf:hf}\n")
    return ["--hdp-data", str(path)]


def own_command(folder, flags):
    """The project's own command beside the same base, which a checkout has saved."""
    steps = TRAINING[TRAINING.index("--lr ") : TRAINING.index("--split")].split()
    flags = [*HDP, "400", "--global-batch-size", "8", "--train-iters", "4", *flags]
    flags += ["--make-vocab-size-divisible-by", "384", "--eval-iters", "0"]
    tokenizer = [
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(folder / "hf"),
    ]
    return own(folder, 1, [*SMALL.split(), *steps, *tokenizer, *flags])


@pytest.mark.parametrize("name", LAYOUTS)
def test_resumed_on_another_layout(runs, name):
    first = LAYOUTS[name][0]
    one = "one" if first == "half" else "whole one"
    require_same(scalars(runs, first), scalars(runs, one), rel=2e-6)
    require_same(scalars(runs, name), scalars(runs, one), rel=2e-6, steps=(3, 4))
    require_same_states(runs, name, one, iteration=4, rel=1e-4)


def test_rings_with_a_sharded_optimizer(runs):
    require_same(scalars(runs, "rings"), scalars(runs, "one"), rel=2e-6)


def test_the_projects_own_command_gives_the_same(runs):
    """The trained encoder of the base is its encoder, too."""
    one = scalars(runs, "one")
    lines = [json.loads(line) for line in (runs / "own.jsonl").read_text().splitlines()]
    found = {
        tag: {line["step"]: line[key] for line in lines}
        for tag, key in {"lm loss": "loss", "grad-norm": "grad_norm"}.items()
    }
    require_same(found, one, rel=2e-6)


def test_what_checkpoints_hold(runs):
    """Adapters alone, or all with an encoder that has not moved."""
    kept = [name for name in weights(runs, "one") if not name.startswith(("optimizer", "rng"))]
    kept = [name for name in kept if "rerun" not in name]
    assert kept and all(name.rpartition(".")[-1] in ("lora_a", "lora_b") for name in kept)
    before, after = (weights(runs, "whole", step) for step in (2, 4))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert all("lora_" in name or name.startswith(("rng", "rerun")) for name in moved)
    assert any(name.startswith("hdp_encoder.") for name in before)


def test_the_encoder_comes_from_the_base_or_from_its_folder(runs):
    """Adapters begin at zero: the first loss is that of a run without them."""
    for name, without in (("one", "further"), ("on text", "base")):
        first, expected = (scalars(runs, run)["lm loss"][1] for run in (name, without))
        assert first == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_belong_together(runs, name):
    assert REFUSED[name] in (runs / f"log refused {name}.0").read_text()
    assert not [*(runs / f"refused {name}").glob("iter_*")]
