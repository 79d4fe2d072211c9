"""A batch of verl's as arrays of whole sequences, and what was found of them as verl's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from megatron_hdp.arrays import BoolArray, Int64Array

_REFUSED = (
    *("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared"),
    "enable_routing_replay",
)
_NAMES = ("log_probs", "entropy")
_LEAST = 1e-8  # temperature


def require_known(data: TensorDict) -> None:
    """Refuses a batch with what HDP does not know.

    Raises:
        ValueError: names it.
    """
    for name in _REFUSED:
        if tu.get_non_tensor_data(data, key=name, default=False):
            raise ValueError(f"found {name} in the batch, which HDP does not know: switch it off")
    for name in ("multi_modal_inputs", "routed_experts"):
        if data.get(name, None) is not None:
            raise ValueError(f"found {name} in the batch, which HDP does not know: leave it out")
    if not data["input_ids"].is_nested:
        raise ValueError(
            "found padded input_ids, expected nested ones: set use_remove_padding, or pad_mode to "
            "no_padding"
        )
    positions = data.get("position_ids", None)
    if positions is not None and positions.is_nested:
        for number, one in enumerate(positions.unbind()):
            if one.dim() != 1 or not torch.equal(one, torch.arange(len(one), device=one.device)):
                raise ValueError(
                    f"found positions of sequence {number} that are not 0, 1, 2 ..., which HDP "
                    "does not know"
                )


def temperature_of(data: TensorDict) -> float | tuple[float, ...]:
    """The temperature of a batch, or one of each sequence where they differ.

    As in verl's engine, what is not above 0, like padding, is 1e-8.
    """
    given = data.get("temperature", None)
    if not isinstance(given, torch.Tensor):  # one number for all
        given = tu.get_non_tensor_data(data, key="temperature", default=1.0)
    flat = torch.as_tensor(given, dtype=torch.float64).flatten().cpu()
    several = tuple(torch.where(flat > 0, flat, _LEAST).tolist())
    return several[0] if len(set(several)) == 1 else several


@dataclass(frozen=True)
class Rows:
    """Sequences, and which of their tokens verl looks at."""

    tokens: list[Int64Array]
    wanted: list[BoolArray]

    @classmethod
    def of(cls, data: TensorDict) -> Self:
        """Of a batch: answers where it tells them from prompts, else all tokens."""
        tokens = [one.cpu().numpy() for one in data["input_ids"].unbind()]
        wanted = [np.ones(len(one), dtype=np.bool_) for one in tokens]
        answers = data.get("responses", None)
        if answers is not None and answers.is_nested:
            lengths = answers.offsets().diff().tolist()
            wanted = [
                np.arange(len(one)) >= len(one) - n for one, n in zip(tokens, lengths, strict=True)
            ]
        return cls(tokens, wanted)

    def nested(self, found: Sequence[torch.Tensor], device: Any) -> dict[str, torch.Tensor]:
        """Outputs by verl's names, made of log-probabilities, and entropies, of each sequence.

        Args:
            found: ``[length]`` or ``[2, length]``, as `HdpSession.log_probs` gives them: entry t is
                about token t. In verl's outputs it is about token t + 1, and the last one is 0.
            device: of the outputs.
        """
        ahead = [torch.nn.functional.pad(one[..., 1:], (0, 1)) for one in found]
        flat = torch.cat(ahead, dim=-1).to(device)
        lengths = [len(one) for one in self.tokens]
        offsets = torch.tensor([0, *lengths], device=flat.device).cumsum(0)
        kinds = flat.reshape(-1, sum(lengths))
        return {
            name: torch.nested.nested_tensor_from_jagged(one, offsets)
            for name, one in zip(_NAMES, kinds, strict=False)
        }

    def nested_values(self, found: Sequence[torch.Tensor], device: Any) -> dict[str, torch.Tensor]:
        """The output by verl's name, made of values ``[length]`` of each sequence, as they are."""
        offsets = torch.tensor([0, *map(len, self.tokens)], device=device).cumsum(0)
        flat = torch.cat(list(found)).to(device)
        return {"values": torch.nested.nested_tensor_from_jagged(flat, offsets)}
