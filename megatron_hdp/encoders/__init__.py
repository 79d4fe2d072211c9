"""Encoders of pictures in plain torch, with the names and layouts of Hugging Face's weights."""

from megatron_hdp.encoders.base import PatchEncoder, Pixels
from megatron_hdp.encoders.llava import LlavaEncoder
from megatron_hdp.encoders.loading import load_encoder
from megatron_hdp.encoders.qwen2_5_vl import Qwen25VLEncoder
from megatron_hdp.encoders.qwen3_vl import Qwen3VLEncoder

__all__ = [
    "LlavaEncoder",
    "PatchEncoder",
    "Pixels",
    "Qwen3VLEncoder",
    "Qwen25VLEncoder",
    "load_encoder",
]
