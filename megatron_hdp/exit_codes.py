"""What an exit code says: one declaration for commands, for what starts them, and for the docs."""

import errno
from enum import IntEnum

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class ExitCode(IntEnum):
    """How a command, or a rank of a job, has ended."""

    DONE = 0
    """Done; also after SIGTERM, SIGUSR1 or Ctrl-C, once the step has run and is saved."""
    FAILED = 1
    """A rank raised an exception, whose traceback stands in its log; `megatron-hdp check` refuses a
    configuration; `megatron-hdp doctor` finds that training cannot run; `megatron-hdp verify` finds
    a damaged checkpoint."""
    MISTAKE = 2
    """A flag, a file or the data is wrong, or a loss or gradient is NaN or infinite: one message
    without a traceback, and starting again would end likewise."""
    BLAMES_ANOTHER = 3
    """Another rank died, failed or stands still; the message says which one. With ``--hdp-survive``
    also what the job does not survive: the loss of too many, a full disk."""
    INTERRUPTED = 130
    """Ctrl-C, SIGTERM or SIGHUP ended a `megatron-hdp` command; a second Ctrl-C a rank."""
    UNREAD = 141
    """Who reads the output of a `megatron-hdp` command, such as `head`, has enough: it ends
    without a message, as if by SIGPIPE."""


def is_of_a_full_disk(error: BaseException) -> bool:
    """Whether a disk without room is what an error was raised from."""
    while not (isinstance(error, OSError) and error.errno in NO_ROOM):
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return True
