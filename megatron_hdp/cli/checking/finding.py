"""What ``check`` found of one configuration, and which virtual stages suit its pipeline best."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_hdp.cli.checking.encoder import EncoderForecast
from megatron_hdp.cli.checking.planned_step import StepForecast
from megatron_hdp.planner.memory import RESERVE, Job, StageMemory

NEAR = 0.005
"""Steps that differ by less count as equally fast: each part more costs messages and kernels that
planned times leave out."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One number of virtual stages on a rank, checked like the configuration's own."""

    virtual_stages: int
    layers: tuple[int, ...]
    """Of one virtual stage; several numbers where they differ, the fewest first."""
    needed_bytes: float
    """On a GPU of the fullest stage."""
    fits: bool
    efficiency: float | None
    """None, like the time, where the batch cannot be planned."""
    step_s: float | None


@dataclass(kw_only=True)
class Finding:
    """Everything about one configuration; what comes after a refusal may be missing."""

    configs: tuple[str, ...]
    num_gpus: int
    gpu_memory_bytes: float
    refusals: list[str] = field(default_factory=list)
    job: Job | None = None
    context_tokens: int = 0
    memory: StageMemory | None = None
    """Of the fullest stage."""
    stages: list[StageMemory] = field(default_factory=list)
    host_bytes: float = 0.0
    """Activations of one GPU that wait in host memory, at most."""
    copies_bytes: float = 0.0
    """Host memory of the copies of optimizer shards that a GPU's process keeps."""
    streamed_tokens: int = 0
    """Of the longest sequence on a rank, where it streams and what it keeps waits on the host."""
    longest_stream_tokens: int | None = None
    """That all ranks can stream, by the memory of nodes; None: they may not, or it is not known."""
    host_memory_bytes: float | None = None
    """Of one node; None: not known, and so not checked."""
    gpus_per_node: int = 8
    runtime_bytes: float | None = None
    """What CUDA, libraries and NCCL hold of a GPU, where it is given."""
    step: StepForecast | None = None
    encoder: EncoderForecast | None = None
    """None: text alone."""
    warning: str = ""
    """Of the cost model, by which the step is planned."""
    virtual_stages: list[Tried] = field(default_factory=list)
    """Each number of them that the layers allow; none without pipeline stages."""
    best_virtual_stages: int | None = None
    """Of those that fit."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing was refused."""
        return not self.refusals

    @property
    def reserve_bytes(self) -> float:
        """What is left free of a GPU's memory."""
        return RESERVE * self.gpu_memory_bytes

    @property
    def node_host_bytes(self) -> float:
        """What the GPUs of one node have in its memory, at most."""
        return (self.host_bytes + self.copies_bytes + self.parked_bytes) * self.node_gpus

    @property
    def parked_bytes(self) -> float:
        """Rows of items of one GPU that wait in host memory, and their gradients."""
        return self.encoder.parked_bytes if self.encoder else 0.0

    @property
    def node_gpus(self) -> int:
        """GPUs of one node that are used."""
        return min(self.gpus_per_node, self.num_gpus)


def best_of(tried: Sequence[Tried], own: int) -> int | None:
    """The virtual stages on a rank to take; None if none fits.

    The configuration's own number is kept where it is as fast as the fastest.
    """
    times = {one.virtual_stages: one.step_s for one in tried if one.fits and one.step_s is not None}
    if not times:
        return None
    slowest_s = min(times.values()) * (1 + NEAR)
    near = [number for number, step_s in times.items() if step_s <= slowest_s]
    return own if own in near else min(near)
