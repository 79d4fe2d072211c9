"""``megatron-hdp data top``: planes that live, found by their folders; Ray is not asked."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from megatron_hdp.cli.data_commands import top
from megatron_hdp.cli.main import main
from megatron_hdp.data_plane.cluster.job_folder import PREFIX, folder_of_job
from megatron_hdp.data_plane.node_files import write_status
from megatron_hdp.data_plane.watcher import Watcher
from megatron_hdp.exit_codes import ExitCode


def loader(pid, *, busy_s=0.0, tokens=0, looked_s=100.0):
    return {
        **{"tokens": tokens, "busy_s": busy_s},
        **{"pid": pid, "rss_bytes": 50_000_000, "looked_s": looked_s},
    }


def status(node=0, loaders=None, **changes):
    found = {
        "plane": "hdp-data-0a1b",
        "node": node,
        "pid": 5,
        "constructor": {
            "segment_bytes": 1_500_000,
            "takeovers": 2,
            "longest_takeover_s": 0.84,
            "splits": {
                "train": {
                    **{"steps": 1234, "fetched_bytes": 4_000_000},
                    **{"steps_ahead": 2, "readers": 8},
                }
            },
            "pid": 7,
            "rss_bytes": 90_000_000,
        },
    }
    if node == 0:
        found["planner"] = {"epoch": 3, "steps_ahead": {"train": 4, "valid": 0}, "pid": 6}
        found["planner"]["failed"] = {"train": {}, "valid": {}}
        found["sources"] = {
            "train": {"web": {"wanted": 1, "loaders": loaders or [loader(11), loader(12), {}]}}
        }
    return found | changes


@pytest.fixture
def planes(tmp_path, monkeypatch):
    """Make folders of planes that live; the command looks there."""
    monkeypatch.setattr(top, "Watcher", lambda: Watcher(tmp_path))
    monkeypatch.setattr(top, "_PAUSE_S", 0.01)

    @contextmanager
    def plane(found):
        with folder_of_job(tmp_path) as (folder, _):
            if found is not None:
                write_status(tmp_path / folder, found)
            yield tmp_path / folder

    return plane


def once(capsys, *flags):
    assert main(["data", "top", "--once", *flags]) == ExitCode.DONE
    return capsys.readouterr().out


def test_without_a_plane_one_line_says_what_to_look_for(planes, capsys, tmp_path):
    for flags in (["--once"], []):
        assert main(["data", "top", *flags]) == ExitCode.DONE
        (line,) = capsys.readouterr().out.splitlines()
        assert "no data plane of this user runs on this host" in line
        assert "--hdp-loaders ray" in line
    assert main(["data", "top", "--json"]) == ExitCode.DONE
    assert orjson.loads(capsys.readouterr().out)["planes"] == {}


def test_a_plane_that_runs_is_shown(planes, capsys):
    with planes(status()):
        lines = once(capsys).splitlines()
    assert lines[0] == (
        "hdp-data-0a1b, as of 0 s ago: planner of epoch 3, "
        "steps planned ahead: 4 of train, 0 of valid"
    )
    rows = [line.split() for line in lines[1:]]
    assert rows[1] == ["train", "web", "1", "1", "1", "-", "-", "100"]
    assert rows[3] == ["0", "train", "8", "1,234", "2", "1.5", "2", "0.8", "s"]
    assert len(lines) == 5


def test_a_source_that_has_failed_is_named(planes, capsys):
    found = status()
    found["planner"]["failed"]["train"]["web"] = "no tokens within 120 s: it has none"
    with planes(found):
        rows = [line.split() for line in once(capsys).splitlines()]
        assert rows[2] == ["train", "web", "failed", "1", "1", "-", "-", "100"]
        plane = orjson.loads(once(capsys, "--json"))["planes"]["hdp-data-0a1b"]
    assert plane["sources"]["train"]["web"]["failed"] == "no tokens within 120 s: it has none"


def test_a_little_memory_is_not_nothing(planes, capsys):
    for num_bytes, said in ((0, "0.0"), (3, "<0.1"), (49_999, "<0.1"), (51_000, "0.1")):
        found = status()
        found["constructor"]["segment_bytes"] = num_bytes
        with planes(found):
            assert once(capsys).splitlines()[-1].split()[5] == said


def test_json_is_one_object(planes, capsys):
    with planes(status()) as folder:
        (line,) = once(capsys, "--json").splitlines()
    found = orjson.loads(line)
    plane = found["planes"]["hdp-data-0a1b"]
    assert plane["planner"] == {"epoch": 3, "steps_ahead": {"train": 4, "valid": 0}}
    assert plane["sources"]["train"]["web"] == {
        **{"failed": None, "serving": 1, "standing_by": 1, "being_started": 1},
        **{"busy_share": None, "tokens_per_s": None, "tokens": 0, "rss_mb": 100.0},
    }
    node = plane["nodes"]["0"]
    assert 0 <= node.pop("age_s") < 60
    assert node == {
        "folder": str(folder),
        **{"shared_mb": 1.5, "rss_mb": 90.0, "takeovers": 2, "longest_takeover_s": 0.84},
        "splits": {"train": {"readers": 8, "steps": 1234, "steps_ahead": 2, "fetched_mb": 4.0}},
    }
    assert found["starting"] == []


def test_rates_are_those_between_two_looks(planes, tmp_path):
    watcher = Watcher(tmp_path)

    def source(folder, *loaders, wanted=2):
        crew = {"train": {"web": {"wanted": wanted, "loaders": list(loaders)}}}
        write_status(folder, status(sources=crew))
        return watcher.look()["planes"]["hdp-data-0a1b"]["sources"]["train"]["web"]

    with planes(None) as folder:
        first = loader(1, busy_s=1, tokens=100), loader(2, busy_s=0, tokens=0)
        assert source(folder, *first)["busy_share"] is None
        after = (
            loader(1, busy_s=1.5, tokens=300, looked_s=102.0),
            loader(2, busy_s=1.5, tokens=100, looked_s=102.0),
        )
        found = source(folder, *after)
        assert (found["busy_share"], found["tokens_per_s"]) == (0.5, 150.0)
        found = source(folder, *after)  # nothing new was said
        assert (found["busy_share"], found["tokens_per_s"]) == (0.5, 150.0)
        again = loader(3, busy_s=0.1, tokens=7, looked_s=103.0)  # in place of one that has died
        found = source(folder, after[0], again)
        assert (found["busy_share"], found["tokens_per_s"]) == (0.25, 100.0)


def test_nodes_of_one_plane_stand_together(planes, capsys):
    with planes(status()), planes(status(node=1)), planes(status(plane="hdp-data-ffff", node=1)):
        text = once(capsys)
        found = orjson.loads(once(capsys, "--json"))
    assert list(found["planes"]["hdp-data-0a1b"]["nodes"]) in (["0", "1"], ["1", "0"])
    assert found["planes"]["hdp-data-ffff"]["planner"] is None
    assert text.count("planner of epoch 3") == 1
    assert "hdp-data-ffff, as of 0 s ago: planner and loaders are watched on the first" in text


def test_a_plane_without_readers_is_shown(planes, capsys):
    empty = status(sources={})
    empty["constructor"] |= {"splits": {}, "takeovers": 0}
    with planes(empty):
        assert once(capsys).splitlines()[-1].split() == ["0", "-", "-", "-", "-", "1.5", "0", "-"]


def test_one_that_only_starts_is_named(planes, capsys):
    with planes(None) as folder:
        assert once(capsys) == f"being started; its log is {folder}/log\n"


def test_a_dead_plane_is_not_shown(planes, capsys, tmp_path):
    dead, elsewhere = (tmp_path / f"{PREFIX}{name}" for name in ("dead", "elsewhere"))
    for folder, host in ((dead, os.uname().nodename), (elsewhere, "another-host")):
        folder.mkdir()
        (folder / "host").write_text(host)
        write_status(folder, status())
    (tmp_path / f"{PREFIX}link").symlink_to(dead)
    assert once(capsys) == f"{top.NOTHING}\n"
    assert dead.exists()  # looking removes nothing


def test_it_goes_on_until_nothing_runs(planes, capsys, monkeypatch):
    with planes(status()) as folder:
        real, looks = Watcher.look, []

        def look(self):
            looks.append(real(self))
            if len(looks) == 3:
                (folder / "host").unlink()
            return looks[-1]

        monkeypatch.setattr(Watcher, "look", look)
        assert main(["data", "top", "--json"]) == ExitCode.DONE
    lines = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(line["planes"]) for line in lines] == [1, 1, 1, 0]


def test_a_status_of_another_release_is_a_mistake(planes, capsys):
    with planes({"plane": "p", "node": 0}) as folder:
        assert main(["data", "top", "--once"]) == ExitCode.MISTAKE
    message = capsys.readouterr().err
    assert f"{folder}/status.json: found a status without 'constructor', expected one" in message


def test_it_ends_with_ctrl_c_and_loads_no_ray():
    code = (
        "import sys; from megatron_hdp.cli.main import main; code = main(['data', 'top'])\n"
        "print(*{name.split('.')[0] for name in sys.modules}); sys.exit(code)"
    )
    with folder_of_job() as (folder, _):
        write_status(Path(folder), status(plane="hdp-data-here"))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", code], **pipes)
        try:
            # other planes may run on this host
            assert any("hdp-data-here" in line for line in process.stdout)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=570)
        finally:
            process.kill()
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert err == "megatron-hdp data top: interrupted\n"
    loaded = set(out.splitlines()[-1].split())
    assert "orjson" in loaded and not loaded & {"ray", "torch", "megatron"}
