"""Low-rank adapters (LoRA, arXiv 2106.09685): two small matrices beside a frozen linear layer.

The layer gives ``W x + alpha / rank * B A x``. Its weight keeps its name, so checkpoints of the
base fit; ``lora_a`` [rank, in] and ``lora_b`` [out, rank] stand beside it. Where tensor-parallel
ranks share the weight, one of both is shared in the same way and the other is whole on each; what
they exchange for it is as narrow as the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.adapters import NAMES
from megatron_hdp.megatron.model.initialisation import (
    global_parameters,
    own_part,
    seed_drawing,
    whole_shape,
)
from megatron_hdp.megatron.model.moe import let_biases_be_added
from megatron_hdp.megatron.model.mtp import further_layers
from megatron_hdp.megatron.model.taking import derived
from megatron_hdp.runtime.gathering import summed_by_name
from megatron_hdp.runtime.health import fingerprint

_COLUMNS, _ROWS, _NOT = "columns", "rows", "not"
_SHARED = {  # how ranks share a layer's weight; TransformerEngine may not be installed
    "ColumnParallelLinear": _COLUMNS,
    "TEColumnParallelLinear": _COLUMNS,
    "TELayerNormColumnParallelLinear": _COLUMNS,
    "RowParallelLinear": _ROWS,
    "TERowParallelLinear": _ROWS,
    "TELinear": _NOT,
}


def add_adapters(
    model: GPTModel, *, rank: int, alpha: float | None, targets: Sequence[str], seed: int
) -> None:
    """Adds adapters to a stage of a GPT and freezes all else, before Megatron's DDP wraps it.

    Args:
        model: as Megatron or HDP has built it; any pipeline stage, or a virtual one.
        rank: rows of A and columns of B.
        alpha: outputs of adapters are scaled by ``alpha / rank``; None: the rank.
        targets: names of linear layers, as ``linear_qkv``, in every layer that has them.
        seed: A is drawn by it and by its name, the same in any layout; B is zero.

    Raises:
        ValueError: a target is a kind of layer that cannot have an adapter, or the model's experts
            have a bias that balances them, which would move.
    """
    config = model.config
    if config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate:
        raise ValueError(
            f"adapters: found moe_router_bias_update_rate {config.moe_router_bias_update_rate}, "
            "expected 0, because the experts' biases are not of the adapters and would move: add "
            "--moe-router-bias-update-rate 0"
        )
    for layer in (*model.decoder.layers, *further_layers(model)):
        let_biases_be_added(layer)  # which goes by the classes of its layers
    model.requires_grad_(False)
    scale = (rank if alpha is None else alpha) / rank
    for name, module in [*model.named_modules()]:
        if name.rpartition(".")[-1] in targets:
            _Adapted.adopt(module, name, rank, scale)
    _draw(model, seed)


def require_adapters(chunks: Iterable[Any], targets: Sequence[str]) -> None:
    """Refuses targets that name no linear layer of the model; every rank must call this.

    Args:
        chunks: this rank's, each a GPT with adapters in whatever wraps it.
        targets: as of `add_adapters`.

    Raises:
        ValueError: says which, and which names there are.
    """
    counts: dict[str, float] = {}
    for chunk in chunks:
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        for name, module in model.named_modules():
            last = name.rpartition(".")[-1]
            if _kind_of(module) and last.startswith("linear_"):
                counts[last] = counts.get(last, 0.0) + 1
    found = summed_by_name(counts, parallel.compute_device())
    for one in targets:
        if one not in found:
            raise ValueError(
                f"--lora-targets: found {one}, which no layer of this model has, expected some of "
                f"{' '.join(sorted(found))}: name those"
            )


def with_adapter(linear: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """The weight of a linear layer and what its adapter adds, where the layer is not called."""
    return weight + linear.lora_product() if isinstance(linear, _Adapted) else weight


def normed(x: torch.Tensor, linear: Any, config: TransformerConfig) -> torch.Tensor:
    """What a linear layer's weight takes: some of TransformerEngine's norm their input first."""
    gain = getattr(linear, "layer_norm_weight", None)
    if gain is None:
        return x
    gain = gain + 1 if config.layernorm_zero_centered_gamma else gain
    size, eps = x.shape[-1:], config.layernorm_epsilon
    if config.normalization == "RMSNorm":
        return functional.rms_norm(x, size, gain, eps)
    return functional.layer_norm(x, size, gain, linear.layer_norm_bias, eps)


class _Adapted(torch.nn.Module):
    """A linear layer of Megatron's with an adapter: what each such layer's class gets beside it."""

    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter
    lora_scale: float
    weight: torch.Tensor
    config: TransformerConfig
    tp_group: dist.ProcessGroup
    parallel_mode: str | None

    @classmethod
    def adopt(cls, linear: Any, name: str, rank: int, scale: float) -> None:
        """Gives a layer of Megatron's an adapter; its parameters stay."""
        kind, last = _kind_of(linear), name.rpartition(".")[-1]
        if kind is None:
            raise ValueError(
                f"adapters: found {name}, a {type(linear).__name__}, expected one of "
                f"{', '.join(_SHARED)}: leave {last} out of the targets, or with experts "
                "--moe-grouped-gemm"
            )
        found = type(linear)
        linear.__class__ = derived(found.__name__, (_Adapted, found))
        linear._take_over(kind, rank, scale, gated=last == "linear_fc1")

    def _take_over(self, kind: str, rank: int, scale: float, *, gated: bool) -> None:
        weight, config = self.weight, self.config
        self._kind, self.lora_scale = kind, scale
        self._gated = gated and config.gated_linear_unit
        out, into = weight.shape
        is_spread, num_ranks = parallel.is_spread_expert(weight), self._group().size()
        for name, shape, is_shared, dim in (
            ("lora_a", (rank, into), kind == _ROWS, 1),
            ("lora_b", (out, rank), kind == _COLUMNS, 0),
        ):
            parameter: Any = torch.nn.Parameter(
                torch.zeros(shape, dtype=config.params_dtype, device=weight.device)
            )
            parameter.allreduce = not is_spread
            # a whole expert of each rank's own counts on each, in the norm of gradients
            parameter.tensor_model_parallel = is_shared or (is_spread and num_ranks == 1)
            parameter.partition_dim = dim
            parameter.partition_stride = 2 if self._gated and name == "lora_b" else 1
            parameter.sequence_parallel = not is_shared and self._ranks_see_own_tokens()
            self.register_parameter(name, parameter)
        tensor_ranks = parallel_state.get_tensor_model_parallel_world_size()
        if is_spread and 1 < num_ranks < tensor_ranks:
            raise ValueError(
                f"adapters of experts: found --expert-tensor-parallel-size {num_ranks}, expected 1 "
                f"or {tensor_ranks}, as many as tensor-parallel ranks, because the norm of "
                "gradients would leave some out: give one of these"
            )

    def _group(self) -> dist.ProcessGroup:
        """The ranks that share the weight."""
        return getattr(self, "_tp_group", None) or self.tp_group

    def _exchanges(self) -> bool:
        """Whether the layer exchanges tokens or sums itself; else what is around it does."""
        if self._kind == _NOT:
            return False
        explicit = getattr(self, "explicit_expert_comm", None)  # of Megatron's own layers
        return self.parallel_mode is not None if explicit is None else not explicit

    def _ranks_see_own_tokens(self) -> bool:
        """Whether the whole one of both matrices sees this rank's run of the tokens alone.

        Megatron then sums its gradient over tensor-parallel ranks.
        """
        exchanges = self._exchanges() and self._group().size() > 1
        return bool(self.config.sequence_parallel) and (exchanges or self._kind == _NOT)

    def _summed(self, whole: torch.Tensor) -> torch.Tensor:
        """A whole matrix whose gradient is summed over the ranks that share the other one."""
        return copy_to_tensor_model_parallel_region(whole, group=self._group())

    def lora_product(self) -> torch.Tensor:
        """What the adapter adds to a weight whose rows ranks share, as this rank holds it."""
        a: Any = self.lora_a
        if not a.sequence_parallel:
            a = self._summed(a)
        return self.lora_scale * self.lora_b @ a

    def forward(self, input_: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """See the class that it was; the adapter's output is added to the layer's."""
        output, bias = super().forward(input_, *rest, **named)
        return output + self._adapter_output(input_), bias

    def _adapter_output(self, x: torch.Tensor) -> torch.Tensor:
        x = normed(x, self, self.config)
        a, b, group = self.lora_a, self.lora_b, self._group()
        by_tokens = self._ranks_see_own_tokens()
        if self._kind == _NOT:
            return functional.linear(self.lora_scale * functional.linear(x, a), b)
        if not self._exchanges():
            a, b = (self._summed(a), b) if self._kind == _COLUMNS else (a, self._summed(b))
        low = self.lora_scale * functional.linear(x, a)
        if self._exchanges() and self._kind == _COLUMNS:
            spread = (
                gather_from_sequence_parallel_region
                if by_tokens
                else copy_to_tensor_model_parallel_region
            )
            low = spread(low, group=group)
        elif self._exchanges():
            add = (
                reduce_scatter_to_sequence_parallel_region
                if by_tokens
                else reduce_from_tensor_model_parallel_region
            )
            low = add(low, group=group)
        return functional.linear(low, b)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The layer's, and the adapter's in the same way."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        axes = {_COLUMNS: {"lora_b": 0}, _ROWS: {"lora_a": 1}, _NOT: {}}[self._kind]
        found |= make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in NAMES},
            prefix,
            axes,
            sharded_offsets,
            tp_group=self._group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self._gated:
            alone = metadata.get("singleton_local_shards", False)
            key = f"{prefix}lora_b"
            found[key] = apply_swiglu_sharded_factory(found[key], sharded_offsets, alone)
        return found


def _kind_of(module: torch.nn.Module) -> str | None:
    """How ranks share the weight of a linear layer; None of another module."""
    names = (cls.__name__ for cls in type(module).__mro__)
    return next((_SHARED[one] for one in names if one in _SHARED), None)


def _draw(model: GPTModel, seed: int) -> None:
    gpus = {one.device for one in model.parameters() if one.is_cuda}
    with torch.random.fork_rng(devices=gpus), torch.no_grad():
        for name, parameter in global_parameters(model):
            if name.endswith(".lora_a"):
                seed_drawing(fingerprint(seed, name) % 2**63, gpus)
                shape, device = whole_shape(parameter), parameter.device
                whole = torch.empty(shape, dtype=torch.float32, device=device)
                whole.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5)
                parameter.copy_(own_part(parameter, whole))
