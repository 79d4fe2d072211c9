"""The job scripts without Slurm: what DRY_RUN prints; what they decide, on stand-ins for srun."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.slurm import cluster

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/slurm/pretrain.sbatch"
WITH_PLANE = ROOT / "scripts/slurm/data_plane.sbatch"
SURVIVING = ROOT / "scripts/slurm/survive.sbatch"
TEXT = SCRIPT.read_text()
ALLOCATION = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "llama",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "n[03-05]-ib",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "12",
}


def call(folder, *flags, script=SCRIPT, **environment):
    """The script's process, in a folder with a YAML."""
    (folder / "my.yaml").write_text("model:\n")
    outside = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    return subprocess.Popen(
        [script, *flags],
        env=outside | {"CONFIG": "my.yaml"} | environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def outcome(process, timeout_s=570):
    """Exit code and output; nothing that it started outlives it."""
    try:
        text, _ = process.communicate(timeout=timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, text


def commands(folder, *flags, **environment):
    """The lines that DRY_RUN prints, as words."""
    code, text = outcome(call(folder, *flags, DRY_RUN="1", **environment))
    assert code == 0, text
    return [shlex.split(line) for line in text.splitlines() if line.startswith("srun ")], text


@pytest.mark.parametrize("script", [SCRIPT, WITH_PLANE, SURVIVING], ids=lambda path: path.stem)
def test_it_is_sound_bash(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=570)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True, timeout=570)


def test_the_variables_at_its_top_are_those_it_reads():
    head, body = TEXT.split("set -uo pipefail")
    told = set(re.findall(r"^#   ([A-Z_]+)  ", head, re.MULTILINE))
    read = set(re.findall(r"\$\{([A-Z_]+)(?::-|\})", body))
    ours = {name for name in read if not name.startswith(("SLURM_", "BASH_"))}
    assert ours - {"DRY_RUN", "OMP_NUM_THREADS"} == told


def test_the_commands_of_an_allocation(tmp_path):
    (doctor, train), text = commands(tmp_path, "--train-iters", "5 0", **ALLOCATION)
    assert len(text.splitlines()) == 2
    assert doctor[-4:] == ["python3", "-m", "megatron_hdp.cli.main", "doctor"]
    assert {"--nodes=3", "--cpus-per-task=12"} <= set(train)
    assert "--output=runs/llama/logs/1234567/start-0/node-%n-%N.log" in train
    torchrun = train[train.index("python3") :]
    assert torchrun[:3] == ["python3", "-m", "torch.distributed.run"]
    expected = {"--nnodes=3", "--nproc-per-node=8", "--rdzv-backend=c10d", "--rdzv-id=1234567-0"}
    assert expected | {"--rdzv-endpoint=n03-ib:24567"} <= set(torchrun)
    flags = torchrun[torchrun.index("megatron_hdp.pretrain_gpt") :]
    assert flags[2:4] == ["--config", "my.yaml"] and flags[-2:] == ["--train-iters", "5 0"]
    for name, path in (("--save", "checkpoints"), ("--load", "checkpoints")):
        assert flags[flags.index(name) + 1] == f"runs/llama/{path}"


def test_torchrun_knows_its_flags(tmp_path):
    from torch.distributed.run import get_args_parser

    (_, train), _ = commands(tmp_path, **ALLOCATION)
    parsed = get_args_parser().parse_args(train[train.index("torch.distributed.run") + 1 :])
    assert parsed.training_script == "megatron_hdp.pretrain_gpt" and parsed.module
    assert "SIGUSR1" not in parsed.signals_to_handle and "SIGTERM" not in parsed.signals_to_handle


ARRAY = {"SLURM_ARRAY_JOB_ID": "1234567", "SLURM_ARRAY_TASK_ID": "4"}


def test_a_task_of_an_array_is_a_run_of_its_own(tmp_path):
    (tmp_path / "lr-4.yaml").write_text("model:\n")
    environment = ALLOCATION | ARRAY | {"CONFIG": "lr-%a.yaml"}
    (_, train), _ = commands(tmp_path, **environment)
    assert train[train.index("--config") + 1] == "lr-4.yaml"
    assert train[train.index("--save") + 1] == "runs/llama-4/checkpoints"
    (_, train), _ = commands(tmp_path, **environment, RUN_DIR="/big/%a/run")
    assert train[train.index("--load") + 1] == "/big/4/run/checkpoints"


@pytest.mark.parametrize(
    "nodes, first",
    [("n1", "n1"), ("a3,a4", "a3"), ("m2,n[1-9]", "m2"), ("n[07,9-12],m1", "n07")],
)
def test_the_first_node_is_where_ranks_meet(tmp_path, nodes, first):
    (_, train), _ = commands(tmp_path, **(ALLOCATION | {"SLURM_JOB_NODELIST": nodes}))
    assert f"--rdzv-endpoint={first}:24567" in train


def test_in_containers(tmp_path):
    image = {"CONTAINER_IMAGE": "my image.sqsh", **ALLOCATION}
    both, _ = commands(tmp_path, **image, CONTAINER_MOUNTS="/data:/data")
    for words in both:
        assert "--container-image=my image.sqsh" in words
        assert "--container-mounts=/data:/data" in words
    both, _ = commands(tmp_path, **image, CONTAINER_RUNTIME="apptainer")
    for words in both:
        start = words.index("apptainer")
        expected = ["exec", "--bind", f"{tmp_path}:{tmp_path}", "--pwd", str(tmp_path), "--nv"]
        assert words[start + 1 : start + 8] == [*expected, "my image.sqsh"]
        assert not any(word.startswith("--container") for word in words)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"CONFIG": ""}, "CONFIG is not set"),
        ({"CONFIG": "none.yaml"}, "CONFIG=none.yaml cannot be read"),
        ({"SLURM_JOB_ID": ""}, "call sbatch, or set DRY_RUN=1"),
        ({"RANKS_PER_NODE": "gpu:8"}, "found RANKS_PER_NODE=gpu:8"),
        ({"MAX_RETRIES": "-1"}, "found MAX_RETRIES=-1"),
        ({"REQUEUE": "yes"}, "found REQUEUE=yes"),
        ({"SURVIVE": "yes"}, "found SURVIVE=yes"),
        ({"DOCTOR": "yes"}, "found DOCTOR=yes"),
        (ARRAY | {"RUN_DIR": "run"}, "found RUN_DIR=run for all tasks of an array"),
        ({"CONTAINER_IMAGE": "i", "CONTAINER_RUNTIME": "docker"}, "found CONTAINER_RUNTIME=docker"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, change, said):
    code, text = outcome(call(tmp_path, **(ALLOCATION | change)))
    assert code == 2 and len(text.splitlines()) == 1 and said in text, text


SRUN = """#!/usr/bin/env bash
for word in "$@"; do
    case $word in
        --output=*) output=${word#--output=}; output=${output//%n/0}; output=${output//%N/here} ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
exec "$@" >>"${output:-/dev/stdout}" 2>&1
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >>requeued
exit "${SCONTROL_CODE:-0}"
"""
SQUEUE = """#!/usr/bin/env bash
echo "${STATE:-RUNNING}"
"""
# stands for torchrun: a rank that listens to the signal when it trains, or what a failure prints
PYTHON = f"""#!/usr/bin/env bash
case $* in
    *doctor*) echo "training can run"; exit "${{DOCTOR_CODE:-0}}" ;;
esac
if [[ -n ${{LOST_CODE:-}} ]]; then
    echo "megatron-hdp launch: $SAID"
    exit "$LOST_CODE"
fi
if [[ -n ${{RANK_CODES:-}} ]]; then
    for code in $RANK_CODES; do
        echo "pretrain_gpt: error on rank 0: planted $code"
        echo "  exitcode  : $code (pid: 1)"
    done
    exit 1
fi
{sys.executable} -c '
import signal, sys, time
time.sleep(1)
def save(*_):
    print("SIGUSR1 received: the job ends after iteration 7, saving first", flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
open("trains", "w").close()
time.sleep(float(sys.argv[1]))
' "${{TRAIN_S:-0}}" &
wait $!
"""


@pytest.fixture
def job(tmp_path):
    """Calls the script as a job of one node, with the stand-ins."""
    programs = tmp_path / "programs"
    programs.mkdir()
    texts = {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "python": PYTHON}
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def start(**environment):
        settings = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": str(programs / "python")}
        allocation = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "here"}
        return call(tmp_path, **(settings | allocation | environment))

    return start


def requeued(folder):
    path = folder / "requeued"
    return path.read_text().splitlines() if path.exists() else []


def test_training_that_ends_is_done(job, tmp_path):
    code, text = outcome(job())
    assert code == 0 and "doctor: training can run" in text, text
    assert requeued(tmp_path) == [] and (tmp_path / "trains").exists()


def test_what_the_doctor_refuses_does_not_start(job, tmp_path):
    code, text = outcome(job(DOCTOR_CODE="1"))
    assert code == 2 and "doctor found what keeps training from running" in text, text
    assert requeued(tmp_path) == [] and not (tmp_path / "trains").exists()


def catches(process, number):
    """Whether a process has a handler of a signal."""
    (mask,) = re.findall(r"SigCgt:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def all_catch(pid, number):
    """Whether the job script and the script of its node have their traps."""
    job = psutil.Process(pid)
    with suppress(OSError, psutil.Error):
        on_the_node = [one for one in job.children(True) if "warned=1" in " ".join(one.cmdline())]
        return catches(job, number) and any(catches(one, signal.SIGUSR1) for one in on_the_node)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc, as the script itself does")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("early", [False, True], ids=["while-it-trains", "before-ranks-listen"])
def test_a_warning_reaches_the_ranks_and_queues_again(job, tmp_path, number, early):
    process = job(TRAIN_S="60", DOCTOR="0")
    there = tmp_path / ("runs/megatron-hdp/logs/9/start-0/node-0-here.log" if early else "trains")
    while not (there.exists() and all_catch(process.pid, number)):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    code, text = outcome(process)
    assert code == 0 and "SIGUSR1 received: the job ends after iteration 7" in text, text
    assert requeued(tmp_path) == ["requeue 9"]


@pytest.mark.parametrize("change", [{"REQUEUE": "0"}, {"STATE": "COMPLETING"}])
def test_a_job_that_is_to_end_is_not_queued(job, tmp_path, change):
    code, text = outcome(job(RANK_CODES="3", **change))
    assert code == 3 and requeued(tmp_path) == [], text
    failures = tmp_path / "runs/megatron-hdp/logs/9/failures"
    assert failures.exists() == ("REQUEUE" in change)  # what Slurm ends has not failed


def test_of_an_array_only_this_task_is_queued(job, tmp_path):
    """An array's own id is that of one of its tasks, too; Slurm takes it for all of them."""
    array = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "4"}
    code, text = outcome(job(RANK_CODES="3", DOCTOR="0", **array))
    assert code == 0 and requeued(tmp_path) == ["requeue 9_4"], text


def test_a_job_that_slurm_does_not_queue_says_so(job):
    code, text = outcome(job(RANK_CODES="3", SCONTROL_CODE="1", DOCTOR="0"))
    assert code == 2 and "submit it with --requeue" in text, text


def test_failures_are_tried_again_so_many_times(job, tmp_path):
    for start in range(3):
        code, text = outcome(
            job(RANK_CODES="3 -9", SLURM_RESTART_COUNT=str(start), MAX_RETRIES="2")
        )
        assert "error on rank 0: planted 3" in text, text
    assert code == 137 and requeued(tmp_path) == ["requeue 9"] * 2, text


@pytest.mark.parametrize(
    "codes, code", [("3 2", 2), ("2", 2), ("3 1 -9", 1), ("3 -9", 137), ("3", 3)]
)
def test_the_exit_code_is_that_of_the_rank_to_blame(job, tmp_path, codes, code):
    found, text = outcome(job(RANK_CODES=codes, MAX_RETRIES="0", DOCTOR="0"))
    assert found == code and requeued(tmp_path) == [], text


def headers(script):
    return set(re.findall(r"^#SBATCH (.*)$", script.read_text(), re.MULTILINE))


def test_a_job_with_a_data_plane_asks_for_cores_besides():
    assert headers(WITH_PLANE) - headers(SCRIPT) == {"--cpus-per-task=32"}
    assert headers(SCRIPT) <= headers(WITH_PLANE)


def test_a_job_with_a_data_plane_is_the_other_with_one_flag_more(tmp_path):
    (train,), text = commands(
        tmp_path, "--lr", "5 0", script=WITH_PLANE, DOCTOR="0", PRETRAIN=str(SCRIPT), **ALLOCATION
    )
    flags = ("--hdp-loaders", "ray", "--lr", "5 0")
    assert text == commands(tmp_path, *flags, DOCTOR="0", **ALLOCATION)[1]
    assert tuple(train[-4:]) == flags and "--cpus-per-task=12" in train


def test_the_documented_way_from_the_repository(tmp_path):
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    for name, flag in (("data_plane", "--hdp-loaders ray"), ("survive", "--hdp-survive")):
        _, text = commands(tmp_path, script=f"./scripts/slurm/{name}.sbatch")
        assert flag in text


def test_a_job_that_survives_is_launched_by_its_own_agents(tmp_path):
    """Whose flags are known, and whose loss ends neither the allocation nor the step."""
    from megatron_hdp.cli.main import build_parser

    assert headers(SURVIVING) - headers(SCRIPT) == {"--no-kill"}
    assert headers(SCRIPT) <= headers(SURVIVING)
    (train,), _ = commands(
        tmp_path, "--lr", "1", script=SURVIVING, DOCTOR="0", PRETRAIN=str(SCRIPT), **ALLOCATION
    )
    launch = train.index("megatron_hdp.cli.main")
    assert {"--kill-on-bad-exit=0", "--no-kill", "--wait=0"} <= set(train[:launch])
    parsed = build_parser().parse_args(train[launch + 1 :])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_endpoint) == (3, 8, "n03-ib:24567")
    assert parsed.module and parsed.program == "megatron_hdp.pretrain_gpt"
    assert parsed.rest[-3:] == ["--hdp-survive", "--lr", "1"]


@pytest.mark.parametrize(
    ("said", "code", "again"),
    [
        ("the job ends with exit code 0", 0, []),
        ("the job ends with exit code 2", 2, []),
        ("starts members 4, which wait for a place to be free", 0, ["requeue 9"]),
    ],
)
def test_a_job_that_survives_ends_as_its_first_agent_says(job, tmp_path, said, code, again):
    """srun returns the code of a lost node's task; without a word the first one was lost."""
    found, text = outcome(job(SURVIVE="1", DOCTOR="0", SAID=said, LOST_CODE="137"))
    assert found == code and requeued(tmp_path) == again, text


@pytest.mark.parametrize("script", [WITH_PLANE, SURVIVING], ids=lambda path: path.stem)
def test_a_script_that_is_not_there_ends_with_2(tmp_path, script):
    code, text = outcome(call(tmp_path, script=script, DRY_RUN="1"))
    assert code == 2 and len(text.splitlines()) == 1 and "PRETRAIN=" in text


def test_where_no_slurm_is_the_reason_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(cluster.shutil, "which", lambda *_, **__: None)
    assert "slurmctld" in cluster.what_is_missing()
    assert "apt-get install" in cluster.what_is_missing()
