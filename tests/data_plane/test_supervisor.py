"""Which loaders a source has and which of them serve, with actors that only say what they are told.

A real plane: `tests/training/test_data_plane.py`.
"""

from types import SimpleNamespace

import pytest

from megatron_hdp.data_plane.records import to_plain
from tests.support.thread_plane import setup_of, write_pairs

supervisor = pytest.importorskip(
    "megatron_hdp.data_plane.supervisor", reason="no Ray: pip install 'megatron-hdp[ray]'"
)


class Died(supervisor.RayError):
    """Of an actor."""


def call(answer):
    """A method of an actor, asked by Ray's words."""

    def remote(*arguments):
        of = getattr(answer, "__self__", None)
        return SimpleNamespace(value=lambda: answer(*arguments), of=of)

    return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))


class Loader:
    """An actor whose process opens its source, works, or has died."""

    def __init__(self, number, sources=("web",)):
        self.number, self.sources = number, sources
        self.state = "opens"
        self.looks, self.busy_s = 0, dict.fromkeys(sources, 0)
        self.busy_with = sources
        self.figures = call(self._figures)

    def _figures(self):
        if self.state == "died":
            raise Died
        if self.state == "spare":
            return None
        self.looks += 1
        for one in self.sources:
            self.busy_s[one] += self.state == "busy" and one in self.busy_with
        done = {one: {"busy_s": self.busy_s[one], "tokens": 0} for one in self.sources}
        about = {"pid": self.number, "looked_s": self.looks, "rss_bytes": 30 * 2**20}
        return {"sources": done, **about}


class Plane:
    """A supervisor, and what it told the planner: of the source `web`, and of all."""

    def __init__(self, monkeypatch, setup, spares=0, nodes=1):
        self.loaders, self.killed, self.opened, self.serves = [], [], [], None
        self.all_serve = {}
        self.is_known, self.nodes = True, nodes
        self.opening = lambda: None
        fake_ray = SimpleNamespace(wait=self._wait, kill=self._kill)
        fake_ray.get = lambda asked, timeout=None: asked.value()
        fake_ray.nodes = lambda: [{"Alive": number < self.nodes} for number in range(9)]
        monkeypatch.setattr(supervisor, "ray", fake_ray)
        monkeypatch.setattr(supervisor, "start_loader", self._start)
        monkeypatch.setattr(supervisor, "start_spare", self._start_spare)
        monkeypatch.setattr(supervisor, "open_spare", self._open_spare)
        monkeypatch.setattr(supervisor, "_JUDGE_S", 0.0)
        planner = SimpleNamespace(
            setups=call(lambda: {"train": to_plain(setup)} if self.is_known else {}),
            figures=call(lambda: {"epoch": 1}),
            serve=call(self._serve),
        )
        self._supervisor = supervisor.Supervisor("plane", planner, spares)

    def look(self, times=1, behind=frozenset()):
        for _ in range(times):
            self._supervisor.look(1, {"train": set(behind)})
        return self.serves

    def _serve(self, split, loaders, num_serving):
        assert split == "train"
        self.all_serve = {
            source: ([int(name.rpartition("-")[2]) for name in names], num_serving[source])
            for source, names in loaders.items()
        }
        self.serves = self.all_serve["web"]

    def figures(self, source):
        return self._supervisor.figures()["train"][source]

    def _start(self, plane, setup, sources, number):
        self.loaders.append(Loader(number, sources))
        return self.loaders[-1]

    def _start_spare(self, plane, number):
        loader = self._start(plane, None, (), number)
        loader.state = "spare"
        return loader

    def _open_spare(self, loader, setup, sources):
        assert sources
        loader.__init__(loader.number, sources)
        loader.state = "spare"
        self.opened.append(loader.number)
        return SimpleNamespace(value=self.opening, of=None)

    def _kill(self, loader, no_restart):
        self.killed.append(loader.number)

    def _wait(self, asked, num_returns=1, timeout=None):
        return [one for one in asked if getattr(one.of, "state", "") != "opens"], []


@pytest.fixture
def plane(tmp_path, monkeypatch):
    path = write_pairs(tmp_path, {"web": [30, 3, 64]}, more="")

    def made(spares=0, nodes=1, **loaders):
        return Plane(monkeypatch, setup_of(path, **loaders), spares, nodes)

    return made


def test_a_loader_serves_once_it_has_opened_its_source(plane):
    one = plane(min=1, max=3)
    assert one.look() == ([0], 1)  # somebody must be asked
    one.loaders[0].state = "busy"
    assert one.look(5) == ([0, 1], 1)
    assert one.look(9) == ([0, 1], 1)  # however long it opens, and no third one meanwhile
    one.loaders[1].state = "busy"
    assert one.look() == ([0, 1], 2)
    assert one.killed == []


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A plane over three sources, two of them in one loader: a run continues without `code`."""
    keys = {"code": "on-failure: go-on-without"}
    path = write_pairs(tmp_path, keys=keys)

    def made(spares=0, **loaders):
        return Plane(monkeypatch, setup_of(path, sources_per_loader=9, **loaders), spares)

    return made


def test_sources_share_a_loader_but_for_one_that_may_fail(shared):
    one = shared(max=3, shadows=1)
    one.look()
    assert [loader.sources for loader in one.loaders] == [("web", "chat")] * 2 + [("code",)] * 2
    for loader in one.loaders:
        loader.state = "works"
    one.look()
    both = [0, 1], 1
    assert one.all_serve == {"web": both, "chat": both, "code": ([2, 3], 1)}
    one.loaders[0].state = "died"
    one.look()
    assert one.all_serve == {"web": ([1, 0], 1), "chat": ([1, 0], 1), "code": ([2, 3], 1)}


def test_a_busy_source_gets_loaders_of_its_own_and_an_idle_one_gives_them_back(shared):
    one = shared(max=3)
    one.look()
    for loader in one.loaders:
        loader.state, loader.busy_with = "busy", ("chat",)
    one.look(4)
    assert [loader.sources for loader in one.loaders] == [("web", "chat"), ("code",), ("chat",)]
    one.loaders[2].state = "works"
    one.look()
    assert one.all_serve == {"web": ([0], 1), "chat": ([0, 2], 2), "code": ([1], 1)}
    for loader in one.loaders:
        loader.state = "idle"
    one.look(12)
    assert one.killed == [2]
    assert one.all_serve == {"web": ([0], 1), "chat": ([0], 1), "code": ([1], 1)}


def test_a_busy_source_leaves_the_standby_loader_to_the_others(shared):
    one = shared(max=2, shadows=1)
    one.look()
    for loader in one.loaders:
        loader.state, loader.busy_with = "busy", ("chat",)
    one.look(4)
    assert one.loaders[4].sources == ("chat",)
    assert one.all_serve["chat"] == ([0, 1, 4], 2)  # while its own one opens
    one.loaders[4].state = "works"
    one.look()
    assert one.all_serve["chat"] == ([0, 4, 1], 2)
    assert one.all_serve["web"] == ([0, 1], 1)


def test_figures_of_a_shared_loader_are_told_by_source(shared):
    one = shared()
    one.look()
    for loader in one.loaders:
        loader.state, loader.busy_with = "busy", ("chat",)
    one.look(2)
    (web,), (chat,), (code,) = (one.figures(name)["loaders"] for name in ("web", "chat", "code"))
    assert (web["busy_s"], chat["busy_s"]) == (0, 2)
    assert web["pid"] == chat["pid"] != code["pid"]
    sizes = [each["rss_bytes"] / 2**20 for each in (web, chat, code)]
    assert sizes == [15, 15, 30]  # together what the processes have


def test_a_shared_loader_does_not_count_once_for_each_of_its_sources(shared):
    """The planted fault would be a limit that five sources in one process reach at a fifth."""
    for memory_mb, num_loaders in ((75, 3), (74, 2)):
        one = shared(max=2, memory_mb=memory_mb)
        one.look()
        for loader in one.loaders:
            loader.state, loader.busy_with = "busy", ("web",)
        one.look(9)
        assert len(one.loaders) == num_loaders


def test_one_spare_takes_all_that_share_a_loader(shared):
    one = shared(spares=3)
    one.is_known = False
    one.look()
    one.is_known = True
    one.look()
    assert (one.opened, one.killed) == ([0, 1], [2])
    assert [loader.sources for loader in one.loaders[:2]] == [("web", "chat"), ("code",)]


def test_looks_may_be_more_frequent_than_decisions(plane, monkeypatch):
    one = plane(min=1, max=3)
    one.look()
    one.loaders[0].state = "busy"
    one.look()
    monkeypatch.setattr(supervisor, "_JUDGE_S", 1000.0)
    one.look(20, behind={"web"})
    assert len(one.loaders) == 1
    monkeypatch.setattr(supervisor, "_JUDGE_S", 0.0)
    one.look(2)
    assert len(one.loaders) == 2


def test_the_share_of_one_that_has_died_goes_to_the_others(plane):
    one = plane(min=2, max=2, shadows=1)
    one.look()
    for loader in one.loaders:
        loader.state = "works"
    assert one.look() == ([0, 1, 2], 2)
    one.loaders[0].state = "died"
    assert one.look() == ([1, 2, 0], 2)
    one.loaders[2].state = "died"
    assert one.look() == ([1, 0, 2], 1)
    one.loaders[0].state = "works"
    assert one.look() == ([0, 1, 2], 2)


def test_an_idle_source_gives_loaders_back(plane):
    one = plane(min=1, max=3)
    one.look()
    for _ in range(2):
        one.loaders[-1].state = "busy"
        one.look(6)
    assert len(one.loaders) == 3 and one.killed == []
    for loader in one.loaders:
        loader.state = "idle"
    assert one.look(12) == ([0], 1)
    assert one.killed == [2, 1]


def test_spares_open_what_is_wanted_and_the_rest_end(plane):
    one = plane(spares=3, min=1, max=3, shadows=1)
    one.is_known = False
    one.look(4)
    assert [loader.number for loader in one.loaders] == [0, 1, 2] and one.opened == []
    one.is_known = True
    one.look()
    assert (one.opened, one.killed) == ([0, 1], [2])
    for loader in one.loaders[:2]:
        loader.state = "works"
    assert one.look() == ([0, 1], 1)
    one.loaders[1].state = "busy"
    one.loaders[0].state = "busy"
    one.look(6)
    assert len(one.loaders) == 4  # started for the source, as without spares


def test_a_spare_that_was_started_again_opens_its_source_again(plane):
    one = plane(spares=1, min=1, max=1)
    one.is_known = False
    one.look()
    one.is_known = True
    one.look()
    one.loaders[0].state = "works"
    one.look()
    one.loaders[0].state = "died"
    one.look(2)
    assert one.opened == [0]
    one.loaders[0].state = "spare"
    one.look()
    assert one.opened == [0, 0]


@pytest.mark.parametrize(
    ("error", "opened"),
    [(supervisor.RayTaskError("open", "", ValueError("x")), [0]), (Died(), [0, 0, 0])],
    ids=["the source cannot be opened", "it died while it opened"],
)
def test_a_spare_that_died_opens_again_and_none_for_a_mistake(plane, error, opened):
    one = plane(spares=1, min=1, max=1)
    one.is_known = False
    one.look()
    one.is_known, one.opening = True, raises(error)
    one.look(3)
    assert one.opened == opened


def raises(error):
    def get():
        raise error

    return get


def test_spares_wait_for_the_nodes(plane):
    one = plane(spares=2, nodes=0)
    one.is_known = False
    one.look(3)
    assert one.loaders == []
    one.nodes = 1
    one.look(3)
    assert len(one.loaders) == 2
