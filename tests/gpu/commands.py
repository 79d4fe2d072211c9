"""Runs the training command as processes of their own, on a GPU or with every GPU hidden.

Nothing is forked: a process that has asked CUDA for anything cannot be.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import orjson

from scripts.gpu.several_ranks import one_gpu_environment
from tests.support.processes import free_port

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Command:
    """A run that has been started."""

    processes: list[subprocess.Popen[bytes]]
    outputs: list[Path]
    metrics_path: Path

    def finish(self, timeout_s: float) -> list[dict]:
        """The metrics of every step; fails the test with all ranks' output if one failed."""
        try:
            codes = [process.wait(timeout_s) for process in self.processes]
        finally:
            self.kill()
        text = "\n".join(path.read_text(errors="replace")[-6000:] for path in self.outputs)
        assert not any(codes), f"exit codes {codes}:\n{text}"
        return [orjson.loads(line) for line in self.metrics_path.read_bytes().splitlines()]

    def kill(self) -> None:
        """Ends what is still running."""
        for process in self.processes:
            process.kill()
            process.wait()


def start(flags: list[str], folder: Path, device: str, num_ranks: int = 1) -> Command:
    """Starts ``pretrain_gpt`` on so many ranks.

    Args:
        flags: the command's, without ``--metrics-path``.
        folder: made; for its output.
        device: "cuda": all ranks on the first GPU; "cpu": on none.
        num_ranks: of the job.
    """
    folder.mkdir(parents=True)
    metrics_path, port = folder / "metrics.jsonl", free_port()
    processes, outputs = [], []
    for rank in range(num_ranks):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *_paths(device)]),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        environment |= _device(device, rank, num_ranks)
        outputs.append(folder / f"output-{rank}")
        with outputs[-1].open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "megatron_hdp.pretrain_gpt", *flags]
                    + ["--metrics-path", str(metrics_path)],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return Command(processes, outputs, metrics_path)


def _paths(device: str) -> list[str]:
    """Where this process finds modules; on a CPU without a TransformerEngine that was carried."""
    paths = [path for path in sys.path if path]
    if device == "cuda":
        return paths
    return [path for path in paths if not Path(path, "transformer_engine").exists()]


def _device(device: str, rank: int, num_ranks: int) -> dict[str, str]:
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {} if num_ranks == 1 else {"LOCAL_RANK": "0"} | one_gpu_environment(rank)
