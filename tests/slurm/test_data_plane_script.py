"""The job script with a data plane is pretrain.sbatch with one flag more, and cores for loaders."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/slurm/data_plane.sbatch"
PRETRAIN = ROOT / "scripts/slurm/pretrain.sbatch"
ALLOCATION = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[03-04]",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "32",
    "DRY_RUN": "1",
}


def call(script, folder, *flags, **environment):
    (folder / "my.yaml").write_text("model:\n")
    outside = {"PATH": os.environ["PATH"], "HOME": str(folder), "CONFIG": "my.yaml"}
    return subprocess.run(
        [script, *flags],
        env=outside | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def headers(script):
    return set(re.findall(r"^#SBATCH (.*)$", script.read_text(), re.MULTILINE))


def test_it_is_sound_bash():
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=10)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True, timeout=60)


def test_it_asks_for_what_the_other_asks_for_and_cores():
    assert headers(SCRIPT) - headers(PRETRAIN) == {"--cpus-per-task=32"}
    assert headers(PRETRAIN) <= headers(SCRIPT)


def test_torchrun_starts_the_ranks_and_they_load_through_the_data_plane(tmp_path):
    environment = ALLOCATION | {"PRETRAIN": str(PRETRAIN)}
    done = call(SCRIPT, tmp_path, "--train-iters", "5 0", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    plain = call(PRETRAIN, tmp_path, "--hdp-loaders", "ray", "--train-iters", "5 0", **ALLOCATION)
    assert done.stdout == plain.stdout
    words = shlex.split(done.stdout.splitlines()[-1])
    assert "torch.distributed.run" in words and "--cpus-per-task=32" in words
    assert words[-4:] == ["--hdp-loaders", "ray", "--train-iters", "5 0"]


def test_the_documented_way_from_the_repository(tmp_path):
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    done = call("./scripts/slurm/data_plane.sbatch", tmp_path, DRY_RUN="1")
    assert done.returncode == 0 and "--hdp-loaders ray" in done.stdout


def test_a_script_that_is_not_there_ends_with_2(tmp_path):
    done = call(SCRIPT, tmp_path, DRY_RUN="1")
    assert done.returncode == 2 and done.stdout == "" and "PRETRAIN=" in done.stderr
