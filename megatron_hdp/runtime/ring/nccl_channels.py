"""How many of NCCL's channels two neighbours of a ring share, and how to get more than one.

NCCL takes a communicator for one whose ranks all talk to all others at a time. On many nodes it
gives a pair fewer channels the more ranks there are, down to one, over NVLink too: 20 GB/s instead
of 300. A ring has one neighbour on either side, so the rings' communicator asks for more.

- from NCCL 2.30 on by ``maxP2pPeers``, the number of ranks that one talks to at a time
- in 2.28 and 2.29 by ``nChannelsPerNetPeer``; 4 is what NCCL takes by itself on two nodes. Its
  variable was seen to hang other patterns (NCCL issues 1835: all-to-all over 64 ranks and more,
  whose messages pass through other GPUs; 1915: with 32 channels).
- before 2.28 there is nothing for one communicator alone

PyTorch binds neither, so they are written where they lie in NCCL's structure, whose address it
gives, after checks that it is the known one. A variable of NCCL's that the user sets decides
instead, as in NCCL.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from typing import Any

from megatron_hdp.planner.network import FIELDS, VARIABLES, Field, Version

_MAGIC, _UNSET = 0xCAFEBEEF, -(2**31)
_HEADER = struct.Struct("=QII")  # bytes of the structure, magic, version that it was compiled for
_MAX_CTAS_AT = 28


ASKED = frozenset(f"{one.name} {one.value}" for one in FIELDS)
"""What `widen` says where it has asked."""


def widen(config: Any, version: Version, environment: Mapping[str, str] = os.environ) -> str:
    """Asks for more channels a pair; returns what was asked for, or why not, for the log.

    Args:
        config: ``ProcessGroupNCCL.Options.config`` of the rings' communicator; its ``max_ctas``
            is set.
        version: of the NCCL that runs.
        environment: where the user's variables are.
    """
    name = next((name for name in VARIABLES if name in environment), None)
    if name is not None:
        return f"{name}={environment[name]} decides"
    field = next((field for field in FIELDS if version >= field.since), None)
    if field is None:
        return "NCCL's own number of channels a pair: 2.28 or newer would give rings more"
    try:
        _write(config, field)
    except (OSError, ValueError) as error:
        return f"NCCL's own number of channels a pair: {error}"
    return f"{field.name} {field.value}"


def _write(config: Any, field: Field) -> None:
    """Sets a field of ``ncclConfig_t``.

    Raises:
        OSError, ValueError: it is not the known structure; nothing is changed.
    """
    if not hasattr(config, "unsafe_get_ptr"):
        raise ValueError("torch does not say where its configuration lies, 2.13 does")
    address = config.unsafe_get_ptr()
    size, magic, code = _HEADER.unpack(_memory(address, _HEADER.size))
    built_for = (code // 10_000, code // 100 % 100, code % 100)
    if magic != _MAGIC or size < field.offset + 4 or built_for < field.since:
        raise ValueError(f"torch was compiled for an NCCL without {field.name}")
    (max_ctas,) = struct.unpack("=i", _memory(address + _MAX_CTAS_AT, 4))
    (found,) = struct.unpack("=i", _memory(address + field.offset, 4))
    if max_ctas != config.max_ctas or found != _UNSET:
        raise ValueError(f"torch's NCCL configuration is not the known one of {built_for}")
    ctypes.c_int32.from_address(address + field.offset).value = field.value


def _memory(address: int, num_bytes: int) -> bytes:
    """Of this process; unlike a pointer's a wrong address is an OSError."""
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        found = memory.read(num_bytes)
    if len(found) < num_bytes:
        raise OSError(f"{num_bytes} bytes at {address:#x} cannot be read")
    return found
