"""Text that takes long to decode; put into a data plane's processes by their hook."""

import os
import time

from megatron_hdp.data.on_the_fly import Decoder

ROW_S = "SLOW_TEXT_ROW_S"
"""In the environment: what each record takes more."""

_decoded = Decoder._decoded


def decode_slowly() -> None:
    """Take time for each record that is decoded."""

    def slowly(self, rows, counts):
        time.sleep(float(os.environ[ROW_S]) * len(rows))
        return _decoded(self, rows, counts)

    Decoder._decoded = slowly


def refuse_to_decode() -> None:
    """Fail where a record is decoded."""

    def refused(self, rows, counts):
        raise AssertionError(f"{len(rows)} records are decoded here")

    Decoder._decoded = refused
