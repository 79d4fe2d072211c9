"""pretrain_hybrid.py in a stock checkout: every layout has the losses of one rank.

Needs what test_training.py needs, of core_v0.18.2 or newer.
"""

from functools import partial
from pathlib import Path

import pytest

from tests.megatron.lm.runs import (
    CHECKOUT,
    HDP,
    IN_PARTS,
    LENGTHS,
    MARKS,
    MODEL,
    RECOMPUTED,
    SHARDED,
    TENSOR,
    drive,
    planned,
    require_same,
    scalars,
    wanted,
)
from tests.support.gradients import write_corpus
from tests.support.hybrids import HAS_LATENT

SCRIPT = Path(CHECKOUT, "pretrain_hybrid.py")
pytestmark = [
    *MARKS,
    pytest.mark.slow,
    pytest.mark.skipif(not SCRIPT.is_file(), reason=f"the checkout has no {SCRIPT.name}"),
]

SPEC = "--spec tests.megatron.lm.hybrid_spec STACK"
HYBRID = f"{MODEL.replace('--num-layers 2', '')} {SPEC}"
EXPERTS = f"""{HYBRID} --num-experts 4 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall"""
MTP = f"""{HYBRID} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.7
--make-vocab-size-divisible-by 128"""
LATENT = f"""{HYBRID.replace("embedding-type rope", "embedding-type none")}
--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4
--v-head-dim 8 --rope-type rope --qk-layernorm"""
ONE, TWO = (1, [*HDP, "256"]), (2, [*HDP, "160"])
STAGES = ["--pipeline-model-parallel-size", "2"]
CASES = {  # flags of the model, its pattern, layouts: ranks, flags, pattern with its stages
    "dense": (
        HYBRID,
        "*-*-",
        {
            "two": (2, [*HDP, "160", *SHARDED], None),
            "tensor": (2, [*HDP, "256", *TENSOR], None),
            "stages": (4, [*HDP, "160", *STAGES], "*|-*-"),
            "virtual": (2, [*HDP, "256", *STAGES], "*|-|*|-"),
            "parts": (2, [*HDP, "256", *STAGES, *IN_PARTS], "*-|*-"),
            "recomputed": (2, [*HDP, "160", *RECOMPUTED], None),
        },
    ),
    "experts": (
        EXPERTS,
        "*E*-",
        {"apart": (2, [*HDP, "256", "--expert-model-parallel-size", "2"], None)},
    ),
    "latent": (
        LATENT,
        "+-+-",
        {"two": (2, [*HDP, "160"], None), "stages": (4, [*HDP, "160", *STAGES], "+-|+-")},
    ),
    "mtp": (
        MTP,
        "*-*-/*-/*-",
        {"two": (2, [*HDP, "160"], None), "stages": (4, [*HDP, "160", *STAGES], "*-|*-/*-/*-")},
    ),
}

if not HAS_LATENT:
    del CASES["latent"]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """One rank saves the weights that all others of a case start from; one run is stock."""
    folder = tmp_path_factory.mktemp("hybrids")
    write_corpus(folder, LENGTHS)
    plan = []
    for name in wanted(request, CASES):
        model, pattern, layouts = CASES[name]
        run = partial(planned, folder, model=model, script=SCRIPT, hybrid=True)
        first = run(f"{name} first", 1, [*with_pattern(pattern)], plugin=False, steps=2)
        plan.append({**first, "arguments": [*first["arguments"], "--save", str(folder / name)]})
        for layout, (ranks, flags, bars) in {"one": (*ONE, None), **layouts}.items():
            flags = [*flags, *with_pattern(bars or pattern), "--finetune"]
            plan.append(run(f"{name} {layout}", ranks, flags, load=name))
    drive(folder, plan)
    return folder


def with_pattern(pattern):
    # without TransformerEngine Megatron builds no latent attention; here `--spec` says how
    latent = ["--transformer-impl", "transformer_engine"] if "+" in pattern else []
    return ["--hybrid-layer-pattern", pattern, *latent]


@pytest.mark.parametrize(
    ("name", "layout"), [(name, one) for name, case in CASES.items() for one in case[2]]
)
def test_a_layout_has_the_losses_of_one_rank(runs, name, layout):
    rel = 1e-4 if name == "mtp" else 1e-5
    require_same(scalars(runs, f"{name} {layout}"), scalars(runs, f"{name} one"), rel=rel)
