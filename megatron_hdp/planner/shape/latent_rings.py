"""Multi-latent attention: its keys and values travel around a ring, or the latent they come from.

The latent is much smaller, and every member makes keys and values of it anew: it projects what
arrives in forward, and once more in backward, where the projection has gradients of its own too.
So a hop costs four such projections of its tokens, forward and backward, in place of traffic; three
where the projection is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from megatron_hdp.planner.bounds import (
    Links,
    attention_s,
    exposed_s,
    links_of,
    made_share,
    merge_s,
    numbers_of_links,
    sent_bytes,
    spared_s,
)
from megatron_hdp.planner.cost_model import CostModel

_PROJECTIONS_OF_A_HOP = 3  # forward; in backward once more, and the gradient of the input


@dataclass(frozen=True)
class RingWays:
    """What a run's rings cost, by what travels."""

    kv: CostModel
    """Keys and values."""
    latent: CostModel
    """The latent: fewer bytes, and each further step takes time of its own."""

    @classmethod
    def of(
        cls,
        cost_model: CostModel,
        *,
        kv_bytes_per_token: float,
        latent_bytes_per_token: float,
        projection_share: float,
        trained_share: float = 1.0,
        made_bytes_per_token: float = 0.0,
    ) -> Self:
        """The two ways.

        Args:
            cost_model: of the run, whatever it says of bytes.
            kv_bytes_per_token: of keys and values over all layers, all tensor-parallel ranks'.
            latent_bytes_per_token: of the latent, which each tensor-parallel rank sends whole.
            projection_share: parameters that make keys and values of the latent, as a share of
                all that multiply a token and are no experts'.
            trained_share: of them, those whose gradient is made.
            made_bytes_per_token: of keys and values without the part that all heads share, where
                those of some heads may travel beside the latent.
        """
        # a token's pass through all of them, forward, is a third of what they cost trained
        of_a_hop = _PROJECTIONS_OF_A_HOP + trained_share
        projections_s = of_a_hop * cost_model.b * projection_share / 3
        return cls(
            kv=replace(cost_model, kv_bytes_per_token=kv_bytes_per_token),
            latent=replace(
                cost_model,
                kv_bytes_per_token=latent_bytes_per_token,
                query_ratio=cost_model.query_ratio * kv_bytes_per_token / latent_bytes_per_token,
                merge_b=cost_model.merge_b + projections_s,
                projection_b=projections_s,
                made_bytes_per_token=made_bytes_per_token,
            ),
        )

    def latent_is_faster(self, lengths: Sequence[int], ring: Sequence[int]) -> bool:
        """Whether a ring of these sequences had better pass it on; all members agree."""
        return _ring_s(self.latent, lengths, ring) < _ring_s(self.kv, lengths, ring)

    def made_share(self, lengths: Sequence[int], earlier: int, ring: Sequence[int]) -> float:
        """The share of the heads whose keys and values travel made, beside latents.

        Members of a ring agree.

        Args:
            lengths: tokens that go around of the ring's sequences; the first may continue.
            earlier: tokens of the first one in earlier parts, which go around as well.
            ring: HDP ranks in ring order.
        """
        degrees, links = np.array([float(len(ring))]), _links(ring, self.latent)
        ends = np.array([lengths[0] + earlier, *lengths[1:], earlier], dtype=np.int64)
        seconds = attention_s(ends, self.latent)
        attention = (seconds[:-1].sum() - seconds[-1]) / degrees
        hop = self.latent.num_layers * links.hop_s
        tokens = float(sum(lengths) + earlier)
        return float(made_share(degrees, tokens, attention, hop, links, self.latent)[0])


def _links(ring: Sequence[int], cost_model: CostModel) -> Links:
    numbers = numbers_of_links(np.array(ring), np.zeros(1, np.int64), cost_model)
    return links_of(numbers, cost_model)


def _ring_s(cost_model: CostModel, lengths: Sequence[int], ring: Sequence[int]) -> float:
    """What a member waits for traffic and does for each further step."""
    degree = len(ring)
    degrees, tokens = np.array([float(degree)]), np.array([float(sum(lengths))])
    links = _links(ring, cost_model)
    transfer = sent_bytes(degrees, tokens, cost_model) / links.bytes_per_s
    attention = attention_s(np.array(lengths, dtype=np.int64), cost_model).sum() / degrees
    hop = cost_model.num_layers * links.hop_s
    exposed = exposed_s(degrees, transfer, hop, attention)
    share = made_share(degrees, tokens, attention, hop, links, cost_model)
    exposed -= spared_s(share, degrees, tokens, links, cost_model)
    exposed += tokens / degrees * cost_model.kv_bytes_per_token * links.home_s_per_byte
    return float((exposed + merge_s(degrees, tokens / degrees, cost_model))[0])
