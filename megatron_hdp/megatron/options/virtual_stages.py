"""The numbers of virtual stages that a run's layers allow."""

from dataclasses import replace

from megatron_hdp.megatron.options.arguments import TrainingArguments, stage_split
from megatron_hdp.megatron.options.checks import check_parallel
from megatron_hdp.options import OptionError


def virtual_stage_choices(args: TrainingArguments) -> dict[int, TrainingArguments]:
    """The same run with each number of virtual stages on a rank that its flags allow.

    None without pipeline stages, and none of a layout, which says them itself.

    Args:
        args: a checked run under HDP.
    """
    if args.pipeline_model_parallel_size == 1 or args.pipeline_model_parallel_layout is not None:
        return {}
    choices = {}
    places = stage_split(args).most + 1  # embedding or loss may count as a layer
    for chunks in range(1, places + 1):
        changed = replace(
            args,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=chunks if chunks > 1 else None,
        )
        try:
            check_parallel(changed)
        except OptionError:
            continue  # not of so many
        choices[chunks] = changed
    return choices
