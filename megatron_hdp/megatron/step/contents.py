"""What stands in the token file, as every rank says it: an ``.idx`` says only how long it is."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_hdp.data import TokenReader
from megatron_hdp.megatron.parallel import RankPlace, compute_device

_HALF = 2**32


def contents_of(reader: TokenReader, place: RankPlace) -> int:
    """The fingerprint of the tokens that this rank reads, for all ranks to compare.

    A rank that reads none is not asked for its file: it takes the word of the first rank, which
    always reads. Every rank of the job must call this.
    """
    found = reader.fingerprint() if place.reads_tokens else 0
    halves = torch.tensor(divmod(found, _HALF), device=compute_device())
    dist.broadcast(halves, src=0)
    high, low = halves.tolist()
    return found if place.reads_tokens else high * _HALF + low
