"""What ``check`` found of one configuration."""

from dataclasses import dataclass, field

from megatron_hdp.cli.checking.planned_step import StepForecast
from megatron_hdp.cli.checking.virtual_stages import Tried
from megatron_hdp.planner.memory import RESERVE, Job, StageMemory


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
    host_memory_bytes: float | None = None
    """Of one node; None: not known, and so not checked."""
    gpus_per_node: int = 8
    step: StepForecast | None = None
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
        return self.host_bytes * min(self.gpus_per_node, self.num_gpus)
