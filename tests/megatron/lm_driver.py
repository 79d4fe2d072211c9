"""Runs a Megatron-LM checkout's pretrain_gpt.py on gloo ranks, several times after one import.

Ranks are forked once Megatron is loaded, which takes longer than the few steps that they run. What
they write goes to files. ``python -m tests.megatron.lm_driver CHECKOUT RUNS.json``.
"""

import json
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from pathlib import Path

DEADLINE_S = 240


def main(checkout: Path, runs: list[dict]) -> int:
    sys.path.insert(0, str(checkout))
    from megatron_hdp.megatron import cpu_shim

    cpu_shim.apply()
    import megatron.training.training  # noqa: F401

    codes = {run["name"]: _run(run) for run in runs}
    print("exit codes", codes)
    return int(any(codes.values()))


def _run(run: dict) -> int:
    """One run; returns 0 if every rank ended well."""
    port = _free_port()
    children = {}
    for rank in range(run["ranks"]):
        child = os.fork()
        if child == 0:
            _be_rank(run, rank, port)
        children[child] = rank
    deadline, failed = time.monotonic() + DEADLINE_S, 0
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            del children[child]
            failed |= status
        if failed or time.monotonic() > deadline:
            for other in children:
                os.kill(other, 9)
                os.waitpid(other, 0)
            return failed or 1
        time.sleep(0.02)
    return 0


def _be_rank(run: dict, rank: int, port: int) -> None:
    output = os.open(f"{run['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(run["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    script = run["script"]
    code = 1
    try:
        if run["plugin"]:
            from megatron_hdp import plugin

            plugin.run(script, run["arguments"])
        else:
            sys.argv = [script, *run["arguments"]]
            runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    for helper in multiprocessing.active_children():
        helper.kill()  # Megatron's writers of checkpoints would outlive a rank that ends at once
    os._exit(code)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
