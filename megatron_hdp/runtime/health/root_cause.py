"""Tells torchrun which exception ended a rank; its summary of a failed job shows it."""

import os

from torch.distributed.elastic.multiprocessing.errors import get_error_handler


def tell_torchrun(error: Exception) -> None:
    """Writes `error` with its traceback to the file that torchrun named, if it did."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)
