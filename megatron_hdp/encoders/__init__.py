"""Encoders of pictures and sound in plain torch, with the weights of Hugging Face's files."""

from megatron_hdp.encoders.base import CutEncoder, ItemEncoder, PatchEncoder, Pixels
from megatron_hdp.encoders.llava import LlavaEncoder
from megatron_hdp.encoders.loading import described_encoder, load_encoder, save_encoder
from megatron_hdp.encoders.qwen2_5_vl import Qwen25VLEncoder
from megatron_hdp.encoders.qwen2_audio import Qwen2AudioEncoder
from megatron_hdp.encoders.qwen3_vl import Qwen3VLEncoder

__all__ = [
    "CutEncoder",
    "ItemEncoder",
    "LlavaEncoder",
    "PatchEncoder",
    "Pixels",
    "Qwen2AudioEncoder",
    "Qwen3VLEncoder",
    "Qwen25VLEncoder",
    "described_encoder",
    "load_encoder",
    "save_encoder",
]
