"""A hybrid's pattern says what plans count of it: layers, stages, parameters, experts."""

from dataclasses import asdict

from megatron_hdp.megatron.options import (
    HybridArguments,
    expert_layers,
    job_of,
    model_shape,
    options_of_pattern,
    stage_split,
)
from megatron_hdp.planner.memory import kept_after_forward
from tests.support.gradients import EXPERTS, tiny_arguments

LENGTHS = (3.0, 5.0)


def hybrid(pattern, **overrides):
    """The options of a run of such a hybrid."""
    values = asdict(tiny_arguments(None, **overrides)) | options_of_pattern(pattern)
    return HybridArguments(**values)


def counted(arguments):
    """What is counted of a model's shape: parameters, FLOP of a batch, values around a ring."""
    shape = model_shape(arguments, 320)
    return shape.parameters, shape.active_parameters, shape.attention_width, shape.travelling_size


def test_pairs_of_blocks_count_as_the_layers_of_a_gpt():
    assert counted(hybrid("*-*-")) == counted(tiny_arguments(None, num_layers=2))
    gpt = tiny_arguments(None, num_layers=2, moe_layer_freq="[0,1]", **EXPERTS)
    assert counted(hybrid("*-*E", **EXPERTS)) == counted(gpt)
    further = {"mtp_num_layers": 2}
    assert counted(hybrid("*-*-/*-/*-", **further)) == counted(
        tiny_arguments(None, num_layers=2, **further)
    )
    kept = [
        kept_after_forward(job_of(one, 1, 320)) for one in (hybrid("*-*-"), tiny_arguments(None))
    ]
    assert 2 * kept[0] == kept[1]


def test_blocks_count_one_by_one():
    attention, mlp = (counted(hybrid(one)) for one in "*-")
    base = model_shape(hybrid("-"), 320)
    ends = 2 * base.embedding + base.last_norm
    both = counted(hybrid("**-"))
    assert both[0] - ends == 2 * (attention[0] - ends) + mlp[0] - ends
    assert (mlp[2], mlp[3]) == (0, 0) and both[2] == 2 * attention[2] > 0


def test_bars_are_stages_and_letters_say_where_experts_are():
    stages = hybrid("*-|*E-", pipeline_model_parallel_size=2, **EXPERTS)
    assert stage_split(stages).layers == (2, 3)
    assert expert_layers(stages) == (False, False, False, True, False)
    assert stage_split(hybrid("*-*-", pipeline_model_parallel_size=2)).layers == (2, 2)
