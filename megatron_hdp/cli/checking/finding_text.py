"""What ``check`` finds, as text and as JSON."""

from dataclasses import asdict

from megatron_hdp.cli.checking.finding import NEAR, Finding, Tried
from megatron_hdp.cli.shared.outputs import indented
from megatron_hdp.planner.memory import RESERVE, Job, StageMemory, num_communicators
from megatron_hdp.simulator.units import aligned, seconds, short

_ROWS = (
    ("weights", "weights", "{precision}"),
    ("gradients", "gradients", "float32"),
    ("optimizer", "optimizer state", "{optimizer}"),
    ("activations", "activations", "{activations}"),
    ("keys", "keys of parts", "K and V that later parts see, their float32 gradients"),
    ("recomputed", "recomputed layers", "whole while backward is in them"),
    ("backward", "a layer's backward", "gradients at the busiest moment"),
    ("ring_buffers", "ring buffers", "{ring_buffers}{streams}"),
    ("second_stream", "second stream", "of TransformerEngine's ring, in separate memory"),
    ("in_flight", "ring transfers", "of TransformerEngine's ring, freed and not yet passed"),
    ("rows", "rows of items", "{rows} and their gradients, with what is sent"),
    ("pack", "a call's items", "{pack} patches, not at the same time as activations"),
    ("loss", "loss", "hidden states, a chunk of logits"),
    ("runtime", "CUDA, NCCL", "{runtime}"),
)

_SIZES = (
    *("num_layers", "hidden_size", "vocab_size"),
    *("parameters", "active_parameters", "trained_parameters"),
)


def as_json(finding: Finding) -> str:
    """All figures; sizes in bytes, times in seconds."""
    figures = asdict(finding)
    if finding.job:
        shape = finding.job.shape
        figures["job"]["shape"] = {name: getattr(shape, name) for name in _SIZES}
    figures |= {
        "is_sound": finding.is_sound,
        "reserve_bytes": finding.reserve_bytes,
        "node_host_bytes": finding.node_host_bytes,
        "needed_bytes": finding.memory.total if finding.memory else None,
        "hdp_ranks": finding.job.hdp_ranks if finding.job else None,
    }
    return indented(figures)


def as_text(finding: Finding) -> str:
    """A table of GB, a few lines on the planned step, and the verdict."""
    lines = []
    if finding.job and finding.memory:
        lines += [
            _headline(finding, finding.job),
            *_encoder(finding),
            *_stages(finding, finding.job),
        ]
        lines += _table(finding, finding.job, finding.memory)
    lines += _step_lines(finding)
    lines += [f"  {finding.warning}"] if finding.warning else []
    lines += _virtual_stages(finding)
    lines += [f"refused: {refusal}" for refusal in finding.refusals] or ["sound"]
    return "\n".join(lines)


def _headline(finding: Finding, job: Job) -> str:
    stages = f" x {job.stages} stages" if job.stages > 1 else ""
    experts = f", experts over {job.expert_ranks} ranks" if job.shape.has_experts else ""
    shape = job.shape
    trained = "" if shape.trains_all else f", {short(shape.trained_parameters)} are trained"
    return (
        f"{short(shape.parameters)} parameters, {short(shape.active_parameters)} of them multiply "
        f"a token{trained}; {shape.num_layers} layers, vocabulary {shape.vocab_size:,}\n"
        f"{job.num_gpus:,} GPUs: {job.hdp_ranks:,} HDP ranks x {job.tensor_ranks} tensor ranks"
        f"{stages}{experts}; {job.tokens_per_rank:,} tokens a rank, context "
        f"{finding.context_tokens:,}"
    )


def _encoder(finding: Finding) -> list[str]:
    """What is on every GPU besides."""
    encoder = finding.encoder
    if encoder is None:
        return []
    shown = f"encoder of {short(encoder.parameters)} parameters, whole on every GPU"
    if encoder.trained_parameters < encoder.parameters:
        shown += f", {short(encoder.trained_parameters)} are trained"
    return [shown]


def _stages(finding: Finding, job: Job) -> list[str]:
    """A line for each pipeline stage: what it holds, and the GB that this takes on a GPU."""
    if job.stages == 1:
        return []
    rows = [(f"{one.stage} ({_holds(job, one.stage)})", one) for one in finding.stages]
    width = max(len("stage"), *(len(name) for name, _ in rows))
    lines = [f"  {'stage':<{width}}  GB: state  activations     work      sum"]
    for name, one in rows:
        state = one.weights + one.gradients + one.optimizer + one.runtime
        state += one.rows
        work = one.total - state - one.activations
        sizes = [f"{size / 1e9:.2f}" for size in (state, one.activations, work, one.total)]
        most = "  the most" if one is finding.memory else ""
        lines.append(
            f"  {name:<{width}}  {sizes[0]:>9}  {sizes[1]:>11}  {sizes[2]:>7}  {sizes[3]:>7}{most}"
        )
    return lines


def _holds(job: Job, stage: int) -> str:
    """The parts of the model on a stage, in words."""
    parts = ["embedding"] if stage == 0 else []
    parts.append(_layers(job, stage))
    parts += ["output layer"] if stage == job.stages - 1 else []
    return ", ".join(parts)


def _layers(job: Job, stage: int) -> str:
    """How many layers, and of chunks that differ how many in each."""
    of_chunks = job.split.of_chunks(stage)
    layers = sum(of_chunks)
    shown = f"{layers} layer{'' if layers == 1 else 's'}"
    return shown if len(set(of_chunks)) == 1 else f"{'+'.join(map(str, of_chunks))} layers"


def _table(finding: Finding, job: Job, memory: StageMemory) -> list[str]:
    layers = _layers(job, memory.stage)
    notes = {
        "precision": "bfloat16" if job.bf16 else "float32",
        "optimizer": "sharded over the HDP ranks" if job.distributed_optimizer else "not sharded",
        "activations": f"{job.alive(memory.stage):,g} full micro-batches of {layers}"
        if job.stages > 1
        else layers,
        "ring_buffers": "K and V 4 times, their float32 gradients 5 times: double rings"
        if job.double_rings
        else "K and V twice, their float32 gradients twice",
        "streams": ", all three times: streams" if job.streams else "",
        "pack": f"{finding.encoder.patches_per_pack:,}" if finding.encoder else "",
        "rows": "of a wave" if finding.parked_bytes else "of a step",
        "runtime": f"assumed, {num_communicators(job)} communicators"
        if job.runtime_bytes is None
        else "measured",
    }
    head = f"GB on a GPU of stage {memory.stage}" if job.stages > 1 else "GB on a GPU"
    lines = [f"  {head}"]
    for name, title, note in _ROWS:
        size = getattr(memory, name)
        if size:
            lines.append(f"  {title:<20}{size / 1e9:7.2f}  {note.format(**notes)}")
    lines.append(
        f"  {'sum':<20}{memory.total / 1e9:7.2f}  of {finding.gpu_memory_bytes / 1e9:.2f}, "
        f"{RESERVE:.0%} ({finding.reserve_bytes / 1e9:.2f}) in reserve"
    )
    return lines


def _step_lines(finding: Finding) -> list[str]:
    step, job = finding.step, finding.job
    if step is None or job is None:
        return []
    lines = [
        f"  longest sequence    {finding.context_tokens:,} tokens fit; all ranks hold "
        f"{job.hdp_ranks * job.tokens_per_rank:,} at a time",
        f"  a step of {step.preset:<10}{step.num_tokens:,} tokens, {step.num_sequences:,} "
        f"sequences, {step.micro_batches:,} micro-batches",
        f"  efficiency          {step.efficiency:.3f}",
        f"  step time           {seconds(step.step_s)} estimated, {step.flops_per_s / 1e12:.0f} "
        "TFLOP/s a GPU (400 while it computes)",
    ]
    encoder = finding.encoder
    if encoder is not None:
        shown = "not known, nor the memory of rows: give --items"
        if encoder.efficiency is not None:
            shown = f"{seconds(encoder.step_s)} of it, efficiency {encoder.efficiency:.3f}"
            if encoder.outside_s is not None and encoder.step_s < encoder.outside_s:
                shown = (
                    f"{seconds(encoder.step_s)} of it, in gaps of the pipeline; "
                    f"{seconds(encoder.outside_s)} before and behind the micro-batches"
                )
            shown += f": {encoder.num_items:,} items, {encoder.num_rows:,} rows"
        lines.append(f"  {encoder.items:<20}{shown}")
    if step.num_positions is not None and step.padding_share is not None:
        lines.append(
            f"  slots               {step.num_positions:,} at most, padding in "
            f"{step.padding_share:.1%} of them"
        )
    if step.exchanged_bytes:
        lines.append(
            f"  all-to-all          {step.exchanged_bytes / job.num_gpus / 1e9:,.1f} GB a GPU "
            "go to experts and back, not in the step time"
        )
    if finding.longest_stream_tokens is not None:
        lines.append(
            f"  longest stream      {finding.longest_stream_tokens:,} tokens: keys, values and "
            "their gradients fill the hosts and half of the capacity"
        )
    if finding.host_bytes:
        most = max(finding.streamed_tokens, step.most_tokens)
        lines.append(
            f"  host memory         {finding.host_bytes / 1e9:.1f} GB a GPU at most, up to "
            f"{most:,} tokens on a rank"
        )
    if finding.copies_bytes:
        lines.append(
            f"  copies              {finding.copies_bytes / 1e9:.1f} GB of host memory a GPU: two "
            "versions of its optimizer shard, two of a neighbour's"
        )
    if finding.parked_bytes:
        lines.append(
            f"  parked rows         {finding.parked_bytes / 1e9:.1f} GB of host memory a GPU, and "
            "their gradients"
        )
    if finding.node_host_bytes:
        node = f"{finding.node_host_bytes / 1e9:,.1f} GB a node of {finding.gpus_per_node} GPUs"
        known = finding.host_memory_bytes
        of = "not checked: give --host-memory" if known is None else f"of {known / 1e9:,.1f}"
        lines.append(f"{'':22}{node}, {of}")
    return lines


def _virtual_stages(finding: Finding) -> list[str]:
    """A line for each number of them that could be, and which one to take."""
    tried = finding.virtual_stages
    if len(tried) < 2 or finding.job is None:
        return []
    head = ("virtual stages", "layers each", "GB, at most", "efficiency", "step time")
    rows = [head, *map(_row_of, tried)]
    lines = aligned(rows, texts=())
    best, own = finding.best_virtual_stages, finding.job.model_chunks
    if best is None:
        return lines
    flag = "--num-virtual-stages-per-pipeline-rank"
    take = f"{flag} {best}" if best > 1 else f"no {flag}"
    now = "as it is" if best == own else f"not {own}: the fewest within {NEAR:.1%} of the fastest"
    return [*lines, f"  best: {take}, {now}"]


def _row_of(one: Tried) -> tuple[str, ...]:
    fewest, most = one.layers[0], one.layers[-1]
    layers = f"{most}" if fewest == most else f"{fewest} to {most}"
    planned = ("", "does not fit")
    if one.fits and one.efficiency is not None and one.step_s is not None:
        planned = f"{one.efficiency:.3f}", seconds(one.step_s)
    return f"{one.virtual_stages}", layers, f"{one.needed_bytes / 1e9:.2f}", *planned
