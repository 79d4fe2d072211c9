"""The planner's strategies: what each is called, and what the other rooms know of it.

The C++ planner has a table of the same names, with a function each (``csrc/planner/planner.cpp``).
"""

from dataclasses import dataclass

AUTO = "auto"
BASELINE = "static"
"""The strategy that the others are compared with."""


@dataclass(frozen=True)
class Strategy:
    """What others know of a strategy."""

    name: str
    help: str
    """What it is, in a few words."""
    follows_speeds: bool = False
    """Whether slow ranks get less work."""
    on_pipelines: bool = False
    """Whether it plans for pipeline stages, where a micro-batch has one slot in all lists."""
    for_shared_experts: bool = False
    """Whether it differs from another strategy only where ranks share experts."""


STRATEGIES = (
    Strategy("static", "the fixed DP x CP mesh, the baseline", on_pipelines=True),
    Strategy("naive", "the paper's algorithm 1"),
    Strategy("bytescale", "the paper's algorithm 2", follows_speeds=True),
    Strategy("dynamic-cp", "Megatron-LM's dynamic context parallelism", on_pipelines=True),
    Strategy("round-balance", "dynamic-cp's rounds, planned all at once", on_pipelines=True),
    Strategy("dp-balance", "balances ranks", follows_speeds=True),
    Strategy("pp-balance", "balances pipelines", follows_speeds=True, on_pipelines=True),
    Strategy(
        "ep-balance",
        "balances ranks that share experts",
        follows_speeds=True,
        on_pipelines=True,
        for_shared_experts=True,
    ),
)
"""In the order of a comparison: baselines first. A C++ room of a strategy may include those of the
strategies before it."""

BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}
CHOICES = (AUTO, *BY_NAME)
"""What a user may name."""

HELP = (
    f"{AUTO} is pp-balance with pipeline stages, ep-balance where ranks share experts, else "
    "dp-balance; " + "; ".join(f"{one.name}: {one.help}" for one in STRATEGIES)
)
"""What a user may name, explained."""


def follows_speeds(name: str) -> bool:
    """Whether the strategy of a name, whatever ranks "auto" is for, gives slow ranks less work."""
    return name == AUTO or BY_NAME[name].follows_speeds


def resolved(name: str, *, stages: int, shares_experts: bool) -> str:
    """Return the strategy that a name stands for: what "auto" is for such ranks, else itself."""
    if name != AUTO:
        return name
    if shares_experts:
        return "ep-balance"
    return "pp-balance" if stages > 1 else "dp-balance"
