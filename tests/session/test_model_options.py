"""What a built model's configuration says of it: the shape that plans are made for."""

from types import SimpleNamespace

import pytest

from megatron_hdp.megatron.model.building import transformer_config
from megatron_hdp.megatron.options import model_shape, stage_split
from megatron_hdp.options import OptionError
from megatron_hdp.session.model_options import arguments_of_model
from tests.support.gradients import EXPERTS, tiny_arguments
from tests.support.mla import MLA

DDP = SimpleNamespace(use_distributed_optimizer=True, overlap_grad_reduce=False)
PP2 = {"pipeline_model_parallel_size": 2}
MODELS = {
    "plain": {},
    "experts": EXPERTS | {"moe_layer_freq": "[0,1]", "moe_shared_expert_intermediate_size": 12},
    "windows": {"window_size": "9,0", "window_attn_skip_freq": "2", "softmax_type": "learnable"},
    "latent": MLA,
    "without-positions": {"no_rope_freq": "2"},
    "float64-off": {"fp64": False, "bf16": True, "num_query_groups": 4},
    "stages": PP2 | {"num_layers": 7, "decoder_first_pipeline_num_layers": 3},
    "layout": PP2 | {"num_layers": 3, "pipeline_model_parallel_layout": "Et|ttL"},
}


def found_in(arguments, **options):
    config = transformer_config(arguments)
    given = {"seq_length": 512, "tied_embeddings": False, "hdp_tokens_per_rank": 64} | options
    return arguments_of_model(config, DDP, **given)


@pytest.mark.parametrize("name", list(MODELS))
def test_the_shape_is_the_same(name):
    arguments = tiny_arguments(None, **MODELS[name])
    found = found_in(arguments)
    assert model_shape(found, 257) == model_shape(arguments, 257)
    assert stage_split(found) == stage_split(arguments)
    assert (found.bf16, found.fp64) == (arguments.bf16, arguments.fp64)
    assert found.use_distributed_optimizer and found.hybrid_data_parallel
    assert found.hdp_tokens_per_rank == 64


def test_options_that_do_not_exist_are_refused():
    with pytest.raises(OptionError, match="found hdp_capacity, expected names of HDP's options"):
        found_in(tiny_arguments(None), hdp_capacity=64)
    with pytest.raises(OptionError, match="--hdp-strategy"):
        found_in(tiny_arguments(None), hdp_strategy="fastest")
