"""Who reaches a data plane, what it opens, and what it makes of what it reads.

Another user at a socket or a segment: `tests/data_plane/wire`.
"""

import ast
import json
import os
import socket
import stat
import subprocess
import sys
import typing
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_hdp.data_plane import starting
from megatron_hdp.data_plane.cluster import ray_node
from megatron_hdp.data_plane.cluster.job_folder import RAY
from megatron_hdp.data_plane.node_files import write_status
from megatron_hdp.data_plane.roles import Entry, Journal, LoadingService, Wanted
from megatron_hdp.data_plane.roles import journal as journal_module
from megatron_hdp.data_plane.starting import PlanePlace, node_of_plane
from tests.support.plane import running_plane
from tests.support.thread_plane import setup_of, write_pairs

PACKAGE = Path(__file__).parents[2] / "megatron_hdp"
UNPICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
OWN_WORKERS = {PACKAGE / "data/prepare/workers.py"}
"""They pickle to processes that they started themselves, through pipes; never to or from a file."""


LOADS = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load"}


def unpickles(source):
    """What in a module's source makes objects of bytes that say which."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [name for name in names if name.split(".")[0] in UNPICKLES]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found += [called] if called in {"eval", "exec", "__import__", *LOADS} else []
            words = {one.arg: ast.unparse(one.value) for one in node.keywords}
            found += ["allow_pickle"] if words.get("allow_pickle", "False") != "False" else []
    return found


@pytest.mark.parametrize("room", ["data", "data_plane"])
def test_nothing_that_is_read_is_unpickled(room):
    modules = sorted((PACKAGE / room).rglob("*.py"))
    assert len(modules) > 10
    found = {str(one): unpickles(one.read_text()) for one in modules if one not in OWN_WORKERS}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "def read(text):\n    return eval(text)",
    ],
)
def test_a_module_that_unpickles_is_found(planted):
    assert unpickles(planted)
    assert unpickles("import numpy as np\nnp.load(path, allow_pickle=False)") == []


def test_what_is_asked_of_a_loader_names_rows_and_no_file():
    kinds = typing.get_type_hints(Wanted)
    integers = typing.get_type_hints(LoadingService.lengths)["rows"]
    assert {one.name: kinds[one.name] for one in fields(Wanted)} == dict.fromkeys(
        ("rows", "starts", "counts", "num_labelled"), integers
    )


@contextmanager
def files_opened():
    """The paths that this process opens in the block."""
    opened, is_on = [], [True]

    def note(event, arguments):
        if is_on[0] and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            opened.append(Path(os.fsdecode(arguments[0])))

    sys.addaudithook(note)  # it cannot be removed
    try:
        yield opened
    finally:
        is_on[0] = False


def wanted(rows, counts):
    columns = rows, [0] * len(rows), counts, [one - 1 for one in counts]
    return Wanted(*(np.array(column, dtype=np.int64) for column in columns))


@pytest.fixture
def sources(tmp_path):
    """A folder of sources, one of them of text, beside a file that none of them names."""
    folder = tmp_path / "sources"
    folder.mkdir()
    write_pairs(folder)
    (tmp_path / "secret.jsonl").write_text(json.dumps({"text": "secret"}))
    lines = [json.dumps({"text": name}) for name in ("../secret.jsonl", "/etc/passwd", "three")]
    (folder / "notes.jsonl").write_text("\n".join(lines))
    path = folder / "data.yaml"
    path.write_text(
        "sources:\n"
        "  notes: {path: notes.jsonl, tokenise: on-the-fly, tokenizer: byte}\n"
        "  web: {path: web/corpus}\n"
    )
    return setup_of(path), folder


def test_a_loader_opens_the_files_of_its_source_alone(sources):
    setup, folder = sources
    web, notes = (setup.opened([name], print)[0] for name in ("web", "notes"))
    with files_opened() as opened:
        assert LoadingService(web).load(wanted([0, 5], [30, 41])).num_bytes
        service = LoadingService(notes)
        (length, *_) = service.lengths(np.arange(3)).tolist()
        loaded = service.load(wanted([0], [length]))
        (folder / "notes.jsonl").read_bytes()  # so that the check sees something
    assert bytes(loaded.tokens[:15].astype(np.uint8)) == b"../secret.jsonl"  # text, not a path
    assert folder / "notes.jsonl" in opened
    assert [one for one in opened if folder not in (one, *one.parents)] == []


def test_a_source_that_was_not_declared_is_not_opened(sources):
    setup, folder = sources
    for name in ("secret", "../secret.jsonl", str(folder.parent / "secret.jsonl")):
        with files_opened() as opened, pytest.raises(ValueError, match="expected some of"):
            setup.opened([name], print)
        assert opened == []


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def open_to_others(folder):
    """What of a folder others could read, write or enter, if they got there; of Ray's its name."""
    found = [one for one in (folder, *folder.rglob("*")) if folder / RAY not in one.parents]
    return sorted(one.name for one in found if mode(one) & 0o077)


def test_status_and_journal_are_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "_MOST_BYTES", 100)
    before = os.umask(0)
    try:
        write_status(tmp_path, {})
        journal = Journal(tmp_path / "journal")
        for _ in range(3):  # appended to, and cut
            journal.append(Entry("train", {"steps": 1}, {"steps": 2}, {"plan": 3}, None))
            assert open_to_others(tmp_path / "journal") == []
    finally:
        os.umask(before)
    assert mode(tmp_path / "status.json") == 0o600
    names = {"epoch", "lock", "steps.jsonl"}
    assert {one.name for one in (tmp_path / "journal").iterdir()} == names
    (tmp_path / "journal" / "epoch").chmod(0o640)
    assert open_to_others(tmp_path / "journal") == ["epoch"]


class Started(Exception):
    """Carries what a process would have been started with."""


@pytest.fixture
def started(monkeypatch):
    """Returns words and environment with which a place's host is started, and starts nothing."""

    def record(words, **options):
        raise Started(words, options["env"])

    monkeypatch.setattr(starting.subprocess, "Popen", record)
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE", starting._LOOPBACK):
        monkeypatch.delenv(name, raising=False)

    def of(place):
        with pytest.raises(Started) as found, node_of_plane(place, 0, 10.0):
            pass
        return found.value.args

    return of


def test_a_cluster_of_one_node_asks_for_a_token_on_the_loopback(started):
    place = PlanePlace.make("127.0.0.1", 1)
    words, environment = started(place)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN"] == place.token
    assert len(bytes.fromhex(place.token)) == 32
    assert not any(place.token in word for word in words)  # every user sees a process's words
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert words[words.index("--address") + 1] == place.address
    assert place.address.startswith("127.0.0.1:")
    assert PlanePlace.make("127.0.0.1", 1).token != place.token


def test_other_clusters_ask_for_a_token_too_or_keep_their_own_ways(started, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the site")
    _, environment = started(PlanePlace.make("10.0.0.7", 2))  # of several nodes
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN"] == "of the site"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in environment
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")  # one that is joined
    words, environment = started(PlanePlace.make("127.0.0.1", 1))
    assert "--address" not in words
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & set(environment)


def test_there_is_no_dashboard_and_nothing_is_reported():
    head = ray_node.start_command("127.0.0.1:24567", 0, "/tmp/x")
    expected = {"--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"}
    assert expected <= set(head)
    assert not any(word.startswith("--dashboard-host") for word in head)


def heard_from_outside(processes):
    """Sockets of processes at which other hosts could connect."""
    return [
        (process.pid, one.laddr.ip, one.laddr.port)
        for process in processes
        for one in process.net_connections(kind="inet")
        if one.status == psutil.CONN_LISTEN
        and one.laddr.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    ]


def test_a_socket_that_listens_elsewhere_is_found():
    here = psutil.Process()
    with socket.create_server(("127.0.0.1", 0)):
        assert heard_from_outside([here]) == []
    with socket.create_server(("0.0.0.0", 0)) as open_to_all:
        port = open_to_all.getsockname()[1]
        assert heard_from_outside([here]) == [(here.pid, "0.0.0.0", port)]


INTRUDER = """
import ray, sys
ray.init(address=sys.argv[1], namespace="megatron_hdp", log_to_driver=False)
print("inside", flush=True)
"""
INTRUDES_S = 40.0


def gets_inside(address, folder, **environment):
    """Whether a process without the plane's environment joins its cluster; Ray tries for long."""
    outside = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with subprocess.Popen(
        [sys.executable, "-c", INTRUDER, address],
        env=outside | {starting._LOOPBACK: "0"} | environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=INTRUDES_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
    return "inside" in said


@pytest.mark.slow
def test_nobody_else_reaches_a_running_plane(tmp_path):
    pytest.importorskip("ray", reason="no Ray: pip install 'megatron-hdp[ray]'")
    with running_plane(write_pairs(tmp_path), num_ranks=2) as plane:
        plane.step()
        host = psutil.Process(plane.status()["pid"])
        processes = [host, *host.children(recursive=True)]
        commands = [one.cmdline() for one in processes]
        assert any("raylet" in one[0] for one in commands if one)
        assert heard_from_outside(processes) == []
        servers = [one for one in commands if any("dashboard.py" in word for word in one)]
        assert all("--disable-frontend" in one for one in servers)

        words = host.cmdline()
        folders = [Path(words[words.index(name) + 1]) for name in ("--folder", "--shared")]
        ray_folder = next(
            Path(word.partition("=")[2])
            for one in commands
            for word in one
            if word.startswith("--temp_dir=")  # of the raylet
        )
        assert ray_folder.is_dir()  # which Ray opens to everybody
        assert ray_folder == folders[0] / RAY and [mode(one) for one in folders] == [0o700] * 2
        assert {"log", RAY} >= set(open_to_others(folders[0]))  # which only its owner enters
        assert open_to_others(folders[1]) == []
        assert list(folders[1].glob("steps/step-*")) != []

        address = words[words.index("--address") + 1]
        token = host.environ()["RAY_AUTH_TOKEN"]
        assert gets_inside(address, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
        assert not gets_inside(address, tmp_path)
        assert not gets_inside(address, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token[::-1])
        plane.step()
