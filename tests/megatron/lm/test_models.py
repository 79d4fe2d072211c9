"""Kinds of models in a stock Megatron-LM: every layout has the losses and states of one rank.

Needs what test_training.py needs. Where Megatron draws other weights in another layout, runs start
from the weights that a first one has saved.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from megatron.core import package_info

from tests.megatron.lm.runs import (
    HDP,
    IN_PARTS,
    MARKS,
    MODEL,
    TENSOR,
    drive,
    planned,
    require_same,
    require_same_states,
    scalars,
    wanted,
    weights,
)

pytestmark = MARKS

WINDOWS = f"""{MODEL} --softmax-type learnable --window-size 31,0 --window-attn-skip-freq [1,0]
--make-vocab-size-divisible-by 384"""
SINKS = "decoder.layers.self_attention.core_attention.softmax_offset"
MTP = f"""{MODEL} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.7
--make-vocab-size-divisible-by 128"""
BALANCED = """--num-experts 4 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall"""
EXPERTS = f"{MODEL} {BALANCED} --moe-z-loss-coeff 1e-3"
MTP_EXPERTS = f"{MTP} {BALANCED} --moe-layer-freq [0,1] --moe-router-topk 2"
DEEPSEEK = f"""{EXPERTS} --num-layers 3 --moe-layer-freq [0]+[1]*2 --ffn-hidden-size 48
--moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 20 --moe-shared-expert-gate
--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
--moe-router-num-groups 2 --moe-router-group-topk 1
--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05"""
GPT_OSS = f"""{EXPERTS.replace("--swiglu", "").replace("--disable-bias-linear", "")} --quick-geglu
--activation-func-clamp-value 0.4 --glu-linear-offset 1.0"""
LLAMA = f"""{MODEL} --use-rope-scaling --rotary-base 500000 --rotary-percent 0.5
--no-rope-freq [0,1] --rotary-interleaved --rotary-seq-len-interpolation-factor 2"""
YARN = f"""{MODEL} --position-embedding-type yarn --rotary-scaling-factor 4
--yarn-original-max-position-embeddings 64 --yarn-beta-fast 8 --no-rope-freq 2
--no-yarn-correction-range-round-to-int"""
FROZEN = f"{MODEL} --hdp-frozen embedding.* *.linear_qkv.*"
HAS_YARN = tuple(map(int, package_info.__version__.split(".")[:2])) >= (0, 19)

ONE, TWO = [*HDP, "256"], (2, [*HDP, "160"])
STAGES = (4, [*HDP, "160", "--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"])
ACROSS, BESIDE = ["--expert-model-parallel-size", "2"], ["--moe-shared-expert-overlap"]
ACROSS_TENSOR = (4, [*ONE, *TENSOR, *ACROSS, "--expert-tensor-parallel-size", "1"])
ACROSS_STAGES = ["--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"]


@dataclass(frozen=True)
class Case:
    """A model, and the layouts that must train as one rank does."""

    model: str
    layouts: Mapping[str, tuple[int, list[str]]]
    """Ranks and flags."""
    rel: float
    """Largest difference of losses and gradient norms."""
    first: str = "hdp"
    """Who saves the weights that all start from: ``hdp``, ``stock``, or nobody."""


CASES = {
    "deepseek": Case(DEEPSEEK, {"apart": (2, [*ONE, *ACROSS, *BESIDE])}, 1e-5),
    "deepseek-stages": Case(
        DEEPSEEK,
        {
            "apart": (4, [*ONE, *ACROSS, *ACROSS_STAGES]),
            "parts": (4, [*ONE, *ACROSS, *ACROSS_STAGES, *IN_PARTS]),
        },
        1e-5,
    ),
    "experts": Case(EXPERTS, {"apart": ACROSS_TENSOR}, 1e-5),
    "gpt-oss": Case(GPT_OSS, {"apart": ACROSS_TENSOR}, 1e-5),
    "windows": Case(WINDOWS, {"two": TWO, "stages": STAGES}, 2e-6, "stock"),
    # Adam steps by the sign of gradients next to nothing, which are float32 noise
    "mtp": Case(MTP, {"two": TWO, "tensor": (2, [*ONE, *TENSOR]), "stages": STAGES}, 1e-4, "stock"),
    "mtp-experts": Case(MTP_EXPERTS, {"apart": (2, [*ONE, *ACROSS])}, 1e-5),
    "plain": Case(MODEL, {}, 2e-6, ""),
    "llama": Case(LLAMA, {"two": TWO}, 2e-6, ""),
    "yarn": Case(YARN, {"two": TWO}, 2e-6, ""),
    "frozen": Case(FROZEN, {"two": TWO, "stages": STAGES}, 2e-6),
    "adapters": Case(f"{MODEL} --lora-rank 4 --lora-alpha 8", {"two": TWO, "stages": STAGES}, 2e-6),
    "none": Case(f"{MODEL} --position-embedding-type none", {"two": TWO}, 2e-6, ""),
}
RESUMED = {"two": TWO, "tensor": (2, [*ONE, *TENSOR, "--make-vocab-size-divisible-by", "192"])}
"""Layouts in which the run of one rank with windows resumes."""


def slow(names):
    return [
        pytest.param(name, marks=() if name == "deepseek" else pytest.mark.slow) for name in names
    ]


def common_plan(folder):
    return of_case(folder, "deepseek", CASES["deepseek"])


@pytest.fixture(scope="module")
def more(runs, request):
    """The other models' runs, of the tests that were selected."""
    absent = {"deepseek"} if HAS_YARN else {"deepseek", "yarn"}
    names = [name for name in wanted(request, CASES) if name not in absent]
    if {"llama", "yarn", "none"} & set(names):
        names.append("plain")
    if names:
        drive(runs, [run for name in names for run in of_case(runs, name, CASES[name])])
    return runs


def of_case(folder, name, case):
    """The first run, that of one rank from its weights, and those of several."""
    run = partial(planned, folder, model=case.model)
    if not case.first:
        layouts = {"one": (1, ONE), **case.layouts}
        return [run(f"{name} {key}", *how, steps=2) for key, how in layouts.items()]
    stock = case.first == "stock"
    first = f"{name} weights"
    plan = [run(f"{name} first", 1, [] if stock else ONE, plugin=not stock, save=first, steps=3)]
    for key, (ranks, flags) in {"one": (1, ONE), **case.layouts}.items():
        saved = {"save": f"{name} {key}"} if key in ("one", "apart") else {}
        plan.append(run(f"{name} {key}", ranks, [*flags, "--finetune"], load=first, **saved))
    for key, (ranks, flags) in RESUMED.items() if name == "windows" else ():
        flags = [*flags, "--ckpt-step", "2"]
        plan.append(run(f"resumed {key}", ranks, flags, load="windows one", save=f"resumed {key}"))
    return plan


@pytest.mark.parametrize("name", slow(name for name, case in CASES.items() if case.layouts))
def test_every_layout_has_the_losses_of_one_rank(more, name):
    if name == "yarn" and not HAS_YARN:
        pytest.skip("needs Megatron-LM 0.19, the first with YaRN's flags")
    case, one = CASES[name], scalars(more, f"{name} one")
    for key in case.layouts:
        found = scalars(more, f"{name} {key}")
        require_same(found, one, rel=case.rel, steps=(1, 2, 3, 4) if case.first else (1, 2))
    for value in one.get("seq_load_balancing_loss", {}).values():  # a mean over the sparse layers
        assert 1 <= value < 2
    if not case.first:
        plain = scalars(more, "plain one")
        assert plain["lm loss"][2] != pytest.approx(one["lm loss"][2], rel=1e-5)  # flags matter


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frozen"])
def test_frozen_weights_keep_their_bits(more, name):
    before, after = weights(more, "frozen weights", 3), weights(more, "frozen one", 4)
    model = {one for one in after if "exp_avg" not in one and "optimizer" not in one} & set(before)
    assert len(model) > 5
    same = {one for one in model if torch.equal(before[one], after[one])}
    assert same == {one for one in model if "embedding." in one or "linear_qkv.weight" in one}


@pytest.mark.parametrize("name", slow(["deepseek", "deepseek-stages"]))
def test_expert_biases_move_as_on_one_rank(more, name):
    one, apart = (weights(more, f"{name} {key}") for key in ("one", "apart"))
    keys = [key for key in one if key.endswith("router.expert_bias")]
    assert keys and not any(key.startswith("optimizer") for key in keys)
    for key in keys:
        assert one[key].abs().min() >= 0.05 - 1e-6  # an odd number of steps, one run and the next
        assert torch.equal(apart[key], one[key])


@pytest.mark.parametrize("name", slow(["windows", "mtp"]))
def test_parameters_keep_stocks_names_and_shapes(more, name):
    stock, ours = weights(more, f"{name} weights", iteration=3), weights(more, f"{name} one")
    assert {key: value.shape for key, value in ours.items()} == {
        key: value.shape for key, value in stock.items()
    }
    if name == "mtp":
        assert any(key.startswith("mtp.layers.1") for key in stock)
    else:
        assert stock[SINKS].shape == (2, 4) and not torch.equal(stock[SINKS], ours[SINKS])


@pytest.mark.parametrize("name", slow(["windows"]))
@pytest.mark.parametrize("layout", RESUMED)
def test_windows_resume_with_the_states_of_one_rank(more, name, layout):
    found, one = scalars(more, f"resumed {layout}"), scalars(more, f"{name} one")
    require_same(found, one, rel=2e-6, steps=(3, 4))
    require_same_states(more, f"resumed {layout}", f"{name} one", iteration=4, rel=1e-4)
