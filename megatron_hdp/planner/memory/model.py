"""The memory model: peak device memory of one rank by tokens and offload ratio.

With t tokens of a micro-batch on a rank of l layers and offload ratio r (paper, equation 3):

- one layer keeps ``Act(t) = activation_bytes_per_token t`` between forward and backward
- ``2 + (1 - r) (l - 2)`` layers' worth of it is resident: the layer that computes, the one that is
  being copied, and what stays of the others
- ``workspace_bytes_per_token t`` more at the busiest moment: gradients of activations, the loss
- ``fixed_bytes`` whatever is run: weights, gradients, optimizer state, buffers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True)
class MemoryModel:
    """Coefficients of the memory model; see the module's docstring for the formulas."""

    num_layers: int
    """Layers on the rank (of its pipeline stage)."""
    activation_bytes_per_token: float
    """What one layer keeps of one token between forward and backward."""
    workspace_bytes_per_token: float = 0.0
    fixed_bytes: float = 0.0

    @classmethod
    def fit(
        cls,
        num_layers: int,
        activation_bytes_per_token: float,
        peaks: Sequence[tuple[int, float]],
    ) -> Self:
        """The model through peaks measured without offload, by least squares.

        Args:
            num_layers: layers on the rank.
            activation_bytes_per_token: of one layer, as counted.
            peaks: (tokens, peak bytes) of micro-batches, of two sizes at least; small ones will do.

        Raises:
            ValueError: fewer than two sizes.
        """
        tokens = np.array([size for size, _ in peaks], dtype=np.float64)
        if len(np.unique(tokens)) < 2:
            raise ValueError(
                f"found peaks at {sorted(set(tokens.tolist()))} tokens; expected two sizes at least"
            )
        slope, fixed = np.polyfit(tokens, [peak for _, peak in peaks], 1)
        workspace = float(slope) - num_layers * activation_bytes_per_token
        return cls(num_layers, activation_bytes_per_token, workspace, float(fixed))

    def resident_layers(self, ratio: float) -> float:
        """Layers' worth of activations on the device at the end of forward."""
        kept = min(2, self.num_layers)
        return kept + (1 - ratio) * (self.num_layers - kept)

    def peak_bytes(self, tokens: int, ratio: float = 0.0) -> float:
        """Peak memory of the rank while it runs a micro-batch.

        Args:
            tokens: of the micro-batch on this rank, padding included.
            ratio: share of the activations of all but two layers that waits on the host.
        """
        return self.fixed_bytes + tokens * self._bytes_per_token(ratio)

    def most_tokens(self, memory_bytes: float, ratio: float = 0.0) -> int:
        """Tokens of the largest micro-batch whose peak is within `memory_bytes`; 0 if none is."""
        return max(0, int((memory_bytes - self.fixed_bytes) / self._bytes_per_token(ratio)))

    def _bytes_per_token(self, ratio: float) -> float:
        resident = self.resident_layers(ratio) * self.activation_bytes_per_token
        return resident + self.workspace_bytes_per_token
