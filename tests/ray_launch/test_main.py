"""The launcher's command: mistakes in one line; on a real Ray, where that is installed."""

import importlib.util
import os
import subprocess
import sys

import pytest

from megatron_hdp.ray_launch import __main__ as launcher
from tests.support.processes import free_port

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="no package ray in this Python: pip install 'megatron-hdp[ray]'",
)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "--nodes is 0; expected at least 1"),
        (["--ranks-per-node", "-2"], "--ranks-per-node is -2; expected at least 1"),
        (["--start-ray", "n01"], "--start-ray is 'n01'; expected HOST:PORT"),
        (["--start-ray", "n01:1"], "--start-ray found no RAY_AUTH_TOKEN"),
        ([], "found no package ray in this Python"),
    ],
)
def test_mistakes_are_told_in_one_line(words, said, monkeypatch, capsys):
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    masked = launcher.signal.pthread_sigmask(launcher.signal.SIG_BLOCK, set())
    try:
        assert launcher.main([*words, "script.py"]) == 2
    finally:
        launcher.signal.pthread_sigmask(launcher.signal.SIG_SETMASK, masked)
    error = capsys.readouterr().err
    assert error.startswith("ray_launch: error: ") and error.count("\n") == 1 and said in error


def test_variables_for_the_ranks(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert launcher._variable("NCCL_DEBUG") == ("NCCL_DEBUG", "INFO")
    assert launcher._variable("A=b=c") == ("A", "b=c")
    monkeypatch.delenv("NCCL_DEBUG")
    with pytest.raises(ValueError, match="--env NCCL_DEBUG: found no such variable"):
        launcher._variable("NCCL_DEBUG")


RANK = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["MINE"], flush=True)
if os.environ["RANK"] == sys.argv[1]:
    sys.exit(int(sys.argv[2]))
"""


@needs_ray
@pytest.mark.slow
def test_two_nodes_of_a_cluster_of_their_own(tmp_path):
    """Then the same, but a rank makes a mistake: the others are stopped, it is named."""
    (tmp_path / "rank.py").write_text(RANK)
    code, texts = launched(tmp_path, free_port(), "-1", "0")
    assert code == [0, 0], texts
    for node, ranks in ((0, "01"), (1, "23")):
        lines = sorted((tmp_path / f"logs/node-{node}-made-up-{node}.log").read_text().splitlines())
        assert lines == [f"rank {rank} of 4 yes" for rank in ranks]
    code, texts = launched(tmp_path, free_port(), "3", "2")
    assert code == [2, 0] and "rank 3 (node 1, made-up-1): exitcode : 2" in texts[0], texts


def launched(folder, port, *arguments):
    """Exit codes and outputs of both nodes' launchers, on this host."""
    processes = []
    for node in range(2):
        environment = os.environ | {
            "SLURM_NODEID": str(node),
            "SLURMD_NODENAME": f"made-up-{node}",
            "SLURM_CPUS_ON_NODE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": f"{port:032x}",
            "PYTHONPATH": os.pathsep.join(sys.path[:1] + [os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "megatron_hdp.ray_launch", "--logs", "logs", "--env"]
        command += ["MINE=yes", "--start-ray", f"127.0.0.1:{port}", "--nodes", "2"]
        command += ["--ranks-per-node", "2", "rank.py", *arguments]
        processes.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        texts = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], texts


@needs_ray
@pytest.mark.slow
def test_a_cluster_that_runs_already_is_used_and_left(tmp_path):
    import ray

    (tmp_path / "rank.py").write_text(RANK)
    context = ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        command = [sys.executable, "-m", "megatron_hdp.ray_launch", "--logs", "logs"]
        command += ["--env", "MINE=yes", "--ranks-per-node", "2"]
        environment = os.environ | {"RAY_ADDRESS": context.address_info["gcs_address"]}
        for arguments, code in ((["-1", "0"], 0), (["1", "7"], 7)):
            done = subprocess.run(
                [*command, "rank.py", *arguments],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == code, done.stdout + done.stderr
        assert ray.get(ray.remote(lambda: 5).remote()) == 5
    finally:
        ray.shutdown()
    (log,) = (tmp_path / "logs").glob("node-0-*.log")
    assert sorted(log.read_text().splitlines())[:1] == ["rank 0 of 2 yes"]
