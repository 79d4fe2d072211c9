"""Runs a Megatron-LM checkout's script on gloo ranks, several times after one import.

Ranks are forked once Megatron is loaded, which takes longer than the few steps that they run. What
they write goes to files. ``python -m tests.megatron.lm.driver CHECKOUT RUNS.json``.
"""

import argparse
import functools
import gc
import json
import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing import spawn
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_hdp.data import DataOrder
from megatron_hdp.data.mixture import Position
from megatron_hdp.processes.ports import free_port
from megatron_hdp.runtime.epochs import keys
from tests.support.epochs import Deaths, DiesIn, SurvivingJob, has_no_room
from tests.support.older import order_before_mixtures

DEADLINE_S = 240


def main(checkout: Path, runs: list[dict]) -> int:
    sys.path.insert(0, str(checkout))
    from megatron_hdp.megatron.cpu import shim

    shim.apply()
    import megatron.core.datasets.utils as helpers
    import megatron.core.dist_checkpointing.strategies.torch
    import megatron.training.training  # noqa: F401

    import megatron_hdp.megatron.lm.model
    import megatron_hdp.megatron.lm.patches
    import megatron_hdp.megatron.lm.run
    import megatron_hdp.training.loop  # noqa: F401

    runpy.run_path(str(checkout / "pretrain_gpt.py"), run_name="imported")  # what ranks import
    helpers.compile_helpers()
    helpers.compile_helpers = lambda: None  # each run would ask `make` again
    gc.freeze()  # a rank that collected what was imported here would copy its memory
    codes = {run["name"]: _survive(run) if "survives" in run else _run(run) for run in runs}
    print("exit codes", codes)
    return int(any(codes.values()))


def _run(run: dict) -> int:
    """One run; returns 0 if every rank ended as it should, by default with exit code 0.

    A run may name its ``exits``, one a rank; a rank of ``None`` does not end by itself.
    """
    port = free_port()
    expected = run.get("exits") or [0] * run["ranks"]
    children = {}
    for rank in range(run["ranks"]):
        child = os.fork()
        if child == 0:
            _be_rank(run, rank, port)
        children[child] = rank
    deadline, wrong = time.monotonic() + DEADLINE_S, 0
    while any(expected[rank] is not None for rank in children.values()):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            code = os.waitstatus_to_exitcode(status)
            wrong |= code != expected[children.pop(child)]
        if wrong or time.monotonic() > deadline:
            wrong = 1
            break
        time.sleep(0.02)
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return wrong


class _Job(SurvivingJob):
    """Of a run that loses ranks: ``survives`` names faults by member, arguments of `DiesIn`."""

    def start(self, member: int, joins: Sequence[int]) -> None:
        process = multiprocessing.get_context("fork").Process(
            target=_be_member, args=(self.arguments, member, joins, self.store.port)
        )
        process.start()
        self.processes[member] = process


def _survive(run: dict) -> int:
    """A run whose ranks may die; returns 0 if all that were in it to the end ended well."""
    job = _Job(run, run["ranks"], Path(run["log"]).parent, replaces=run.get("replaces", False))
    if "deaths" in run:
        deaths = Deaths(lambda: _num_lines(Path(run["deaths"])), run["ranks"])
        codes = job.run(deaths.disturb, timeout_s=4 * DEADLINE_S)
        if not any(codes):
            found = [len(deaths.killed), *deaths.grown()]
            Path(f"{run['log']}.grown").write_text(json.dumps(found))
    else:
        codes = job.run(timeout_s=DEADLINE_S)
    Path(f"{run['log']}.said").write_text("\n".join(job.said))
    return int(codes != run.get("exits", [0] * len(codes)))


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _be_member(run: dict, member: int, joins: Sequence[int], port: int) -> None:
    for descriptor in os.listdir("/proc/self/fd"):  # the job's store is not this process's
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                os.close(int(descriptor))
    os.environ |= {keys.MEMBER: str(member), keys.JOINS: json.dumps(joins)}
    fault = run["survives"].get(str(member))
    _be_rank(run, joins.index(member) if joins else member, port, member, fault)


def _be_rank(
    run: dict, rank: int, port: int, member: int | None = None, fault: list | None = None
) -> None:
    log = f"{run['log']}.{rank if member is None else member}"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(run["ranks"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WANDB_MODE": "offline",
    }
    code, faults = 1, ExitStack()
    try:
        faults.enter_context(_spawned_without_the_script())
        if fault is not None:
            DiesIn(**fault)(member)
        if "no_room_for" in run:
            has_no_room(run["no_room_for"])
        if member == run.get("waiter", 0) and "waits_at" in run:
            faults.enter_context(_waiting(run["waits_at"], run["ranks"]))
        if run.get("fp64"):
            faults.enter_context(_float64())
        if "fault" in run:
            from tests.training.faults import planted

            faults.enter_context(planted(run["fault"]))
        if run.get("saves_beside"):
            faults.enter_context(_persistent_writer_on_a_cpu())
        if run.get("older"):
            faults.enter_context(_older_release())
        if run.get("emptied"):
            from tests.gradient_equivalence.case import emptied_outputs

            faults.enter_context(emptied_outputs())
        if run.get("hybrid"):
            from megatron.core.models.hybrid import hybrid_block
            from megatron.core.transformer.torch_norm import WrappedTorchNorm

            faults.enter_context(mock.patch.object(hybrid_block, "TENorm", WrappedTorchNorm))
        if run.get("sft"):
            faults.enter_context(_sft_on_a_cpu())
        if "nan_after" in run:
            faults.enter_context(_nan_after(run["nan_after"]))
        code = _start(run)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    for helper in multiprocessing.active_children():
        helper.kill()  # Megatron's writers of checkpoints would outlive a rank that ends at once
    os._exit(code)


def _start(run: dict) -> int:
    """Runs the script: by our command, under the plugin or alone; or the project's own script."""
    if run.get("command"):
        from megatron_hdp.__main__ import main

        return main(["run", run["script"], *run["arguments"]])
    if run.get("own"):
        from megatron_hdp import pretrain_gpt

        return pretrain_gpt.main(run["arguments"])
    if run["plugin"]:
        from megatron_hdp import plugin

        plugin.run(run["script"], run["arguments"])
    else:
        sys.argv = [run["script"], *run["arguments"]]
        runpy.run_path(run["script"], run_name="__main__")
    return 0


def _waiting(step: int, num_ranks: int) -> AbstractContextManager[object]:
    """Within the block, a step does not begin before others want to join."""
    from megatron_hdp.megatron.lm.survival import LmSurvival

    original = LmSurvival._begin

    def begin(self: LmSurvival, number: int) -> None:
        membership = self.recovery.membership
        while (
            number == step and len(self._epoch.members) < num_ranks and not membership.leaves_next
        ):
            time.sleep(0.05)
        original(self, number)

    return mock.patch.object(LmSurvival, "_begin", begin)


def _float64() -> AbstractContextManager[object]:
    """Within the block, weights, gradients and the optimizer's state are float64."""
    from megatron_hdp.megatron.lm import options

    original = options.check_derived

    def check(args: argparse.Namespace) -> None:
        args.params_dtype, args.fp64 = torch.float64, True
        args.accumulate_allreduce_grads_in_fp32 = False
        original(args)

    return mock.patch.object(options, "check_derived", check)


@contextmanager
def _older_release() -> Iterator[None]:
    """Within the block, the order of the data has its first version only, which nothing names."""
    from megatron_hdp.data.mixture import source
    from megatron_hdp.megatron.lm import checkpoint

    def remember(order: DataOrder, args: argparse.Namespace) -> None:
        original(order, args)
        args.hdp_data_order = order_before_mixtures(args.hdp_data_order)

    original = checkpoint.remember
    with (
        mock.patch.object(source, "LATEST_ORDER", 1),
        mock.patch.object(checkpoint, "remember", remember),
        mock.patch.object(checkpoint, "remember_position", lambda *_: None),
    ):
        yield


@contextmanager
def _sft_on_a_cpu() -> Iterator[None]:
    """Within the block, Megatron's ``--sft`` runs without TransformerEngine and transformers 4.

    Its rows are packed, which only TransformerEngine's attention takes; one conversation that fills
    its row, padding included, is what it is without packing. Before 0.18 its tokenizer wants ids of
    a chat template, which transformers 5 gives when asked.
    """
    import transformers
    from megatron.core.models.gpt import GPTModel

    def forward(self: Any, *positional: Any, packed_seq_params: Any = None, **named: Any) -> Any:
        if packed_seq_params is not None:
            length = positional[0].shape[1]
            assert set(packed_seq_params.cu_seqlens_q.flatten().tolist()) == {0, length}
        return original(self, *positional, packed_seq_params=None, **named)

    original = GPTModel.forward
    base = transformers.PreTrainedTokenizerBase
    template = functools.partialmethod(base.apply_chat_template, return_dict=False)
    with (
        mock.patch.object(base, "apply_chat_template", template),
        mock.patch.object(GPTModel, "forward", forward),
    ):
        yield


def _persistent_writer_on_a_cpu() -> AbstractContextManager[object]:
    """Within the block, Megatron's persistent writer of checkpoints, a process, wants no GPU."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    from tests.megatron.lm import driver  # this module by the name that a writer finds it by

    loop = staticmethod(driver.write_on_a_cpu)
    return mock.patch.object(PersistentAsyncCaller, "async_loop", loop)


def _spawned_without_the_script() -> AbstractContextManager[object]:
    """Within the block, helpers that Megatron spawns to save do not import the script.

    It would take them seconds, and the script imports on a GPU only.
    """

    def prepared(name: str) -> dict[str, Any]:
        return {key: one for key, one in original(name).items() if "init_main" not in key}

    original = spawn.get_preparation_data
    return mock.patch.object(spawn, "get_preparation_data", prepared)


def write_on_a_cpu(*given: Any) -> None:
    """The loop of that writer."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    with (
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
    ):
        PersistentAsyncCaller.async_loop(*given)


def _nan_after(consumed: int) -> AbstractContextManager[object]:
    """Within the block, the loss of the step that begins after so many sequences is no number."""
    from megatron_hdp.megatron.step.hdp_steps import HdpSteps

    original = HdpSteps.run

    def run(self: HdpSteps, position: Position, forward_only: bool = False) -> object:
        report = original(self, position, forward_only)
        if forward_only or position.sequences != consumed:
            return report
        print(f"instead of {report.loss!r}", flush=True)
        return replace(report, loss=float("nan"))

    return mock.patch.object(HdpSteps, "run", run)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
