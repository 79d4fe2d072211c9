"""``torchrun ... -m megatron_hdp.pretrain_gpt``: trains a GPT, with or without HDP."""

import sys


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, trains, and returns the exit code.

    A mistake of the user's (a flag, a file, the data) is one message without a traceback.
    """
    from megatron_hdp.megatron.arguments import parse_arguments

    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        from megatron_hdp.megatron import parallel
        from megatron_hdp.training.loop import pretrain

        parallel.join_job(arguments)
        pretrain(arguments)
        parallel.leave_job()
    except (ValueError, FileNotFoundError) as error:
        print(f"pretrain_gpt: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
