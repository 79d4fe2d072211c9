"""The rows of the benchmark's tables: data, ranks, capacity, stages, shared experts."""

import dataclasses
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.lengths import batch_of
from megatron_hdp.cli.plan_outcomes import Request
from megatron_hdp.data.presets import LONGEST
from megatron_hdp.planner import LLAMA_7B, CostModel

_EXPERT_SHARE = 0.5  # of what is linear in the tokens, where ranks share experts


@dataclass(frozen=True)
class Case:
    """One row of the tables."""

    data: str
    """A preset; ``python``: the files of the standard library, a byte being a token; or ``tailed``:
    four of five sequences have 300 to 2,000 tokens, the others a Pareto tail from 3,000 on."""
    ranks: int
    tokens_per_rank: int
    goal: str = ""
    """Bound / makespan that the default strategy must reach."""
    num_tokens: int | None = None
    """Of the global batch; 4 x ranks x tokens per rank if not given."""
    pipeline_stages: int = 1
    expert_parallel_size: int = 1
    """Ranks that share experts: half of what is linear in the tokens is theirs then."""
    half_speed: bool = False
    """Rank 0 runs at half speed."""
    offload: bool = False
    """Activations may go to host memory."""
    cost_model: CostModel = LLAMA_7B
    """Of a rank, ``num_layers`` being those of the model."""

    @property
    def name(self) -> str:
        """What ``--cases`` matches: data-N64-C8K, with -P4, -E8, -slow, -offload or the tokens."""
        name = f"{self.data}-N{self.ranks}-C{self.tokens_per_rank // 1024}K"
        name += f"-{self.num_tokens // 2**20}M" if self.num_tokens else ""
        name += f"-P{self.pipeline_stages}" if self.pipeline_stages > 1 else ""
        name += f"-E{self.expert_parallel_size}" if self.expert_parallel_size > 1 else ""
        return name + ("-slow" if self.half_speed else "") + ("-offload" if self.offload else "")

    def request(self, seed: int) -> Request:
        """Return what to plan."""
        speeds = (0.5, *[1.0] * (self.ranks - 1)) if self.half_speed else ()
        share = _EXPERT_SHARE if self.expert_parallel_size > 1 else 0.0
        linear = self.cost_model.linear_s_per_token
        return Request.of(
            self._lengths(seed),
            ranks=self.ranks,
            tokens_per_rank=self.tokens_per_rank,
            cost_model=dataclasses.replace(
                self.cost_model,
                b=(1 - share) * linear,
                b_experts=share * linear,
                rank_speeds=speeds,
                num_layers=self.cost_model.num_layers // self.pipeline_stages,
            ),
            max_length=min(LONGEST, self.ranks * self.tokens_per_rank),
            pipeline_stages=self.pipeline_stages,
            expert_parallel_size=self.expert_parallel_size,
            offload="auto" if self.offload else "off",
        )

    def _lengths(self, seed: int) -> Int64Array:
        if self.data == "python":
            return _python_lengths(self.ranks * self.tokens_per_rank, seed)
        if self.data == "tailed":
            return _tailed_lengths(self.ranks * self.tokens_per_rank, seed)
        return batch_of(
            f"preset:{self.data}",
            ranks=self.ranks,
            tokens_per_rank=self.tokens_per_rank,
            num_tokens=self.num_tokens,
            seed=seed,
        ).lengths


def _tailed_lengths(room: int, seed: int) -> Int64Array:
    """Lengths up to 4 x ``room`` tokens together, four of five short, the others a Pareto tail."""
    rng = np.random.default_rng(seed)
    count = 4 * room // 1000
    tail = 3000 * (1 + rng.pareto(1.3, count))
    short = rng.uniform(300, 2000, count)
    lengths = np.where(rng.random(count) < 0.2, tail, short).clip(max=min(LONGEST, room))
    whole = lengths.astype(np.int64)
    return whole[: int(np.searchsorted(np.cumsum(whole), 4 * room, side="right"))]


def _python_lengths(room: int, seed: int) -> Int64Array:
    """Lengths of the standard library's files in a random order, up to 4 x ``room`` tokens."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    sizes = np.array([size for path in files if (size := path.stat().st_size)], dtype=np.int64)
    lengths = np.random.default_rng(seed).permutation(sizes).clip(max=min(LONGEST, room))
    return lengths[: int(np.searchsorted(np.cumsum(lengths), 4 * room, side="right"))]


def all_cases() -> list[Case]:
    """Return the cases in the order of the tables."""
    capacities, presets = (8192, 32768), ("github", "byted")
    few = [
        Case(data, 64, capacity, "mean 0.97, worst 0.95")
        for capacity in capacities
        for data in (*presets, "python")
    ]
    many = [
        Case(data, ranks, capacity, "0.98")
        for ranks in (256, 1024, 4096, 16384)
        for capacity in capacities
        for data in presets
    ]
    slow = [
        Case(data, 64, 8192, "0.96", half_speed=True, offload=offload)
        for offload in (False, True)
        for data in presets
    ]
    return [*few, *many, Case("byted", 512, 8192, "0.97", 32 * 2**20), *slow]


def pipeline_cases() -> list[Case]:
    """Return the cases of the table of pipelines."""
    return [
        Case(data, ranks, capacity, pipeline_stages=stages)
        for ranks in (16, 64, 256, 1024)
        for capacity in (8192, 32768)
        for data in ("github", "byted")
        for stages in (4, 8)
    ]


def expert_cases() -> list[Case]:
    """Return the cases of the table of ranks that share experts."""
    return [
        Case(data, ranks, capacity, "mean 0.97, worst 0.94", expert_parallel_size=size)
        for ranks in (64, 256, 1024)
        for capacity in (8192, 32768)
        for data in ("github", "byted", "python", "tailed")
        for size in (8, 32, 64)
    ]


def expert_pipeline_cases() -> list[Case]:
    """Return the cases of the table of pipelines that share experts."""
    return [
        Case(data, ranks, capacity, pipeline_stages=4, expert_parallel_size=8)
        for ranks in (64, 256)
        for capacity in (8192, 32768)
        for data in ("github", "byted", "python", "tailed")
    ]
