"""What stands in the token files, as every rank says it: an ``.idx`` says only how long it is."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_hdp.data.mixture import Corpus
from megatron_hdp.megatron.parallel import RankPlace, compute_device

_HALF = 2**32


def contents_of(corpus: Corpus, place: RankPlace) -> dict[str, int]:
    """Fingerprints of the tokens that this rank reads, by source, for all ranks to compare.

    A rank that reads none is not asked for its files: it takes the word of the first rank, which
    always reads. Every rank of the job must call this.
    """
    found = [one.contents() if place.reads_tokens else 0 for one in corpus.sources]
    halves = torch.tensor([divmod(one, _HALF) for one in found], device=compute_device())
    dist.broadcast(halves, src=0)
    if not place.reads_tokens:
        found = [high * _HALF + low for high, low in halves.tolist()]
    return dict(zip(corpus.names, found, strict=True))
