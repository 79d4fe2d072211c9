"""The check of a GPU machine: deadlines, what it carries, what it asks, its table, exit codes."""

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts" / "gpu"
sys.path.append(str(SCRIPTS))
check, needs, running, bring_up_te, ask, questions = map(
    importlib.import_module, ("check", "needs", "running", "bring_up_te", "ask", "questions")
)


def run(code, say):
    how = {"deadline_s": 60.0, "environment": os.environ, "folder": ROOT}
    return running.run([sys.executable, "-c", code], say=say, **how)


def test_a_command_is_followed_to_its_end():
    said = []
    code = "print('one'); import sys; print('two', file=sys.stderr); sys.exit(7)"
    done = run(code, said.append)
    assert done.code == 7 and sorted(done.lines) == ["one", "two"] and not done.timed_out
    assert said == done.lines


def test_a_command_ends_at_its_deadline_with_what_it_started(monkeypatch):
    """Planted: a child that would outlive it. The deadline comes once the child runs."""
    code = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    found, wait = [], subprocess.Popen.wait

    def wait_until_told(process, timeout=None):
        if timeout is None:
            return wait(process)
        told.wait()
        raise subprocess.TimeoutExpired(process.args, timeout)

    told = threading.Event()
    monkeypatch.setattr(running.subprocess.Popen, "wait", wait_until_told)
    done = run(code, lambda line: (found.append(int(line)), told.set()))
    assert done.timed_out and done.lines == [str(one) for one in found]
    (child,) = found
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)  # a killed process takes a moment; pytest's own limit ends the test


def test_requirements_come_from_pyproject():
    wanted = needs.requirements()
    names = [needs.name_of(one) for one in wanted]
    assert {"torch", "megatron-core", "orjson", "pybind11", "pytest-timeout"} <= set(names)
    assert len(set(names)) == len(names)
    carried = [needs.name_of(one) for one in needs.carried()]
    assert set(names) - set(carried) == {"torch", "numpy"}


def test_what_is_lacking():
    lacking = ["pytest>=999", "pytest>=8.0,<8.0.1", "no-such-package-anywhere"]
    assert needs.lacking(["pytest", "pytest>=8.0", *lacking]) == lacking


@pytest.fixture
def one_check(tmp_path):
    def make(rows=None, **more):
        """With parts that give these rows at once."""
        settings = {"out": tmp_path / "out", "work": tmp_path / "work", "limit_s": 100.0}
        made = check.Check(**(settings | {"device": "cpu"} | more))
        for name, result in (rows or {}).items():
            setattr(made, name, partial(check.Row, name, result))
        return made

    return make


def test_a_failed_part_is_told_and_the_others_run(one_check, monkeypatch):
    parts = ("packages", "planner", "transformer_engine", "doctor", "picture")
    done = one_check(dict.fromkeys(parts, "ok"))
    failing = "import sys; print('tests/a.py::one PASSED [ 50%]')\n"
    failing += "print('tests/a.py::two[x y] FAILED [100%]'); sys.exit(1)"
    command = done.command
    monkeypatch.setattr(
        done, "command", lambda words, limit: command([sys.executable, "-c", failing], limit)
    )
    monkeypatch.setattr(done, "benchmark", lambda name, left: check.Row(name, "skipped"))
    monkeypatch.setattr(done, "questions", lambda topic: check.Row(topic, "ok"))
    done.all_parts()
    names = [row.part for row in done.rows]
    assert names[-3:] == ["picture", "bench_checkout", "lost rank"] and done.has_failed()
    asked = slice(names.index("doctor") + 1, names.index("tests"))
    assert names[asked] == list(check.TOPICS), "what only a GPU can settle comes first"
    summary = done.summary("a machine")
    row = r"\| tests \| failed: exit code 1 \| \d+ \| 1 passed, 1 failed, 0 skipped \|"
    assert re.search(row, summary)
    assert "failed: tests/a.py::two[x y]" in summary


@pytest.mark.parametrize("part", check.PARTS)
def test_some_parts_only(one_check, monkeypatch, part):
    done, ran = one_check(parts=(part,)), []
    monkeypatch.setattr(done, "part", lambda name, run_part: ran.append(name) or True)
    done.all_parts()
    kinds = {
        "questions": {f"questions: {topic}" for topic in check.TOPICS},
        "tests": {"tests"},
        "benchmarks": {*check.BENCHMARKS, "trace of a step"},
        "checkout": {"bench_checkout"},
        "lost-rank": {"lost rank"},
    }
    assert set(ran) & set().union(*kinds.values()) == kinds[part]


def test_questions_fit_into_one_call():
    """Ten minutes of a lent machine: its start, packages and the planner come before."""
    assert sum(check.TOPICS.values()) <= 450


@pytest.mark.parametrize(("num_gpus", "device"), [(1, "cuda"), (8, "cuda"), (0, "cpu")])
def test_rings_are_measured_where_there_are_several(one_check, monkeypatch, num_gpus, device):
    done = one_check(num_gpus=num_gpus, device=device)
    finished = running.Finished(0, ["figures: ring of 8 at 300 GB/s"], False)
    monkeypatch.setattr(done, "command", lambda words, limit: finished)
    found = done.benchmark("bench_rings", 1)
    skipped = check.Row("bench_rings", "skipped", figures="one GPU here, and rings need two")
    measured = check.Row("bench_rings", "ok", figures="ring of 8 at 300 GB/s")
    assert found == (skipped if num_gpus == 1 else measured)


@pytest.mark.parametrize("broken", ["packages", "planner"])
def test_nothing_runs_without_the_package(one_check, broken):
    done = one_check({"packages": "ok", "planner": "ok"} | {broken: "failed: exit code 1"})
    done.all_parts()
    assert done.rows[-1].part == broken and done.has_failed()


def test_files_with_gpu_tests_are_found_by_what_they_import_too(tmp_path, monkeypatch):
    files = check.files_with_gpu_tests(ROOT / "tests")
    assert "tests/gpu/test_training.py" in files and "tests/planner/test_plan.py" not in files
    mark = ".".join(("pytest", "mark", "gpu"))  # in one word this file would be one of them
    texts = {
        "helper.py": f"GPU = {mark}",
        "test_by_itself.py": f"@{mark}",
        "test_by_helper.py": "from tests.support.helper import GPU",
        "test_other.py": "from tests.helpers import CPU",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.files_with_gpu_tests(tmp_path) == ["test_by_helper.py", "test_by_itself.py"]


def test_wheels_are_taken_without_an_index(one_check, tmp_path, monkeypatch):
    done = one_check(wheels=tmp_path)
    commands, finished = [], running.Finished(0, [], False)
    monkeypatch.setattr(needs, "is_here", lambda one: needs.name_of(one) != "orjson")
    monkeypatch.setattr(done, "command", lambda words, limit: commands.append(words) or finished)
    assert done.packages() == check.Row("packages", "ok", figures="1 installed")
    (words,) = commands
    assert "--no-index" in words and "--no-deps" in words and words[-1].startswith("orjson")
    assert words[words.index("--target") + 1] == done.work / "site"


def test_a_benchmark_keeps_to_the_time_that_is_left(one_check, monkeypatch):
    done = one_check(limit_s=40.0)
    assert done.benchmark("bench_offload", 4).figures == "no time left"
    asked = []

    def command(words, limit):
        asked.append((words, limit))
        lines = ["a machine", "| tokens | ms |", "|---|---|", "| 1 | 2 |", "| 2 | 3 |"]
        return running.Finished(0, lines, False)

    monkeypatch.setattr(done, "command", command)
    assert done.benchmark("bench_offload", 1).figures == "2 rows"
    ((words, limit),) = asked
    seconds = float(words[words.index("--seconds") + 1])
    assert "--small" in words and seconds < limit <= 40
    assert done.tables[:3] == ["## bench_offload", "", "a machine"]


def gpu_check(*options, **environment):
    return subprocess.run(
        [ROOT / "scripts/gpu_check.sh", *options],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=570,
    )


def test_without_a_gpu_it_says_so_and_leaves(tmp_path):
    done = gpu_check("--out", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("no NVIDIA GPU here")


@pytest.mark.slow
def test_the_whole_flow_on_a_cpu(tmp_path):
    done = gpu_check("--cpu", "--out", tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert "| tests | ok |" in done.stdout
    assert (tmp_path / "check.md").exists() and (tmp_path / "check.log").exists()


def bundle_of(tmp_path, extension=None):
    """A bundle whose TransformerEngine is one Python file."""
    bundle, tree = tmp_path / "bundle", tmp_path / "tree"
    bundle.mkdir()
    for name, text in (("__init__", "__version__ = '9.9'"), ("pytorch", "from . import marker")):
        file = tree / f"transformer_engine/{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if extension is None:
        (tree / "transformer_engine/marker.py").write_text("")
    with tarfile.open(bundle / "te_py.tar.gz", "w:gz") as archive:
        archive.add(tree, ".")
    contents = {"libtransformer_engine_sm90.so.xz": b"library", "te_torch_ext.so.xz": b"extension"}
    for name, content in contents.items():
        (bundle / name).write_bytes(bring_up_te.lzma.compress(content))
    return bundle


def brought_up(bundle, folder):
    """With a torch that is one empty file, for the time that importing the real one takes."""
    torch = folder.parent / "modules/torch/__init__.py"
    torch.parent.mkdir(parents=True)
    torch.touch()
    environment = os.environ | {"PYTHONPATH": str(torch.parents[1])}
    command = [sys.executable, SCRIPTS / "bring_up_te.py", bundle, folder]
    return subprocess.run(command, capture_output=True, text=True, timeout=570, env=environment)


def test_transformer_engine_comes_from_a_bundle(tmp_path):
    done = brought_up(bundle_of(tmp_path), tmp_path / "te")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "TransformerEngine 9.9"
    environment = json.loads((tmp_path / "te/environment.json").read_text())
    assert environment["PYTHONPATH"] == str(tmp_path / "te/site")
    libraries = tmp_path / "te/site/transformer_engine/wheel_lib"
    assert (libraries / "libtransformer_engine.so").read_bytes() == b"library"


def test_an_extension_that_does_not_load_is_built_or_told(tmp_path):
    """Planted: the carried one is of another torch, and there are no sources to build it from."""
    done = brought_up(bundle_of(tmp_path, extension="of another torch"), tmp_path / "te")
    assert done.returncode == 1
    assert "does not load: building it" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("TransformerEngine does not come up:") and "expected one" in last


@pytest.mark.parametrize("topic", questions.TOPICS)
def test_questions_can_be_listed_without_a_gpu(topic, capsys):
    assert ask.main([topic, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    asked = questions.questions_of(topic)
    assert len(asked) and len({one.text for one in asked}) == len(asked)
    assert len(lines) == 2 + len(asked) + 2 and "of 0 as expected" in lines[-1]
    for line, one in zip(lines[2:], asked, strict=False):
        assert line == f"| {one.text} | needs a GPU | {one.expected} | | |"
        assert line.count("|") == 6, "a cell must not hold a column's mark"


def test_every_answer_has_its_line_and_its_verdict(monkeypatch, capsys):
    """Planted: one that raises and one that is not as expected."""

    def raising():
        raise RuntimeError("no kernel\nfor this | GPU")

    asked = (
        questions.Question("one", "1", lambda: questions.Answer("1", True)),
        questions.Question("two", "2", raising),
        questions.Question("three", "3", lambda: questions.Answer("4", False)),
    )
    monkeypatch.setattr(ask, "TOPICS", ("numbers",))
    monkeypatch.setattr(ask, "questions_of", lambda topic: asked)
    assert ask.main(["numbers"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| one | 1 | 1 | yes |")
    assert lines[3].startswith("| two | RuntimeError: no kernel for this / GPU | 2 | NO |")
    assert lines[4].startswith("| three | 4 | 3 | NO |")
    assert lines[-1] == "figures: 1 of 3 as expected"
