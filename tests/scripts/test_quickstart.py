"""The README's first command, as a user types it, with fewer tokens and steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hdp.planner import CostModel, plan
from tests.support.forked_python import forked_python

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts" / "examples" / "quickstart"))
import capacity  # noqa: E402

MODEL = ("--num-layers", "1")
CONTEXT, CAPACITY = 8192, 2048  # of configs/tiny-cpu.yaml


def run_quickstart(folder, *flags, python=sys.executable, **environment):
    return subprocess.run(
        [ROOT / "scripts/quickstart.sh", *flags],
        env=os.environ | {"PYTHON": str(python), "OUT": str(folder)} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=580,
    )


def trained(folder, num_ranks, num_steps, python=sys.executable):
    """What a quickstart with small steps prints and both of its runs' metrics."""
    # on a busy machine a profile measures three times
    environment = {"STEPS": str(num_steps), "NPROC": str(num_ranks), "PROFILE_S": "0.3"}
    flags = ["--hdp-global-batch-tokens", "16384", *MODEL]
    result = run_quickstart(folder, *flags, python=python, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = [(folder / name / "metrics.jsonl").read_text() for name in ("static", "hdp")]
    static, hdp = ([json.loads(line) for line in run.splitlines()] for run in runs)
    assert [step["step"] for step in hdp] == list(range(1, num_steps + 1))
    for a, b in zip(static, hdp, strict=True):
        assert abs(a["loss"] / b["loss"] - 1) < 1e-5
        assert a["ring_bytes"] >= b["ring_bytes"] >= 0
    assert (folder / "measured.png").read_bytes().startswith(b"\x89PNG")
    return result.stdout, static, hdp


@pytest.fixture(params=["forked", pytest.param("own", marks=pytest.mark.slow)])
def python(request, tmp_path_factory):
    """One that forks what is imported already, and the one that a user has."""
    if request.param == "own":
        yield sys.executable
        return
    with forked_python(tmp_path_factory.mktemp("python")) as program:
        yield program


@pytest.mark.timeout(600)
def test_quickstart(tmp_path, python):
    output, static, hdp = trained(tmp_path, num_ranks=2, num_steps=1, python=python)
    for line in (
        "== ranks: 2 of 4096 tokens",
        "== profile: ",
        " took the static mesh ",
        " x as fast",
        "ring traffic (MB)",
        "measured efficiency",
        "What bounds the gain: ",
        f": {tmp_path}/measured.png",
    ):
        assert line in " ".join(output.split()), output
    assert sum(step["ring_bytes"] for step in hdp) < sum(step["ring_bytes"] for step in static)
    assert CostModel.from_json(tmp_path / "cost-model.json").ranks_per_node == 2
    names = ["cost-model.json", "cost-model.report.json", "data", "hdp", "measured.png", "static"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    simulated_steps_are_those_of_the_run(python, tmp_path, static, hdp)


def simulated_steps_are_those_of_the_run(python, folder, static, hdp):
    """The same sequences on the same rings, so that times can be compared."""
    script = [python, ROOT / "scripts/examples/quickstart/simulated.py", folder, *MODEL]
    flags = ["--hdp-global-batch-tokens", "16384"]
    done = subprocess.run([*script, *flags], capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr
    (step, *numbers), (median, *same) = (line.split() for line in done.stdout.splitlines()[1:3])
    assert (step, median) == ("1", "median") and numbers == same
    assert float(numbers[0]) == pytest.approx(static[0]["seconds"], abs=1e-3)
    assert float(numbers[5]) == pytest.approx(hdp[0]["seconds"], abs=1e-3)
    assert 0 < float(numbers[2]) < 60
    assert (folder / "simulated.png").read_bytes().startswith(b"\x89PNG")
    other = subprocess.run(script, capture_output=True, text=True, timeout=570)
    assert other.returncode == 1 and "give the flags that the quickstart had" in other.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_other_numbers_of_ranks(tmp_path, num_ranks):
    output, _, _ = trained(tmp_path, num_ranks, num_steps=1)
    assert ("nothing to balance" in output) == (num_ranks == 1)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_the_capacity_is_the_least_that_holds_the_longest_sequence(num_ranks, capsys):
    capacity.main(str(num_ranks), str(ROOT / "configs/tiny-cpu.yaml"))
    tokens = int(capsys.readouterr().out)

    def static_plan(tokens_per_rank):
        lengths = [CONTEXT, CONTEXT - 1, 100]
        return plan(lengths, ranks=num_ranks, tokens_per_rank=tokens_per_rank, strategy="static")

    static_plan(tokens).validate()
    if tokens > CAPACITY:
        with pytest.raises(ValueError, match=f"{CONTEXT}|8,192"):
            static_plan(tokens - 1)
    assert tokens == {1: 8192, 2: 4096, 3: 2732}.get(num_ranks, CAPACITY)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        *(("NPROC", value, "1 to 8 ranks") for value in ("0", "9", "16", "-1", "four", "2.5")),
        *(("STEPS", value, "a number of steps, 1 to 9999") for value in ("0", "many")),
    ],
)
def test_a_number_that_is_none_is_refused_in_one_line(tmp_path, variable, value, expected):
    result = run_quickstart(tmp_path, **{variable: value})
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == f"error: {variable}={value}: expected {expected}\n"
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_said_in_one_line(tmp_path):
    result = run_quickstart(tmp_path, PYTHON="/nowhere/python")
    assert result.returncode == 1
    assert result.stderr == "error: PYTHON names no program: give a path to python\n"
    assert list(tmp_path.iterdir()) == []
