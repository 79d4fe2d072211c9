"""``torchrun ... -m megatron_hdp.pretrain_gpt``: trains a GPT, with or without HDP."""

import os
import sys
import traceback
from types import TracebackType
from typing import NoReturn

from megatron_hdp.exit_codes import ExitCode
from megatron_hdp.processes import launcher


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, trains, and returns the exit code.

    A mistake of the user's that every rank sees before the job is joined is told by the first rank
    only.
    """
    from megatron_hdp.megatron import known_warnings
    from megatron_hdp.megatron.options import parse_arguments
    from megatron_hdp.runtime import cuda_connections

    known_warnings.leave_out()
    rank = int(os.environ.get("RANK", "0"))
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        doubt = cuda_connections.prepare(
            cuda_connections.compute_capability(),
            tensor_parallel=arguments.tensor_model_parallel_size > 1,
            hybrid_data_parallel=arguments.hybrid_data_parallel,
        )
    except ValueError as error:
        if rank == 0:
            print(f"pretrain_gpt: error: {error}", file=sys.stderr, flush=True)
        return ExitCode.MISTAKE
    if doubt is not None and rank == 0:
        print(f"pretrain_gpt: {doubt}", flush=True)

    from megatron_hdp.megatron import parallel
    from megatron_hdp.runtime.health import DisagreementError, RankFailure
    from megatron_hdp.training.loop import pretrain

    try:
        parallel.join_job(arguments)
        pretrain(arguments)
        parallel.leave_job()
    except (ValueError, FileNotFoundError, DisagreementError) as error:
        print(f"pretrain_gpt: error on rank {rank}: {error}", file=sys.stderr, flush=True)
        return ExitCode.MISTAKE
    except RankFailure as error:
        print(f"pretrain_gpt: error on rank {rank}: {error}", file=sys.stderr, flush=True)
        return ExitCode.BLAMES_ANOTHER
    return ExitCode.DONE


def run() -> NoReturn:
    """Runs `main` and ends this process with its exit code.

    A process that failed ends at once: closing its communicators would wait for the other ranks.
    """
    launcher.end_with_launcher()
    sys.excepthook = _leave_after_exception
    code = main()
    if code:
        _leave(code)
    sys.exit(ExitCode.DONE)


def _leave_after_exception(
    kind: type[BaseException], error: BaseException, stack: TracebackType | None
) -> None:
    traceback.print_exception(kind, error, stack)
    _leave(ExitCode.FAILED)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
