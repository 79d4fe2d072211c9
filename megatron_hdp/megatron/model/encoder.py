"""An encoder of pictures or sound as a part of the model: trained, clipped and saved with it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, make_sharded_tensor_for_checkpoint

from megatron_hdp.megatron.adapters import ENCODER


class WholeEncoder(MegatronModule):
    """Has the same weights on all ranks of the job, whatever part of the model they have.

    Each rank adds the gradients of its own items; the sum over all ranks is everybody's.
    """

    def __init__(self, config: TransformerConfig, model: torch.nn.Module) -> None:
        super().__init__(config)
        self.model = model
        if not parallel_state.is_pipeline_first_stage(ignore_virtual=True):
            for parameter in model.parameters():
                parameter.shared = True  # counted once in the gradient's norm

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Its weights, of which one rank of the job writes each."""
        replica = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
        return {
            prefix + name: make_sharded_tensor_for_checkpoint(
                tensor, prefix + name, prepend_offsets=sharded_offsets, replica_id=replica
            )
            for name, tensor in self.state_dict(keep_vars=True).items()
        }


def add_encoder(model: Any, encoder: torch.nn.Module) -> None:
    """Makes an encoder a part of a rank's first part of the model, before DDP wraps that."""
    setattr(model, ENCODER, WholeEncoder(model.config, encoder))


def encoder_of(chunk: Any) -> torch.nn.Module:
    """The encoder of a model's first chunk, in whatever wraps it."""
    model: torch.nn.Module = get_attr_wrapped_model(chunk, ENCODER).model
    return model


def add_up_gradients(encoder: torch.nn.Module) -> None:
    """Sums gradients of its weights, in Megatron's buffers, over the ranks of a model replica.

    Every rank must call this, before gradients are reduced over the replicas.
    """
    group = parallel_state.get_model_parallel_group()
    if torch.distributed.get_world_size(group) == 1:
        return
    for weight in encoder.parameters():
        if weight.requires_grad:
            torch.distributed.all_reduce(weight.main_grad, group=group)
