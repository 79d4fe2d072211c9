"""The cost model: seconds of a micro-batch on one HDP rank, from a few coefficients.

With s the tokens of a sequence and D the ranks that share it:

- compute of a slice: ``(a s^2 + (attention_b + b + b_experts) s) / D`` seconds, forward and
  backward; ``a s^2 + attention_b s`` is attention, which is causal: ``6 L H s^2`` FLOP for L layers
  of hidden size H; ``(b + b_experts) s`` is the rest: ``6 P s`` FLOP for P parameters
- in the ``window_share`` of attention that belongs to layers with a window of w tokens
  (``window_tokens``), s^2 is w (2 s - w) for s above w: pairs of query and key, twice
- with ``attention_points`` attention takes what they say instead, here and below: linear between
  (0, 0) and the points, beyond the last one along the last line; ``CostModel.with_costs`` makes
  them of a function
- a ring takes D steps, with 1/D of its attention each, and has D - 1 hops in each pass, each under
  the step before it. With x = (tokens of the ring's sequences) / D x ``kv_bytes_per_token``, a hop
  carries x bytes forward (K and V), 2 x backward (K, V and their gradients), at
  ``intra_node_bytes_per_s`` if the ring stays in one node, else at ``inter_node_bytes_per_s``; and
  it takes ``intra_node_hop_s`` or ``inter_node_hop_s`` in each layer, whatever it carries
- a step's attention, one third of it forward, two thirds backward, hides a hop of its pass; what is
  left is exposed, D - 1 times in each pass; nothing hides under the last step of a pass
- each step of a ring is a block of attention, as is a micro-batch of one rank; the whole ``local``
  sequences of a member are one more: ``block_s`` seconds in each layer, forward and once more
  backward
- a member of a ring sends ``halo_bytes`` in layers with a window, whatever it holds, both passes;
  at the bandwidth between nodes, and nothing hides it
- a ring merges what a further step gives into what it has: ``merge_b`` seconds for each token of a
  member, forward and backward, all layers; with x tokens of a member ``(D - 1) merge_b x``, which
  hides nothing
- whole ``local`` sequences on a member cost their whole compute there and hide nothing
- every micro-batch costs ``g`` seconds more, whatever it holds
- a micro-batch crosses the ``num_layers`` of each of its P pipeline stages: hops and blocks count
  all of them, as the other coefficients do
- a rank of speed v takes 1/v of the time for all of this except traffic
- the members of a ring start together and take the time of the slowest
- a micro-batch in c parts (`planner.parts`) costs g, its blocks and its halo for each part; a block
  a step and a merged result for each part but the first, for keys of earlier parts; and each part's
  ring has its D - 1 hops in each pass, which carry the part's keys and those of earlier parts of
  its first sequence, or as much as ``query_ratio`` times the keys of its own tokens: its queries
  and what they find; a part's own attention hides them
- where these keys are made of latents, every member makes those of all earlier parts again for each
  part (``projection_b``); where queries travel, a member only its own, the part's and earlier
  ones, which streams do not count
- with ``made_bytes_per_token`` as many heads' keys and values as attention hides at speed 1 travel
  made beside the latents, but in streams: a hop's projections fall by their share (`spared_s`)
- a stream in c parts computes its forward twice. With its keys on the device, those made of latents
  are made anew for each part (``projection_b``); else those of each earlier part have a block a
  step, a pass of the ring and a merge of their own, and all but the first ``(1 - r) c`` come from
  the host in each forward, in backward with the sums of gradients (``sum_ratio``), under the
  part's compute; so does a sixth of ``halo_bytes``
- with P pipeline stages a micro-batch takes 1/P of its time on each stage, one third of it forward,
  two thirds backward
- a micro-batch that is recomputed computes its forward twice: a third more of all but traffic, its
  ring has two forward passes, and with stages a quarter of its time is forward
- a token's activations take ``activation_bytes_per_token`` on a rank; with offload ratio r and L
  layers, ``(2 + (1 - r) (L - 2)) / L`` of them stay resident (paper, equation 3) and the rest must
  reach the host, at ``host_bytes_per_s``, within the micro-batch's forward time; recomputed, it
  holds ``input_share + 1 / L`` of them at most: the inputs of all layers, and a layer
"""

import dataclasses
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import orjson
from numpy.typing import ArrayLike

from megatron_hdp.arrays import Float64Array, Int64Array
from megatron_hdp.planner.json_fields import read_fields
from megatron_hdp.planner.query_ratio import query_ratio_of

# Bytes that one layer keeps of one token and hidden channel in BF16, without recomputation and
# without attention scores (arXiv 2205.05198, section 4.1).
_ACTIVATION_BYTES = 34

# What `from_model_shape` takes queries to be.
_VALUE_BYTES, _HEAD_CHANNELS = 2, 128

_MAY_BE_ZERO = (
    *("a", "b", "kv_bytes_per_token", "g", "activation_bytes_per_token", "attention_b"),
    *("b_experts", "block_s", "intra_node_hop_s", "inter_node_hop_s", "merge_b", "window_share"),
    *("halo_bytes", "query_ratio", "input_share", "projection_b", "sum_ratio"),
    *("runtime_bytes", "made_bytes_per_token"),
)

_LONGEST = 2**40
"""The planner takes no longer sequence."""
_EVERY_LENGTH = 64
"""A function of the length is sampled at every length up to this one."""
_SAMPLING_RATIO = 1.02
"""And from there on at lengths so far apart: a line between them misses s^2 by 1e-4 of it."""


class AttentionTable(NamedTuple):
    """The attention points as arrays, (0, 0) left out; shape (points,)."""

    lengths: Int64Array
    seconds: Float64Array

    @property
    def rises_per_token(self) -> bool:
        """Whether seconds per token never fall with the length, as with ``a s^2``."""
        per_token = self.seconds / self.lengths
        most = np.maximum.accumulate(per_token)
        return bool((per_token >= most * (1 - 1e-12)).all())  # rounding is no fall


@dataclass(frozen=True)
class CostModel:
    """Coefficients of the cost model; see the module's docstring for the formulas."""

    a: float
    """Seconds per token^2 (attention, forward and backward, all layers)."""
    b: float
    """Seconds per token (what is linear in the length besides attention and experts)."""
    kv_bytes_per_token: float
    """Bytes of K and V of one token over all layers, but for those with a window."""
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
    attention_points: tuple[tuple[int, float], ...] = ()
    """Pairs of a length and the seconds of attention of a whole sequence of that length on one
    rank, forward and backward, instead of a and attention_b; lengths ascend, seconds never fall."""
    attention_b: float = 0.0
    """Seconds per token of attention, forward and backward, all layers; they hide ring traffic."""
    b_experts: float = 0.0
    """Seconds per token of experts, beside b."""
    block_s: float = 0.0
    """Seconds of a block of attention in one layer whatever it holds, forward; backward as much."""
    intra_node_hop_s: float = 0.0
    """Seconds of a hop in one layer whatever it carries, in a ring that stays in one node."""
    inter_node_hop_s: float = 0.0
    """The same in a ring that leaves its node."""
    merge_b: float = 0.0
    """Seconds per token of a member that each further step of its ring adds, forward and backward,
    all layers: results are merged."""
    window_tokens: int = 0
    """Tokens that a query sees in layers with a window, itself included; 0: no layer has one."""
    window_share: float = 0.0
    """The share of ``a`` that belongs to these layers."""
    halo_bytes: float = 0.0
    """Bytes that a member of a ring sends in them, forward and backward, whatever it holds."""
    query_ratio: float = 0.0
    """What goes around for a token if queries travel in place of keys, per what goes around for its
    keys and values (`query_ratio_of`); 0: not known, so that keys travel."""
    input_share: float = 0.0
    """Of a layer's activations the part that its input is, all that stays of it between forward and
    backward where micro-batches are recomputed; 0: not known, so that none is."""
    double_rings: bool = False
    """Whether rings of several nodes pass from one to the next on the links of all members of a
    node (`planner.bounds`); else on one."""
    projection_b: float = 0.0
    """The part of ``merge_b`` for keys and values that each step makes of the latents it is given,
    by tokens of these, not by those that attend."""
    made_bytes_per_token: float = 0.0
    """Bytes of a token's K and V where those of some heads may travel beside latents; 0: none."""
    sum_ratio: float = 2.0
    """Bytes of the sums of gradients that a stream keeps of its keys and values, per those of
    these: 2 where the model is in bfloat16 and sums are in float32."""
    runtime_bytes: float = 0.0
    """Bytes of a GPU that PyTorch does not count, as measured: CUDA, libraries, NCCL; 0: not
    known. ``check`` counts with them, plans do not."""
    doubt: str = ""
    """Why ``profile`` wrote this only by ``--force``, which every reader tells; else empty."""
    channels: int = 0
    """NCCL's channels of two neighbours with which bandwidths were measured; 0: nobody knows."""
    slowed: str = ""
    """How fewer channels lower a job's bandwidths (`planner.network`), likewise; else empty."""

    def __post_init__(self) -> None:
        for name in ("doubt", "slowed"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"cost model: {name} is {value!r}; expected a text")
        if type(self.channels) is not int or self.channels < 0:
            raise ValueError(f"cost model: channels is {self.channels!r}; expected an integer >= 0")
        for name in _MAY_BE_ZERO:
            value = _number(name, getattr(self, name), zero_allowed=True)
            object.__setattr__(self, name, value)
        for name in ("intra_node_bytes_per_s", "inter_node_bytes_per_s", "host_bytes_per_s"):
            value = _number(name, getattr(self, name), zero_allowed=False)
            object.__setattr__(self, name, value)
        for name in ("ranks_per_node", "num_layers"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"cost model: {name} is {value!r}; expected an integer >= 1")
        if type(rings := self.double_rings) is not bool:
            raise ValueError(f"cost model: double_rings is {rings!r}; expected true or false")
        if self.projection_b > self.merge_b:
            raise ValueError(
                f"cost model: projection_b is {self.projection_b!r}, a part of merge_b, which is "
                f"{self.merge_b!r}; expected at most that"
            )
        self._check_window()
        speeds = self.rank_speeds
        if not isinstance(speeds, list | tuple):
            raise ValueError(f"cost model: rank_speeds is {speeds!r}; expected a list of numbers")
        checked = tuple(
            _number(f"speed of rank {rank}", speed, zero_allowed=False)
            for rank, speed in enumerate(speeds)
        )
        object.__setattr__(self, "rank_speeds", checked)
        object.__setattr__(self, "attention_points", _points(self.attention_points))
        for name in ("a", "attention_b"):
            if self.attention_points and getattr(self, name) != 0:
                raise ValueError(
                    f"cost model: {name} is {getattr(self, name)!r} beside attention_points; "
                    "expected 0: they say what attention takes, leave one of the two out"
                )

    def _check_window(self) -> None:
        window = self.window_tokens
        if type(window) is not int or not 0 <= window <= _LONGEST:
            raise ValueError(
                f"cost model: window_tokens is {window!r}; expected an integer from 0 to "
                f"{_LONGEST:,}"
            )
        if (share := self.window_share) > 1:
            raise ValueError(f"cost model: window_share is {share!r}; expected a share of 0 to 1")
        if self.window_share and not window:
            raise ValueError(
                f"cost model: window_share is {self.window_share!r} without window_tokens; give "
                "both or neither"
            )

    def seen(self, lengths: Float64Array) -> Float64Array:
        """What ``a`` is multiplied with: squares of the lengths, in layers with a window less."""
        squares = lengths * lengths
        if not self.window_share:
            return squares
        inside = np.minimum(lengths, float(self.window_tokens))
        seen: Float64Array = inside * (2 * lengths - inside)
        return (1 - self.window_share) * squares + self.window_share * seen

    @property
    def halo_s(self) -> float:
        """Seconds of a ring for what it sends in layers with a window."""
        return self.halo_bytes / self.inter_node_bytes_per_s

    @property
    def recomputed_share(self) -> float:
        """Of a micro-batch's activations what a recomputed one holds at its fullest."""
        return min(1.0, self.input_share + 1 / self.num_layers) if self.input_share else 1.0

    @property
    def linear_s_per_token(self) -> float:
        """Seconds per token of all but attention: b and b_experts."""
        return self.b + self.b_experts

    @property
    def is_free(self) -> bool:
        """Whether no token costs anything: nothing can be planned by that."""
        of_tokens = self.a + self.attention_b + self.linear_s_per_token
        return of_tokens == 0 and not any(seconds for _, seconds in self.attention_points)

    @property
    def warning(self) -> str:
        """What a reader tells of a doubtful or slowed cost model; else empty."""
        doubt = self.doubt and f"the cost model was written by profile --force: {self.doubt}"
        told = "; ".join(filter(None, (doubt, self.slowed)))
        return told and f"note: {told}"

    @property
    def counts_layers(self) -> bool:
        """Whether something is given for one layer, so that ``num_layers`` must be right."""
        return max(self.block_s, self.intra_node_hop_s, self.inter_node_hop_s) > 0

    @cached_property
    def attention_table(self) -> AttentionTable:
        """The attention points as arrays."""
        pairs = self.attention_points
        return AttentionTable(
            np.array([length for length, _ in pairs], dtype=np.int64),
            np.array([seconds for _, seconds in pairs], dtype=np.float64),
        )

    def with_costs(self, cost: Callable[[Int64Array], ArrayLike], max_length: int) -> Self:
        """These coefficients with the compute that a function gives, instead of a, b and
        the other seconds per token.

        The function is sampled at every length up to 64, from there on every 2 % up to
        ``max_length``; between two samples compute is linear, beyond the last one it goes on as
        between the last two. ``b`` becomes the least that a further token costs anywhere, so that
        what is left, which becomes ``attention_points`` and hides ring traffic, never falls.

        Args:
            cost: Seconds of compute of whole sequences on one rank, forward and backward, for
                their lengths; both of shape (n,). ``g`` and ring traffic are not part of it.
            max_length: Tokens of the longest sequence to plan for.

        Raises:
            ValueError: ``max_length`` is out of range; or the function returns another shape, no
                numbers, or one that is not finite, negative, or less than for a shorter length.
        """
        lengths = _sampled_lengths(max_length)
        seconds = _checked_costs(cost(lengths.copy()), lengths)
        b = float((np.diff(seconds, prepend=0.0) / np.diff(lengths, prepend=0)).min())
        # falls are rounding of the subtraction
        attention = np.maximum.accumulate(np.maximum(seconds - b * lengths, 0.0))
        points = tuple(zip(lengths.tolist(), attention.tolist(), strict=True))
        return dataclasses.replace(
            self, a=0.0, b=b, attention_b=0.0, b_experts=0.0, attention_points=points
        )

    @classmethod
    def from_model_shape(
        cls,
        num_layers: int,
        hidden_size: float,
        num_parameters: float,
        kv_bytes_per_token: float,
        flops_per_s: float = 400e12,
        expert_parameters: float = 0.0,
        **others: Any,
    ) -> Self:
        """Derives a, b and b_experts from a shape at ``flops_per_s`` FLOP a second and rank.

        Args:
            num_layers: Transformer layers L.
            hidden_size: Hidden size H, or the channels of attention where they are others.
            num_parameters: Parameters that take part in a token's forward pass P.
            kv_bytes_per_token: Bytes of K and V of one token over all layers without a window.
            flops_per_s: FLOP a second that one HDP rank reaches.
            expert_parameters: Those of P that are experts'.
            others: Further fields by name, such as ``ranks_per_node``.
        """
        if not (math.isfinite(flops_per_s) and flops_per_s > 0):
            raise ValueError(f"flops_per_s is {flops_per_s!r}; expected a finite number > 0")
        if not 0 <= expert_parameters <= num_parameters:
            raise ValueError(
                f"expert_parameters is {expert_parameters!r}; expected 0 to the {num_parameters!r} "
                "of num_parameters, which they are a part of"
            )
        fields = {
            "a": 6 * num_layers * hidden_size / flops_per_s,
            "b": 6 * (num_parameters - expert_parameters) / flops_per_s,
            "b_experts": 6 * expert_parameters / flops_per_s,
            "kv_bytes_per_token": kv_bytes_per_token,
            "activation_bytes_per_token": _ACTIVATION_BYTES * num_layers * hidden_size,
            "input_share": _VALUE_BYTES / _ACTIVATION_BYTES,
            "num_layers": num_layers,
            "query_ratio": query_ratio_of(
                kv_bytes_per_token / _VALUE_BYTES,
                num_layers * hidden_size,
                num_layers * hidden_size,
                num_layers * hidden_size / _HEAD_CHANNELS,
                _VALUE_BYTES,
            ),
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
            attention_b=one.attention_b / tensor_ranks,
            merge_b=one.merge_b / tensor_ranks,
            projection_b=one.projection_b / tensor_ranks,
            b_experts=one.b_experts / tensor_ranks,
            intra_node_bytes_per_s=one.intra_node_bytes_per_s * tensor_ranks,
            inter_node_bytes_per_s=one.inter_node_bytes_per_s * tensor_ranks,
            host_bytes_per_s=one.host_bytes_per_s * tensor_ranks,
            ranks_per_node=max(1, one.ranks_per_node // tensor_ranks),
        )

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Reads coefficients from a JSON object whose keys are this class's fields."""
        data = read_fields(cls, path, "cost model")
        for field in dataclasses.fields(cls):
            if field.name not in data and field.default is dataclasses.MISSING:
                raise ValueError(f"cost model {path}: key {field.name!r} is missing; add it")
        try:
            found = cls(**data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if found.is_free:
            raise ValueError(
                f"cost model {path}: found a, attention_b, b and b_experts of 0, expected tokens "
                "that cost something: measure it again, or correct them"
            )
        return found

    def to_json(self) -> bytes:
        """The JSON object that ``from_json`` reads."""
        return orjson.dumps(dataclasses.asdict(self), option=orjson.OPT_INDENT_2)


def _number(name: str, value: Any, *, zero_allowed: bool) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (0 < value <= sys.float_info.max or (value == 0 and zero_allowed)):
        return float(value)
    sign = ">=" if zero_allowed else ">"
    raise ValueError(f"cost model: {name} is {value!r}; expected a finite number {sign} 0")


def _points(values: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(
            f"cost model: attention_points is {values!r}; expected pairs [length, seconds]"
        )
    found: list[tuple[int, float]] = []
    before, least = 0, 0.0
    for number, pair in enumerate(values):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(
                f"cost model: entry {number} of attention_points is {pair!r}; expected a pair "
                "[length, seconds]"
            )
        length = pair[0]
        if type(length) is not int or not 1 <= length <= _LONGEST:
            raise ValueError(
                f"cost model: the length of entry {number} of attention_points is {length!r}; "
                f"expected an integer from 1 to {_LONGEST:,}"
            )
        seconds = _number(f"attention of {length:,} tokens", pair[1], zero_allowed=True)
        if length <= before:
            raise ValueError(
                f"cost model: attention_points has {length:,} tokens behind {before:,}; expected "
                "ascending lengths: sort the points, keep one of each length"
            )
        if seconds < least:
            raise ValueError(
                f"cost model: attention_points has {seconds!r} s for {length:,} tokens; expected "
                f"at least {least!r} s, which {before:,} tokens take: a longer sequence takes no "
                "less"
            )
        found.append((length, seconds))
        before, least = length, seconds
    return tuple(found)


def _sampled_lengths(max_length: int) -> Int64Array:
    if type(max_length) is not int or not 1 <= max_length <= _LONGEST:
        raise ValueError(
            f"max_length is {max_length!r}; expected an integer from 1 to {_LONGEST:,}"
        )
    lengths = list(range(1, min(max_length, _EVERY_LENGTH) + 1))
    while lengths[-1] < max_length:
        lengths.append(min(max_length, int(lengths[-1] * _SAMPLING_RATIO) + 1))
    return np.array(lengths, dtype=np.int64)


def _checked_costs(values: ArrayLike, lengths: Int64Array) -> Float64Array:
    try:
        found = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the cost function returned a {type(values).__name__} of which numpy makes no array; "
            f"expected numbers of shape {lengths.shape}: the seconds of each of the lengths that "
            "it is given"
        ) from error
    if found.shape != lengths.shape or found.dtype.kind not in "fiu":
        raise ValueError(
            f"the cost function returned {found.dtype} of shape {found.shape}; expected numbers of "
            f"shape {lengths.shape}: the seconds of each of the lengths that it is given"
        )
    seconds = found.astype(np.float64)
    for length, now, before in zip(lengths, seconds, [0.0, *seconds[:-1]], strict=True):
        if not 0 <= now < math.inf:
            wanted = "a finite number >= 0"
        elif now < before:
            wanted = f"at least {float(before)!r} s, which a shorter one takes"
        else:
            continue
        raise ValueError(
            f"the cost function returned {float(now)!r} s for {length:,} tokens; expected {wanted}"
        )
    return seconds


LLAMA_7B = CostModel.from_model_shape(
    num_layers=32, hidden_size=4096, num_parameters=7e9, kv_bytes_per_token=131_072
)
"""LLaMA-7B with 8 KV groups in BF16 at 400 TFLOP/s a rank; what ``plan`` assumes by default."""
