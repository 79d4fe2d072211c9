"""Multi-token prediction under HDP: Megatron's layers, told which token stands behind which.

Megatron rolls a micro-batch's tokens by one place for each depth. In a slice of a ring the token
behind a chunk's last one lies on another rank, and on the next chunk here. So the tokens are read
with the slice, and the layers take them from the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor

from megatron_hdp.megatron.model.taking import take_over_class
from megatron_hdp.megatron.options import TrainingArguments

_REPLACED = ("_get_embeddings", "_checkpointed_forward")


@dataclass
class FurtherTokens:
    """What a micro-batch predicts behind its labels, depth by depth, and at what weight."""

    labels: torch.Tensor
    """int64 ``[K + 1, t]``: each token's label, then the tokens 1, ..., K places behind it."""
    mask: torch.Tensor
    """bool ``[K, t]``: which of the latter carry loss."""
    weights: Sequence[float]
    """Of each depth's sum, where the sum of the labels' losses has 1."""
    label_loss: torch.Tensor | None = None
    """Sum of the labels' losses alone, once the model has run."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Sums of each depth's losses, times their weights, likewise."""

    def weights_of(self, depth: int, dtype: torch.dtype) -> torch.Tensor:
        """Each token's weight ``[t]`` at a depth, from 1."""
        return self.mask[depth - 1].to(dtype) * self.weights[depth - 1]

    def total(self, label_loss: torch.Tensor, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss that gradients come from; notes its parts."""
        self.label_loss = label_loss.detach()
        self.losses = [loss.detach() for loss in losses]
        return label_loss + torch.stack(list(losses)).sum()


def mtp_settings(arguments: TrainingArguments) -> dict[str, Any]:
    """What ``TransformerConfig`` needs to know of MTP; nothing without it."""
    if arguments.mtp_num_layers is None:
        return {}
    names = ("mtp_num_layers", "mtp_loss_scaling_factor")
    return {name: getattr(arguments, name) for name in names}


def mtp_spec(
    arguments: TrainingArguments, config: TransformerConfig, layer: ModuleSpec
) -> Any | None:
    """The specification of the MTP layers; None where this rank has none.

    `layer` is what each of them holds of attention and MLP, whose norms the others are like.
    """
    if arguments.mtp_num_layers is None:
        return None
    norm = layer.submodules.input_layernorm
    block = TransformerBlockSubmodules(layer_specs=[layer], layer_norm=norm)
    spec = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    if spec is None:
        return None
    for one in spec.layer_specs:
        one.submodules.enorm = one.submodules.hnorm = one.submodules.layer_norm = norm
        if arguments.hybrid_data_parallel:
            one.module = HdpMtpLayer
    return spec


def further_layers(model: Any) -> list[TransformerLayer]:
    """The transformer layers inside the MTP layers that this rank holds; a hybrid has stacks."""
    layers = model.mtp.layers if getattr(model, "mtp", None) is not None else ()
    inner = ("transformer_layer", "mtp_model_layer")  # the latter from 0.17 on
    found = [child for layer in layers for child in layer.named_children()]
    inside = [module for name, module in found if name in inner]
    return [layer for one in inside for layer in getattr(one, "layers", (one,))]


class HdpMtpLayer(MultiTokenPredictionLayer):
    """Megatron's layer of one depth, which takes its tokens from the micro-batch."""

    @classmethod
    def adopt_all(cls, model: GPTModel) -> None:
        """Makes the MTP layers that Megatron has built ones of this class."""
        if getattr(model, "mtp", None) is not None:
            for layer in model.mtp.layers:
                take_over_class(layer, MultiTokenPredictionLayer, cls, _REPLACED)

    def _get_embeddings(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        embedding: torch.nn.Module,
        hidden_states: torch.Tensor,
        packed_seq_params: Any = None,
        **of_release: Any,
    ) -> tuple[Any, ...]:
        """Megatron's, without rolling; from 0.18 on a padding mask comes and goes."""
        tokens = packed_seq_params.further.labels[self.layer_number - 1][None]
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        # without its hooks, which take each call for another micro-batch (`note_gradient`)
        embedded = embedding.forward(input_ids=tokens, position_ids=position_ids)
        return input_ids, position_ids, *of_release.values(), embedded, hidden_states

    def _checkpointed_forward(
        self, forward_func: Callable[..., torch.Tensor] | None = None, **named: Any
    ) -> torch.Tensor:
        """Megatron's, which would save the micro-batch as if it were a tensor.

        From 0.18 on what is run is not handed over.
        """
        forward_func = forward_func or self._proj_and_transformer_layer
        tensors = {name: value for name, value in named.items() if torch.is_tensor(value)}
        others = {name: value for name, value in named.items() if name not in tensors}

        def run(*values: torch.Tensor) -> torch.Tensor:
            return forward_func(**others, **dict(zip(tensors, values, strict=True)))

        found: torch.Tensor = tensor_parallel.checkpoint(
            run, self.config.distribute_saved_activations, *tensors.values()
        )
        return found
