"""A data plane of threads: real sources on disk and real roles, neither Ray nor torch."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_hdp.data import TokenWriter
from megatron_hdp.data.mixture import BatchSize, Opening, Position, open_corpus, read_data_file
from megatron_hdp.data.spans import SpansWriter
from megatron_hdp.data.steps import LocalLoaders, PlanSettings, StepPlanner, StepTotals
from megatron_hdp.data_plane.roles import Answer, Journal, LoadingService, PlanningService
from megatron_hdp.data_plane.setup import SplitSetup
from megatron_hdp.planner import CostModel
from tests.support.rank_steps import differences

VOCABULARY = 257
LENGTHS = {
    "web": [30, 3, 64, 20, 9, 41, 7, 7] * 20,  # more rows than a loader reads together
    "chat": [12, 40, 8, 25, 33],
    "code": [100, 5, 90, 31],
}
WEIGHTS = "schedule: [{from: 0, weights: {web: 0.5, chat: 0.2, code: 0.3}}]"


def write_pair(folder, name, lengths, seed):
    """Random documents; of conversations every other piece of four tokens is trained."""
    rng = np.random.default_rng(seed)
    (folder / name).mkdir(exist_ok=True)
    with TokenWriter(folder / name / "corpus", VOCABULARY) as writer:
        for length in lengths:
            writer.add(rng.integers(0, VOCABULARY, length))
    if name == "chat":
        with SpansWriter(folder / name / "corpus.spans") as writer:
            for length in lengths:
                starts = np.arange(4, length, 8)
                writer.add(np.stack([starts, np.minimum(starts + 4, length)], axis=1))


def data_file(folder, more=WEIGHTS, names=tuple(LENGTHS), name="data.yaml", **keys):
    """A file of --hdp-data; `keys` are what a source has besides its path, as YAML."""
    lines = [
        f"  {one}: {{path: {one}/corpus{', ' + keys[one] if one in keys else ''}}}" for one in names
    ]
    path = Path(folder) / name
    path.write_text("\n".join(["sources:", *lines, more, ""]))
    return path


def write_notes(folder, count, words, keys="", more=""):
    """Texts that are tokenised on the fly, beside `web`; return the file that names both."""
    lines = [json.dumps({"text": f"{i} " * words[i % len(words)]}) for i in range(count)]
    (folder / "notes.jsonl").write_text("\n".join(lines))
    path = folder / "data.yaml"
    path.write_text(
        "sources:\n"
        f"  notes: {{path: notes.jsonl, tokenise: on-the-fly, tokenizer: byte{keys}}}\n"
        f"  web: {{path: web/corpus}}\n{more}"
    )
    return path


def write_pairs(folder, lengths=LENGTHS, *, seed=0, more=WEIGHTS, keys=None):
    for number, (name, documents) in enumerate(lengths.items()):
        write_pair(folder, name, documents, [seed, number])
    return data_file(folder, more, tuple(lengths), **(keys or {}))


def plan_settings(**changes):
    """A step of 12 sequences on four ranks, rings among them."""
    settings = {
        "batch": BatchSize(sequences=12),
        "seed": 3,
        "num_ranks": 4,
        "num_stages": 1,
        "lockstep_ranks": 1,
        "tokens_per_rank": 64,
        "strategy": "auto",
        "max_length": 100,
        "slice_multiple": 1,
        "offload": "off",
        "cost_model": CostModel(a=1e-9, b=1e-6, kv_bytes_per_token=100),
    }
    return PlanSettings(**(settings | changes))


def setup_of(path, settings=None, **loaders):
    """The training split of a file of --hdp-data."""
    file = read_data_file(path)
    given = {"max_length": 100, "long_sequence": "truncate", "tokenizer": "byte"}
    given["cache_folder"] = None
    return SplitSetup(
        split="train",
        spec=file.training,
        settings=settings or plan_settings(),
        orders=open_corpus(file.training, Opening(**given)).orders(),
        loaders=replace(file.loaders, backend="ray", **loaders),
        **given,
    )


def planner_of(setup):
    """Return what draws and plans a split, opened anew."""
    return setup.planner(lambda text: None, lambda source: source)


def planning_of(setup, folder, steps_ahead=0, planner=None):
    """Return a planning service with its journal in a folder, and a loader for each source."""
    made = PlanningService(
        setup.split,
        planner or planner_of(setup),
        Journal(folder / "journal"),
        steps_ahead=steps_ahead,
    )
    names = [one.name for one in setup.spec.sources]
    made.serve({name: (f"{name}-0",) for name in names}, dict.fromkeys(names, 1))
    return made


def loading_of(setup):
    names = [one.name for one in setup.spec.sources]
    return {one.name: LoadingService(one) for one in setup.opened(names, lambda text: None)}


def local_steps(corpus, settings, reader, count):
    """Return the first steps of a reader, as the loaders in its own process give them."""
    local = LocalLoaders(StepPlanner(corpus, settings), reader)
    steps, position = [], Position()
    for _ in range(count):
        steps.append(local.prepare(position))
        position = steps[-1].totals.after
    local.close()
    return steps


def without_time(step):
    """Return a step without the one figure that no two plannings share."""
    return replace(step, totals=replace(step.totals, planning_ms=0.0))


def require_same(one, other):
    """Fail unless two steps are the same to the bit, but for the time that planning took."""
    assert differences(without_time(one), without_time(other)) == []


class Planner:
    """Answers from memory, without a journal; `epoch` may be set.

    Step by step there may be other numbers of loaders.
    """

    def __init__(self, step_planner, num_loaders=(1,), num_shadows=0):
        self._planner = step_planner
        self._num_loaders, self._num_shadows = num_loaders, num_shadows
        self.epoch = 1
        self.asked = []

    def __call__(self, position, ranks):
        self.asked.append((position.steps, tuple(ranks)))
        planned = self._planner.plan(position)
        names = self._planner.corpus.names
        count = self._num_loaders[position.steps % len(self._num_loaders)]
        numbers = range(count + self._num_shadows)
        return Answer(
            epoch=self.epoch,
            totals=StepTotals.of(planned, len(names)),
            shares=self._planner.shares(planned).of(ranks),
            loaders={name: tuple(f"{name}-{i}" for i in numbers) for name in names},
            num_serving=dict.fromkeys(names, count),
            planned=planned if self._planner.corpus.has_media else None,
        )


class Loaders:
    """All loaders of a split; answers come after delays, so in any order."""

    def __init__(self, services, delays_ms=(0,)):
        self._services = services
        self._delays_ms = delays_ms
        self._lock = threading.Lock()
        self.asked = []
        """Source, loaders in the order in which to ask them, what is wanted."""

    def __call__(self, source, loaders, wanted):
        with self._lock:
            self.asked.append((source, tuple(loaders), wanted))
            delay_ms = self._delays_ms[len(self.asked) % len(self._delays_ms)]
        time.sleep(delay_ms / 1000)
        return self._services[source].load(wanted)


class Others:
    """Planner and loaders of a node service, in this process."""

    num_takeovers, longest_takeover_s = 2, 0.5

    def __init__(self, services):
        self._services = services
        self.setups, self.planners, self.load = [], {}, Loaders(services)
        self.failed, self.decoded = [], []

    def configure(self, setup):
        self.setups.append(setup)
        self.planners[setup.split] = Planner(planner_of(setup))

    def plan(self, split, position, ranks):
        return self.planners[split](position, ranks)

    def decode(self, source, loaders, wanted):
        self.decoded.append((source, tuple(loaders), wanted))
        return self._services[source].decode(wanted)

    def go_on_without(self, split, source, why):
        self.failed.append((split, source, why))
