"""Fixtures for every test, which tests come first, and what this machine cannot run."""

import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

import hypothesis
import pytest

from tests.support import ranks
from tests.support.examples import BRIEF

# otherwise every worker and every command of a test compiles all modules again
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

hypothesis.settings.register_profile(  # no test depends on a time
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

_SLOW = "slow tests left out"
_LONG = (
    *("tests/megatron/lm", "tests/scripts", "tests/megatron", "tests/training"),
    *("tests/planner/test_cpp.py", "tests/data/test_cpp.py"),
)


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """The one way to run a test on real gloo ranks; see tests/support/ranks.py."""
    return ranks.run_ranks


@pytest.fixture(params=[300, pytest.param(30_000, marks=pytest.mark.slow)], ids=["few", "many"])
def seeds(request: pytest.FixtureRequest) -> range:
    """Seeds for a fuzz test: few and always the same, or many new ones; printed."""
    is_many = request.param > 300
    begin = random.SystemRandom().randrange(2**32) if is_many else 0
    drawn = range(begin, begin + request.param)
    print(drawn)
    return drawn


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what wants a GPU where there is none; long ones come first."""
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu and not _has_gpu():
        for item in for_gpu:
            item.add_marker(
                pytest.mark.skip(reason="no NVIDIA GPU: run pytest -m gpu where one is")
            )
    # at the end no worker waits for another one's
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    return next((i for i, long in enumerate(_LONG) if item.nodeid.startswith(long)), len(_LONG))


def _has_gpu() -> bool:
    import torch  # most tests do without it

    return bool(torch.cuda.is_available())


class SkippedLine:
    """The last line of a run: what was not run on this machine, and how to run it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._slow: set[str] = set()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Notes the long ones; parallel workers all leave out the same."""
        self._slow |= {item.nodeid for item in items if item.get_closest_marker("slow")}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Of xdist: a worker has ended and says what it left out."""
        self._slow |= set(getattr(node, "workeroutput", {}).get(_SLOW, ()))

    def pytest_sessionfinish(self) -> None:
        """Of a worker: tells the controller."""
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_SLOW] = sorted(self._slow)

    def pytest_unconfigure(self) -> None:
        """Writes the line behind pytest's own."""
        gc.unfreeze()  # extensions tell of what is left at the end
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or hasattr(self._config, "workeroutput"):
            return
        skipped = [report.longrepr for report in reporter.stats.get("skipped", ())]
        reasons = Counter(text[2].removeprefix("Skipped: ") for text in skipped if text)
        reporter.write_line(line_of(reasons, len(self._slow)))


def line_of(reasons: Counter[str], num_slow: int) -> str:
    """Return the line, the most frequent reasons first; each reason says what would run it."""
    parts = [f"{count} ({reason})" for reason, count in reasons.most_common()]
    if num_slow:
        parts.append(f"{num_slow} (long ones: ./scripts/test.sh all)")
    return "not run: " + ("; ".join(parts) or "nothing")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports without collections of garbage; what was imported is left out of later ones.

    Tests make many small objects and few cycles: they are looked for less often.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Adds the last line; heeds signals that a shell turns off for what runs in the background.

    Without slow tests and a GPU's, Megatron's fused functions are compiled by none but
    tests/megatron/step/test_compilation.py: preparing for it takes a quarter of Megatron's import.
    And properties' tests draw fewer examples.
    """
    config.pluginmanager.register(SkippedLine(config), "skipped-line")
    chosen = config.option.markexpr
    others = ("slow", "gpu")  # on a GPU they are compiled as in a run
    if "not slow" in chosen and not any(one in chosen.replace("not slow", "") for one in others):
        os.environ["TORCHDYNAMO_DISABLE"] = os.environ[BRIEF] = "1"
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
