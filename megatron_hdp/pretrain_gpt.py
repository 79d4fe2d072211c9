"""``torchrun ... -m megatron_hdp.pretrain_gpt``: trains a GPT, with or without HDP."""

import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, trains, and returns the exit code.

    A mistake of the user's (a flag, a file, the data) is one message without a traceback; one that
    every rank sees before the job is joined comes from the first rank only.
    """
    from megatron_hdp.megatron.arguments import parse_arguments
    from megatron_hdp.options import OptionError

    rank = int(os.environ.get("RANK", "0"))
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    except OptionError as error:
        if rank == 0:
            print(f"pretrain_gpt: error: {error}", file=sys.stderr, flush=True)
        return 2

    from megatron_hdp.megatron import parallel
    from megatron_hdp.runtime.agreement import DisagreementError
    from megatron_hdp.training.loop import pretrain

    try:
        parallel.join_job(arguments)
        pretrain(arguments)
        parallel.leave_job()
    except (ValueError, FileNotFoundError, DisagreementError) as error:
        print(f"pretrain_gpt: error on rank {rank}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
