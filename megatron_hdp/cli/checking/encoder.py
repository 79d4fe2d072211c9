"""What an encoder of pictures or sound adds to a job: memory on every GPU, and time of a step."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.checking.planned_step import StepForecast
from megatron_hdp.cli.shared.item_sizes import read_sizes
from megatron_hdp.media import (
    ItemBatch,
    ItemFigures,
    ItemPlan,
    Windows,
    dealt,
    evaluate_items,
    gap_choices,
    plan_in_gaps,
    plan_items,
    slots_of_micro_batches,
)
from megatron_hdp.megatron.adapters import ENCODER
from megatron_hdp.planner import Plan
from megatron_hdp.planner.experts import evaluation_of
from megatron_hdp.planner.lockstep import knows_stages
from megatron_hdp.planner.memory import EncoderMemory, Job
from megatron_hdp.simulator.execution import Setting

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_hdp.encoders import ItemEncoder
    from megatron_hdp.megatron.options import TrainingArguments

_ROWS_IN, _ROWS_OUT = 2, 3
"""Copies of rows at the busiest moment, when gradients go back. Of those that a rank has been
given: they and their gradients. Of those that it has made: they, and what arrives for them, before
and after it is summed."""
_PARKED_IN, _PARKED_OUT = 1, 2
"""The same of a wave, where all others are parked in host memory."""


@dataclass(frozen=True, kw_only=True)
class EncoderForecast:
    """An encoder, and the items of one step, where these are given."""

    parameters: int
    trained_parameters: int
    patches_per_pack: int
    """The most patches of a call."""
    items: str
    """What its items are called."""
    num_items: int | None = None
    num_rows: int | None = None
    row_bytes: int = 0
    parked_bytes: float = 0.0
    """Of rows and gradients that wait in host memory, of a GPU."""
    step_s: float = 0.0
    """Seconds that a step takes more, at most."""
    outside_s: float | None = None
    """The same, were all encoded before its first micro-batch and behind the last; None: it is."""
    efficiency: float | None = None
    """Work of all items / ranks / that of the busiest one."""
    flop: float = 0.0
    """Forward and backward, each item encoded once."""


def encoder_of(arguments: "TrainingArguments") -> "ItemEncoder | None":
    """The encoder of a run without its numbers, frozen as the flags say; None: it has none.

    Raises:
        ValueError: the folder of ``--hdp-encoder`` holds no model that is known.
    """
    if arguments.hdp_encoder is None:
        return None
    from megatron_hdp.encoders import described_encoder

    found = described_encoder(
        arguments.hdp_encoder,
        patches_per_pack=arguments.hdp_encoder_patches,
        costs=arguments.hdp_item_costs,
    )
    for name, weight in encoder_weights(found):
        is_frozen = any(fnmatchcase(name, one) for one in arguments.hdp_frozen)
        if is_frozen or arguments.lora_rank is not None:
            weight.requires_grad_(False)
    return found


def encoder_weights(encoder: "ItemEncoder") -> "list[tuple[str, Parameter]]":
    """Its weights under their names in the whole model."""
    return [(f"{ENCODER}.model.{name}", one) for name, one in encoder.named_parameters()]


def with_encoder(
    job: Job,
    arguments: "TrainingArguments",
    encoder: "ItemEncoder",
    items: str | None,
    gpus_per_node: int = 8,
) -> tuple[Job, EncoderForecast]:
    """The job with what its encoder holds, and what is told of it.

    Args:
        job: of the language model.
        arguments: of the run.
        encoder: as of `encoder_of`.
        items: a file with the sizes of a step's items; None: it is not known what they take.
        gpus_per_node: which may encode one item together.

    Raises:
        ValueError: the file cannot be read, or no plan can be made of it.
    """
    weights = list(encoder.parameters())
    trained = sum(one.numel() for one in weights if one.requires_grad)
    forecast = EncoderForecast(
        parameters=sum(one.numel() for one in weights),
        trained_parameters=trained,
        patches_per_pack=encoder.patches_per_pack,
        items="sounds" if isinstance(encoder.shape.resizing, Windows) else "pictures",
    )
    rows_bytes = 0.0
    if items is not None:
        forecast, rows_bytes = _planned(forecast, job, arguments, encoder, items, gpus_per_node)
    kept = encoder.shape.kept_bytes(job.value_bytes) + encoder.shape.working_bytes(job.value_bytes)
    memory = EncoderMemory(
        parameters=forecast.parameters,
        trained=trained,
        rows_bytes=rows_bytes,
        pack_bytes=forecast.patches_per_pack * kept * bool(trained),
    )
    return replace(job, encoder=memory), forecast


def fitting_rows(encoder: EncoderForecast, free_bytes: float) -> int:
    """The most rows for ``--hdp-encoder-rows`` that so many bytes of a GPU have room for."""
    if not encoder.row_bytes:
        return 0
    return int(free_bytes / (encoder.row_bytes * (_PARKED_IN + _PARKED_OUT)))


def with_encoding(step: StepForecast, encoder: EncoderForecast, num_gpus: int) -> StepForecast:
    """A step whose items all GPUs encode besides."""
    step_s = step.step_s + encoder.step_s
    flop = step.flops_per_s * step.step_s * num_gpus + encoder.flop
    return replace(step, step_s=step_s, flops_per_s=flop / step_s / num_gpus)


def encodes_in_gaps(arguments: "TrainingArguments", job: Job) -> bool:
    """Whether ranks of late stages encode while they would wait for the first micro-batch."""
    is_asked = arguments.hdp_media_waves is None and arguments.hdp_encoder_rows is None
    return is_asked and job.stages > 1 and knows_stages(arguments.hdp_strategy)


def in_gaps(
    forecast: EncoderForecast,
    job: Job,
    arguments: "TrainingArguments",
    encoder: "ItemEncoder",
    items: str,
    gpus_per_node: int,
    made: Plan,
    setting: Setting,
) -> EncoderForecast:
    """What is told of an encoder beside a pipeline's step of this plan.

    The other arguments are those of `with_encoder`.
    """
    patches = read_sizes(items, encoder.shape.resizing).patches
    balance = arguments.hdp_media_balance
    figures = gap_figures(job, encoder, patches, balance, made, setting, gpus_per_node)
    return replace(
        forecast,
        step_s=figures.makespan_s,
        outside_s=forecast.step_s,
        efficiency=figures.efficiency,
    )


def gap_figures(
    job: Job,
    encoder: "ItemEncoder",
    patches: Int64Array,
    balance: str,
    made: Plan,
    setting: Setting,
    gpus_per_node: int = 8,
) -> ItemFigures:
    """How much longer a pipeline's step of this plan takes, at most, beside which all encode.

    Args:
        job: as of `planned_items`.
        encoder: as of `planned_items`.
        patches: as of `planned_items`.
        balance: as of `planned_items`.
        made: of the step's sequences.
        setting: by which it was made.
        gpus_per_node: as of `planned_items`.
    """
    size = setting.lockstep_ranks
    times = evaluation_of(made, setting.cost_model, size, setting.pipeline)
    number = int(slots_of_micro_batches(made, setting.pipeline, size).max(initial=0)) + 1
    batch = _dealt(job, encoder, patches, number, gpus_per_node)
    how = {"tensor_ranks": job.tensor_ranks, "lockstep_ranks": size}
    choices = gap_choices(made, times, batch.micro_batches, **how)
    return evaluate_items(*plan_in_gaps(batch, encoder.cost, choices, balance), encoder.cost)


def planned_items(
    job: Job, encoder: "ItemEncoder", patches: Int64Array, balance: str, gpus_per_node: int = 8
) -> tuple[ItemBatch, ItemPlan, ItemFigures]:
    """A step's items on a job, dealt to its HDP ranks in their order; who encodes them, how long.

    Args:
        job: what is trained on.
        encoder: of its model.
        patches: of each item, ``[items]``, at least one.
        balance: a strategy of items.
        gpus_per_node: which may encode one item together.
    """
    rows = int(patches.sum()) // encoder.patches_per_row
    number = -(-rows // (job.hdp_ranks * job.tokens_per_rank))
    batch = _dealt(job, encoder, patches, number, gpus_per_node)
    plan = plan_items(batch, encoder.cost, balance)
    return batch, plan, evaluate_items(batch, plan, encoder.cost)


def _dealt(
    job: Job, encoder: "ItemEncoder", patches: Int64Array, number: int, gpus_per_node: int
) -> ItemBatch:
    """A step's items, dealt to so many micro-batches of each HDP rank in their order."""
    places, micro_batches = dealt(patches, job.hdp_ranks, number)
    return ItemBatch(
        patches=patches,
        consumers=places * np.int32(job.tensor_ranks),
        micro_batches=micro_batches,
        num_ranks=job.num_gpus,
        ranks_per_node=min(gpus_per_node, job.num_gpus),
        patches_per_row=encoder.patches_per_row,
        patches_per_pack=max(encoder.patches_per_pack, int(patches.max())),
        most_ranks=encoder.most_ranks(()),
    )


def _planned(
    forecast: EncoderForecast,
    job: Job,
    arguments: "TrainingArguments",
    encoder: "ItemEncoder",
    items: str,
    gpus_per_node: int,
) -> tuple[EncoderForecast, float]:
    """With the items of a file, dealt to the ranks in their order; and the bytes of rows."""
    sizes = read_sizes(items, encoder.shape.resizing)
    patches = sizes.patches
    balance = arguments.hdp_media_balance
    batch, made, figures = planned_items(job, encoder, patches, balance, gpus_per_node)
    rows = patches // encoder.patches_per_row
    held = np.bincount(batch.consumers, weights=rows).max() * job.token_share
    given, largest = _of_calls(job, encoder, batch, made)
    width = encoder.levels * job.shape.hidden_size * job.value_bytes
    forecast = replace(
        forecast,
        row_bytes=width,
        patches_per_pack=largest,
        items=sizes.names,
        num_items=len(patches),
        num_rows=int(rows.sum()),
        step_s=figures.makespan_s,
        efficiency=figures.efficiency,
        flop=encoder.training_flop(patches),
    )
    most = arguments.hdp_encoder_rows
    if most is None or max(held, given) <= most:
        return forecast, width * (_ROWS_IN * held + _ROWS_OUT * given)
    of_wave = _PARKED_IN * min(held, most) + _PARKED_OUT * min(given, most)
    return replace(forecast, parked_bytes=width * (_ROWS_IN * held + given)), width * of_wave


def _of_calls(
    job: Job, encoder: "ItemEncoder", batch: ItemBatch, made: ItemPlan
) -> tuple[float, int]:
    """The most rows that a rank makes, and the patches of the call that keeps most.

    A piece of a cut item also keeps the keys and values of all others; they count as patches.
    """
    whole, rows = ~made.is_cut, batch.patches // encoder.patches_per_row
    given = np.zeros(batch.num_ranks)
    np.add.at(given, made.first_ranks[whole], rows[whole])
    of_packs = np.stack([made.first_ranks, made.phases, made.turns])[:, whole]
    pack_of = np.unique(of_packs, axis=1, return_inverse=True)[1]
    largest = np.bincount(pack_of, weights=batch.patches[whole], minlength=1).max()
    shape, value_bytes = encoder.shape, job.value_bytes
    gathered = shape.gathered_bytes(value_bytes) / shape.kept_bytes(value_bytes)
    for item in np.flatnonzero(made.is_cut).tolist():
        first, degree = int(made.first_ranks[item]), int(made.degrees[item])
        pieces = batch.pieces(item, degree)
        given[first : first + degree] += pieces / encoder.patches_per_row
        others = int(batch.patches[item]) - pieces
        largest = max(largest, float((pieces + gathered * others).max()))
    return float(given.max()), round(largest)
