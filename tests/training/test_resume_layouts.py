"""A run saved on one layout and resumed on another one has the curve of an unbroken run."""

from dataclasses import dataclass, field, replace
from unittest import mock

import pytest

from megatron_hdp.megatron.checkpoint.checkpoints import Checkpoints
from megatron_hdp.training.loop import pretrain
from tests.gradient_equivalence.cases import MTP
from tests.support.gradients import EXPERTS, write_corpus
from tests.support.mla import MLA
from tests.training.runs import BUCKETS, LENGTHS, SHARDED, largest_difference, run

ALONE = (1, {"hdp_tokens_per_rank": 200})
TWO, THREE, FOUR, SIX = ((ranks, {}) for ranks in (2, 3, 4, 6))

# models, precisions and optimizers
SMALL = {"hdp_tokens_per_rank": 128}
SHARES = SHARDED | BUCKETS
DEEP = {"num_layers": 4, "split": "2,1,0", "eval_iters": 1, "hdp_tokens_per_rank": 100}
FLOAT32, BFLOAT16 = {"fp64": False}, {"fp64": False, "bf16": True}
TODAYS = EXPERTS | {
    "num_layers": 3,
    "moe_layer_freq": "[0]+[1]*2",
    "moe_shared_expert_intermediate_size": 20,
    "moe_shared_expert_gate": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
}
FROZEN = {"hdp_frozen": ("embedding.*", "*.linear_qkv.*")}
LATENT = MLA | SMALL | SHARES | {"hdp_mla_ring": "latent"}

# parts of layouts
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
STAGES, FOUR_STAGES = ({"pipeline_model_parallel_size": number} for number in (2, 4))
IN_STAGES = STAGES | {"hdp_sequence_parts": 4}
FIRST = STAGES | {"decoder_first_pipeline_num_layers": 1}
CHUNKS = STAGES | {"num_virtual_stages_per_pipeline_rank": 2}
CHUNKS_OF_ONE = STAGES | {"num_layers_per_virtual_pipeline_stage": 1}
APART, ONE_EACH = ({"expert_model_parallel_size": number} for number in (2, 4))


def split(text, stages=STAGES):
    """Stages that hold what a text says."""
    return stages | {"pipeline_model_parallel_layout": text}


EMPTY = (2, split("E|t*4L"))
NOTHING = (4, split("Et||t*3|L", FOUR_STAGES))
UNEVEN_CHUNKS = (4, split("E|t|t*3|L"))


@dataclass(frozen=True)
class Case:
    """Where a run is saved and where it is resumed: ranks and flags."""

    before: tuple
    after: tuple
    model: dict = field(default_factory=dict)
    tolerance: float = 1e-10
    quick: bool = False


CASES = {
    "float64": Case(THREE, TWO),
    "float64-sharded": Case(THREE, TWO, SHARES),
    "float32-sharded": Case(THREE, TWO, FLOAT32 | SHARES, 2e-6),
    "bfloat16-sharded": Case(THREE, TWO, BFLOAT16 | SHARDED, 2e-3, quick=True),
    "to-2": Case(FOUR, TWO, SMALL),
    "to-3-sharded": Case(FOUR, THREE, SMALL | SHARES),
    "to-6": Case(FOUR, SIX, SMALL),
    "to-tp2": Case(FOUR, (2, TENSOR), SMALL | SHARES),
    "to-tp2-sp": Case(FOUR, (4, SEQUENCE), SMALL),
    "to-pp2": Case(FOUR, (6, STAGES), SMALL | SHARES),
    "to-tp2-sp-pp2": Case(FOUR, (4, SEQUENCE | STAGES), SMALL),
    "to-tp2-sp-pp2-sharded": Case(FOUR, (4, SEQUENCE | STAGES), SMALL | SHARES, quick=True),
    "to-one-rank": Case((4, SEQUENCE | STAGES), ALONE, SMALL),
    "to-one-rank-sharded": Case((4, SEQUENCE | STAGES), ALONE, SMALL | SHARES),
    "frozen-to-pp2-sharded": Case(TWO, (2, STAGES), FROZEN | SMALL | SHARES),
    "frozen-to-tp2": Case(TWO, (2, TENSOR), FROZEN | SMALL),
    "mtp-to-pp2": Case(ALONE, (2, STAGES), MTP | SMALL),
    "parts-to-one-rank": Case((4, IN_STAGES), ALONE, DEEP | SHARES),
    "mtp-to-parts": Case(TWO, (4, IN_STAGES), DEEP | MTP),
    "latent-to-tp2-sp": Case(TWO, (4, SEQUENCE), LATENT),
    "latent-to-pp2": Case(TWO, (2, STAGES | {"hdp_mla_ring": "kv"}), LATENT),
    "latent-to-one-rank": Case(TWO, ALONE, LATENT),
    "experts-gathered": Case((4, APART), TWO, EXPERTS),
    "experts-gathered-today": Case((4, FIRST | APART), TWO, TODAYS),
    "experts-spread-today-sharded": Case(TWO, (4, FIRST | APART), TODAYS | SHARDED),
    "experts-spread": Case(TWO, (4, APART), EXPERTS),
    "experts-spread-sharded": Case(TWO, (4, APART), EXPERTS | SHARDED),
    "experts-into-replicas-sharded": Case(
        (4, APART), (4, SEQUENCE | {"expert_tensor_parallel_size": 2}), EXPERTS | SHARDED
    ),
    "experts-spread-bfloat16": Case(TWO, (4, APART), EXPERTS | BFLOAT16, 2e-3),
    "experts-gathered-bfloat16": Case((4, APART), TWO, EXPERTS | BFLOAT16, 2e-3),
    "experts-to-ep4-sharded": Case((2, APART), (4, ONE_EACH), EXPERTS | SMALL | SHARES),
    "experts-to-tp2-sp": Case(
        (2, APART), (4, APART | SEQUENCE | {"expert_tensor_parallel_size": 1}), EXPERTS | SMALL
    ),
    "experts-to-pp2-sharded": Case((2, APART), (4, APART | STAGES), EXPERTS | SMALL | SHARES),
    "virtual-to-fewer-ranks": Case((4, CHUNKS), (2, CHUNKS_OF_ONE), DEEP),
    "virtual-to-fewer-ranks-sharded": Case((4, CHUNKS), (2, CHUNKS_OF_ONE), DEEP | SHARES),
    "virtual-to-plain": Case((4, CHUNKS), (4, STAGES), DEEP | SHARES),
    "plain-to-virtual": Case((4, STAGES), (4, CHUNKS), DEEP | SHARES),
    "virtual-to-one-rank": Case((4, CHUNKS), ALONE, DEEP),
    "virtual-bfloat16": Case((4, CHUNKS), (4, CHUNKS), DEEP | SHARDED | BFLOAT16, 2e-3),
    "uneven-few-ranks": Case(EMPTY, (2, FIRST), DEEP | SHARES),
    "uneven-nothing": Case(NOTHING, (4, split("E|t||t*3L", FOUR_STAGES)), DEEP | SHARES),
    "uneven-to-virtual": Case(NOTHING, UNEVEN_CHUNKS, DEEP),
    "uneven-first-to-empty": Case((4, FIRST), EMPTY, DEEP | SHARES),
    "uneven-virtual-to-nothing": Case(UNEVEN_CHUNKS, NOTHING, DEEP | SHARES),
    "uneven-virtual-to-one-rank": Case(
        (4, split("Et|||t|t||t|L", FOUR_STAGES)), ALONE, DEEP | SHARES
    ),
    "uneven-empty-to-first": Case(EMPTY, (4, FIRST), DEEP),
    "uneven-bfloat16": Case(NOTHING, (4, FIRST), DEEP | SHARDED | BFLOAT16, 2e-3),
    "uneven-experts": Case(
        (4, UNEVEN_CHUNKS[1] | APART), (4, CHUNKS | APART), DEEP | EXPERTS | SHARES
    ),
    "uneven-experts-from-nothing": Case(
        NOTHING, (4, UNEVEN_CHUNKS[1] | APART), DEEP | EXPERTS | SHARES
    ),
}


def losses(arguments):
    """Body of a rank: step, loss, loss of the validation and of MTP, of every step."""
    return [
        (one.step, one.loss, one.validation_loss or 1.0, one.mtp_loss or 1.0)
        for one in pretrain(arguments)
    ]


def trained(run_ranks, arguments, layout):
    num_ranks, overrides = layout
    return run_ranks(num_ranks, losses, replace(arguments, **overrides))[0]


def whole_run(folder, **model):
    prefix = write_corpus(folder, LENGTHS * (3 if "split" in model else 1))
    return run(prefix, eval_interval=1, **model)


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if CASES[one].quick else pytest.mark.slow) for one in CASES],
)
def test_resumed_on_another_layout(run_ranks, tmp_path, name):
    case = CASES[name]
    whole, folder = whole_run(tmp_path, **case.model), tmp_path / "checkpoints"
    expected = trained(run_ranks, whole, ALONE)
    first = trained(run_ranks, replace(whole, train_iters=3, save=folder), case.before)
    assert largest_difference(first, expected[:3]) <= case.tolerance
    found = trained(run_ranks, replace(whole, load=folder), case.after)
    assert [step for step, *_ in found] == [4, 5, 6]
    assert largest_difference(found, expected[3:]) <= case.tolerance


def test_a_skipped_sequence_fails_the_check(run_ranks, tmp_path):
    """The planted fault: the data resumes one sequence too late."""
    whole, folder = whole_run(tmp_path), tmp_path / "checkpoints"
    expected = trained(run_ranks, replace(whole, save=folder, save_interval=3), ALONE)
    again = replace(whole, load=folder, ckpt_step=3, **ALONE[1])
    found = run_ranks(1, losses_of_later_data, again)[0]
    assert largest_difference(found, expected[3:]) > 1e-6


def losses_of_later_data(arguments):
    load = Checkpoints.load

    def load_later(self):
        progress = load(self)
        found = progress.position
        later = {name: replace(one, rows=one.rows + 1) for name, one in found.sources.items()}
        return replace(progress, position=replace(found, sources=later))

    with mock.patch.object(Checkpoints, "load", load_later):
        return losses(arguments)
