"""``torchrun ... -m megatron_hdp.pretrain_gpt``: trains a GPT, with or without HDP."""

import os
import sys
import traceback
from typing import Any, NoReturn

from megatron_hdp.exit_codes import NO_ROOM, ExitCode, is_of_a_full_disk
from megatron_hdp.processes import launcher


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, trains, and returns the exit code.

    A mistake of the user's that every rank sees before the job is joined is told by the first rank
    only.
    """
    from megatron_hdp.megatron import known_warnings
    from megatron_hdp.megatron.options import parse_arguments
    from megatron_hdp.runtime import cuda

    known_warnings.leave_out()
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        doubts = cuda.prepare(
            cuda.Run(
                capability=cuda.compute_capability(),
                tensor_parallel=arguments.tensor_model_parallel_size > 1,
                keeps_module_loading=arguments.hdp_module_loading == "inherit",
                hybrid_data_parallel=arguments.hybrid_data_parallel,
            )
        )
    except ValueError as error:
        if _rank() == "0":
            _say(f"error: {error}")
        return ExitCode.MISTAKE
    for doubt in doubts if _rank() == "0" else ():
        print(f"pretrain_gpt: {doubt}", flush=True)

    from megatron_hdp.megatron import parallel
    from megatron_hdp.runtime.epochs import NotNamedError
    from megatron_hdp.runtime.health import DisagreementError, RankFailure
    from megatron_hdp.training.loop import pretrain

    try:
        if arguments.hdp_survive:
            _survive(arguments)
        else:
            parallel.join_job(arguments)
            pretrain(arguments)
            parallel.leave_job()
    except (ValueError, DisagreementError, RankFailure, NotNamedError, OSError) as error:
        if _is_of_a_connection(error):
            raise
        _say(f"error on rank {_rank()}: {error}")
        return code_of(error, survives=arguments.hdp_survive)
    return ExitCode.DONE


def code_of(error: Exception, *, survives: bool) -> ExitCode:
    """The exit code of a rank that says why it ends.

    In a job that survives, a checkpoint that cannot be written and a full disk are no mistake, but
    a loss that it does not survive: started again, it continues from the checkpoint before.
    """
    from megatron_hdp.megatron.checkpoint.checkpoints import NotSavedError
    from megatron_hdp.runtime.epochs import NotNamedError
    from megatron_hdp.runtime.health import RankFailure

    is_loss = isinstance(error, RankFailure | NotNamedError)
    if survives:
        is_loss |= isinstance(error, NotSavedError) or is_of_a_full_disk(error)
    return ExitCode.BLAMES_ANOTHER if is_loss else ExitCode.MISTAKE


def _survive(arguments: Any) -> None:
    """Trains in a job of the agent's, whose ranks may change."""
    from megatron_hdp.megatron import parallel
    from megatron_hdp.runtime.epochs import Membership
    from megatron_hdp.training import survival

    minutes = parallel.communication_minutes(arguments)
    survival.pretrain(arguments, Membership.of_environment(60.0 * minutes))


def run() -> NoReturn:
    """Runs `main` and ends this process with its exit code.

    A process that failed ends at once: closing its communicators would wait for the other ranks.
    What it says does not go through ``sys.excepthook``, which torch.distributed replaces by one
    that holds the words back until a hook returns.
    """
    launcher.end_with_launcher()
    try:
        code = main()
    except KeyboardInterrupt:
        _say(f"rank {_rank()} was interrupted before training began")
        code = ExitCode.INTERRUPTED
    except Exception as error:
        lines = "".join(traceback.format_exception(error)).splitlines(keepends=True)
        sys.stderr.write("".join(f"[rank{_rank()}]: {line}" for line in lines))
        if "torch" in sys.modules:
            from megatron_hdp.runtime.health import tell_torchrun

            tell_torchrun(error)
        code = ExitCode.FAILED
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(ExitCode.DONE)


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _is_of_a_connection(error: Exception) -> bool:
    """Which is no mistake of the user's, as an error of a file is: it names one, or is our own."""
    if not isinstance(error, OSError) or isinstance(error, ValueError):
        return False
    return error.filename is None and error.errno not in NO_ROOM


def _say(text: str) -> None:
    print(f"pretrain_gpt: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run()
