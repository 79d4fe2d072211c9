"""The gold test with further tokens predicted: gradients equal those of one rank, whole."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.data.steps import micro_batch
from megatron_hdp.training.loop import pretrain
from tests.megatron.step.test_exactness import LENGTHS, SHARDED_BUCKETS, TOLERANCE, random_case
from tests.support.gradients import EXPERTS, errors_of, tiny_arguments, write_corpus
from tests.support.mla import MLA, errors_of_kind

ROOM = {"hdp_tokens_per_rank": 128, "seq_length": 200, "max_position_embeddings": 200}
TWO = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
TIED = {"untie_embeddings_and_output_weights": False}
LAYOUTS = {
    "rings": (3, {}),
    "tied-one": (2, TIED | {"mtp_num_layers": 1, "normalization": "LayerNorm"}),
    "tensor": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tensor-alone": (4, {"tensor_model_parallel_size": 2}),
    "stages": (4, {"pipeline_model_parallel_size": 2}),
    "buckets-recompute": (
        4,
        SHARDED_BUCKETS
        | {
            "pipeline_model_parallel_size": 2,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": 4.0,
        },
    ),
}
EXPERT_LAYERS = EXPERTS | {
    "moe_layer_freq": "[0,1]",
    "moe_shared_expert_intermediate_size": 10,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
LAYOUTS |= {
    "experts": (2, EXPERT_LAYERS),
    "experts-apart": (4, EXPERT_LAYERS | {"expert_model_parallel_size": 2}),
    "experts-stages": (
        4,
        EXPERT_LAYERS
        | {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
        | {"decoder_first_pipeline_num_layers": 1},
    ),
    "latent": (2, MLA | EXPERT_LAYERS),
    "latent-tensor": (
        4,
        MLA
        | EXPERT_LAYERS
        | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
        | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
}
QUICK = ("rings", "latent")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS],
)
def test_gradients_equal_one_rank_over_the_whole_batch(run_ranks, tmp_path, layout):
    ranks, overrides = LAYOUTS[layout]
    prefix = write_corpus(tmp_path, LENGTHS)
    arguments = tiny_arguments(prefix, **(ROOM | TWO | overrides))
    replicas = ranks
    for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        replicas //= overrides.get(size, 1)
    cases = [(arguments, None)]
    if overrides.get("expert_model_parallel_size", 1) == 1:  # else ranks keep step with each other
        cases.append(random_case(arguments, replicas))
    errors = run_ranks(ranks, errors_of_kind, cases)[0]
    assert max(errors) <= TOLERANCE, errors


def first_of_each_chunk_again(values, here, first, others):
    """A fault: what stands behind a chunk is taken from its own beginning."""
    for depth, array in enumerate((first, *others)):
        room = array[here]
        of_depth = np.roll(values[: len(room)], -depth)[: len(values[depth:])]
        yield room[: len(of_depth)], of_depth


def one_divisor(losses, step, loss_tokens):
    """A fault: each depth is divided by the loss tokens of labels."""
    return (0.35,) * losses.depths


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("megatron_hdp.data.steps.micro_batch._by_depth", first_of_each_chunk_again),
        ("megatron_hdp.megatron.step.figures.FurtherLosses.weights", one_divisor),
    ],
)
def test_a_wrong_token_or_divisor_is_found_out(run_ranks, tmp_path, target, fault):
    assert hasattr(micro_batch, "_by_depth")
    prefix = write_corpus(tmp_path, LENGTHS)
    arguments = tiny_arguments(prefix, **ROOM, **TWO)
    errors = run_ranks(2, errors_of, [(arguments, None)], (target, fault))[0]
    assert min(errors) > 1e-4


def curve(arguments):
    """Body of a rank: losses of every step."""
    return [(one.loss, one.mtp_loss) for one in pretrain(arguments)]


def test_a_run_goes_on_with_stages(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, [30, 60, 20, 33, 21, 50, 64, 3], corrupt=[2])
    settings = {"seq_length": 64, "max_position_embeddings": 64, "global_batch_size": 3}
    whole = tiny_arguments(prefix, train_iters=4, lr_decay_iters=4, **settings, **TWO)
    folder = tmp_path / "checkpoints"
    expected = run_ranks(1, curve, replace(whole, save=folder, save_interval=2))[0]
    stages = replace(whole, pipeline_model_parallel_size=2, load=folder, ckpt_step=2)
    found = run_ranks(2, curve, stages)[0]
    np.testing.assert_allclose(found, expected[2:], rtol=1e-10)
    assert all(3 < further < 8 for _, further in expected)
