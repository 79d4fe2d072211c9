"""Tiny models with multi-latent attention, and Megatron's own pass of one sequence to compare with.

Megatron's local attention takes no heads of two sizes, so the reference's core attention stands
here: by definition, over one whole sequence.
"""

import math
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

from megatron_hdp.megatron.model import building
from tests.support.gradients import errors_of

MLA = {
    "multi_latent_attention": True,
    "group_query_attention": False,
    "num_query_groups": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
    "qk_layernorm": True,
    "rope_type": "yarn",
    "rotary_scaling_factor": 8.0,
    "yarn_original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


class PlainCoreAttention(torch.nn.Module):
    """Causal attention of one sequence ``[s, 1, heads, d]``, with what Megatron gives its own."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale,
        k_channels=None,
        v_channels=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, **_):
        """See the class; returns ``[s, 1, heads * v]``."""
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


@contextmanager
def plain_stock_attention():
    """Within it, Megatron's own latent attention is built around `PlainCoreAttention`."""
    stock = building.get_gpt_layer_local_spec

    def with_plain_core(**kwargs):
        spec = stock(**kwargs)
        spec.submodules.self_attention.submodules.core_attention = PlainCoreAttention
        return spec

    with mock.patch.object(building, "get_gpt_layer_local_spec", with_plain_core):
        yield


def errors_of_kind(cases, *faults):
    """Body of a rank: see `errors_of`, whatever the attention of the cases' model."""
    latent = cases[0][0].multi_latent_attention
    with plain_stock_attention() if latent else nullcontext():
        return errors_of(cases, *faults)
