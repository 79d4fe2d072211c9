"""The cost model: seconds of a micro-batch on one HDP rank, from a few coefficients.

With s the tokens of a sequence and D the ranks that share it:

- compute of a slice: ``(a s^2 + b s) / D`` seconds, forward and backward; the term ``a s^2`` is
  attention, which is causal: ``6 L H s^2`` FLOP for L layers of hidden size H; ``b s`` is the
  rest: ``6 P s`` FLOP for P parameters
- traffic of a ring: each member sends ``3 (D - 1) / D`` x (tokens of the ring's sequences) x
  ``kv_bytes_per_token`` bytes (K and V once forward; K, V and their gradients backward) at
  ``intra_node_bytes_per_s`` if the ring stays in one node, else at ``inter_node_bytes_per_s``
- traffic is hidden under the attention of the ring's own sequences; the excess is exposed
- whole ``local`` sequences on a member cost ``a s^2 + b s`` there and hide nothing
- every micro-batch costs ``g`` seconds more, whatever it holds
- a rank of speed v takes 1/v of the time for all of this except traffic
- the members of a ring start together and take the time of the slowest
- with P pipeline stages a micro-batch takes 1/P of its time on each stage, one third of it forward,
  two thirds backward
- a token's activations take ``activation_bytes_per_token`` on a rank; with offload ratio r and L
  layers, ``(2 + (1 - r) (L - 2)) / L`` of them stay resident (paper, equation 3) and the rest must
  reach the host, at ``host_bytes_per_s``, within the micro-batch's forward time
"""

import dataclasses
import difflib
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

# Bytes that one layer keeps of one token and hidden channel in BF16, without recomputation and
# without attention scores (arXiv 2205.05198, section 4.1).
_ACTIVATION_BYTES = 34


@dataclass(frozen=True)
class CostModel:
    """Coefficients of the cost model; see the module's docstring for the formulas."""

    a: float
    """Seconds per token^2 (attention, forward and backward, all layers)."""
    b: float
    """Seconds per token (everything that is linear in the length)."""
    kv_bytes_per_token: float
    """Bytes of K and V of one token over all layers."""
    g: float = 0.0
    """Seconds per micro-batch."""
    intra_node_bytes_per_s: float = 300e9
    """Bytes a second that a rank can send to another rank of its node."""
    inter_node_bytes_per_s: float = 50e9
    """Bytes a second that a rank can send to another node."""
    ranks_per_node: int = 8
    """HDP ranks ``k * ranks_per_node`` to ``(k + 1) * ranks_per_node - 1`` share node k."""
    activation_bytes_per_token: float = 0.0
    """Bytes of activations that a rank keeps of one token between forward and backward."""
    host_bytes_per_s: float = 25e9
    """Bytes a second that a rank can move to or from host memory; the lower of the two."""
    num_layers: int = 1
    """Layers of a rank, of one of its pipeline stages; two of them always stay resident."""
    rank_speeds: tuple[float, ...] = ()
    """Speed of each HDP rank, 1 being the one described here; all 1 if empty."""

    def __post_init__(self) -> None:
        for name in ("a", "b", "kv_bytes_per_token", "g", "activation_bytes_per_token"):
            value = _number(name, getattr(self, name), zero_allowed=True)
            object.__setattr__(self, name, value)
        for name in ("intra_node_bytes_per_s", "inter_node_bytes_per_s", "host_bytes_per_s"):
            value = _number(name, getattr(self, name), zero_allowed=False)
            object.__setattr__(self, name, value)
        for name in ("ranks_per_node", "num_layers"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"cost model: {name} is {value!r}; expected an integer >= 1")
        speeds = self.rank_speeds
        if not isinstance(speeds, list | tuple):
            raise ValueError(f"cost model: rank_speeds is {speeds!r}; expected a list of numbers")
        checked = tuple(
            _number(f"speed of rank {rank}", speed, zero_allowed=False)
            for rank, speed in enumerate(speeds)
        )
        object.__setattr__(self, "rank_speeds", checked)

    @classmethod
    def from_model_shape(
        cls,
        num_layers: int,
        hidden_size: int,
        num_parameters: float,
        kv_bytes_per_token: float,
        flops_per_s: float = 400e12,
        **others: Any,
    ) -> Self:
        """Derives a and b from a model's shape at ``flops_per_s`` FLOP a second and rank.

        Args:
            num_layers: Transformer layers L.
            hidden_size: Hidden size H.
            num_parameters: Parameters that take part in a token's forward pass P.
            kv_bytes_per_token: Bytes of K and V of one token over all layers.
            flops_per_s: FLOP a second that one HDP rank reaches.
            others: Further fields by name, such as ``ranks_per_node``.
        """
        if not (math.isfinite(flops_per_s) and flops_per_s > 0):
            raise ValueError(f"flops_per_s is {flops_per_s!r}; expected a finite number > 0")
        fields = {
            "a": 6 * num_layers * hidden_size / flops_per_s,
            "b": 6 * num_parameters / flops_per_s,
            "kv_bytes_per_token": kv_bytes_per_token,
            "activation_bytes_per_token": _ACTIVATION_BYTES * num_layers * hidden_size,
            "num_layers": num_layers,
        }
        return cls(**fields | others)

    @classmethod
    def of_tensor_ranks(cls, tensor_ranks: int, **shape: Any) -> Self:
        """Costs of an HDP rank of several GPUs that compute, send and copy side by side.

        Args:
            tensor_ranks: GPUs that share each layer.
            shape: Arguments of ``from_model_shape``, whose speeds are those of one GPU.
        """
        one = cls.from_model_shape(**shape)
        return dataclasses.replace(
            one,
            a=one.a / tensor_ranks,
            b=one.b / tensor_ranks,
            intra_node_bytes_per_s=one.intra_node_bytes_per_s * tensor_ranks,
            inter_node_bytes_per_s=one.inter_node_bytes_per_s * tensor_ranks,
            host_bytes_per_s=one.host_bytes_per_s * tensor_ranks,
            ranks_per_node=max(1, one.ranks_per_node // tensor_ranks),
        )

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Reads coefficients from a JSON object whose keys are this class's fields."""
        try:
            data = orjson.loads(Path(path).read_bytes())
        except orjson.JSONDecodeError as error:
            raise ValueError(f"cost model {path}: not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"cost model {path}: found {type(data).__name__}; expected an object")
        names = {field.name: field for field in dataclasses.fields(cls)}
        for key in data:
            if key not in names:
                nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
                raise ValueError(f"cost model {path}: unknown key {key!r}; nearest is {nearest!r}")
        for name, field in names.items():
            if name not in data and field.default is dataclasses.MISSING:
                raise ValueError(f"cost model {path}: key {name!r} is missing; add it")
        try:
            return cls(**data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_json(self) -> bytes:
        """The JSON object that ``from_json`` reads."""
        return orjson.dumps(dataclasses.asdict(self), option=orjson.OPT_INDENT_2)


def _number(name: str, value: Any, *, zero_allowed: bool) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (0 < value <= sys.float_info.max or (value == 0 and zero_allowed)):
        return float(value)
    sign = ">=" if zero_allowed else ">"
    raise ValueError(f"cost model: {name} is {value!r}; expected a finite number {sign} 0")


LLAMA_7B = CostModel.from_model_shape(
    num_layers=32, hidden_size=4096, num_parameters=7e9, kv_bytes_per_token=131_072
)
"""LLaMA-7B with 8 KV groups in BF16 at 400 TFLOP/s a rank; what ``plan`` assumes by default."""
