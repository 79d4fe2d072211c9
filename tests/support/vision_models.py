"""Tiny random models of pictures or sound and text as transformers builds them, and their items."""

import numpy as np
import torch
import transformers

from megatron_hdp.encoders import LlavaEncoder, Qwen2AudioEncoder, Qwen3VLEncoder, Qwen25VLEncoder
from megatron_hdp.media import Patches, Sound

VOCABULARY, HIDDEN = 300, 32
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    **{"bos_token_id": None, "eos_token_id": None},
}
_QWEN = {
    **{"depth": 4, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2},
    **{"patch_size": 4, "out_hidden_size": HIDDEN},
}
_IDS = {
    **{"image_token_id": 290, "video_token_id": 291},
    **{"vision_start_token_id": 292, "vision_end_token_id": 293},
}
_QWEN_3 = {**_QWEN, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2, 1]}
_QWEN_3_TEXT = {
    **_TEXT,
    "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_TOWER = {
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "image_size": 24, "patch_size": 4},
}
MODELS = {
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        Qwen25VLEncoder,
        {
            "text_config": {
                **_TEXT,
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 1e4},
                    "mrope_section": [1, 1, 2],
                },
            },
            "vision_config": {**_QWEN, "window_size": 24, "fullatt_block_indexes": [1, 3]},
            **_IDS,
        },
    ),
    "qwen3-vl": (
        "Qwen3VL",
        Qwen3VLEncoder,
        {"text_config": _QWEN_3_TEXT, "vision_config": _QWEN_3, **_IDS},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        Qwen3VLEncoder,
        {"text_config": {**_QWEN_3_TEXT, **_EXPERTS}, "vision_config": _QWEN_3, **_IDS},
    ),
    "llava-clip": (
        "Llava",
        LlavaEncoder,
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_TOWER, "model_type": "clip_vision_model"},
            "image_token_index": 290,
        },
    ),
    "llava-siglip": (
        "Llava",
        LlavaEncoder,
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_TOWER, "model_type": "siglip_vision_model"},
            "image_token_index": 290,
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": [-1, 1],
        },
    ),
    "qwen2-audio": (
        "Qwen2Audio",
        Qwen2AudioEncoder,
        {
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "audio_config": {
                **{"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_ffn_dim": 40},
                **{"encoder_layers": 2, "encoder_attention_heads": 2, "num_mel_bins": 10},
                "max_source_positions": 200,
            },
            "audio_token_index": 290,
        },
    ),
}
"""Names of transformers' classes, ours, and the configuration."""


def hugging_face(name, seed=0):
    """A model whose every number is random, in evaluation."""
    kind, _, config = MODELS[name]
    built = getattr(transformers, f"{kind}Config")(**config)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(built)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data.normal_(0, 0.2, generator=generator)
    return model.eval()


def encoder_of(name, model=None, **settings):
    """Ours, with the weights of a model."""
    _, kind, _ = MODELS[name]
    encoder = kind((model or hugging_face(name)).config.to_dict(), **settings)
    if model is not None:
        encoder.load_state_dict(tensors_of(name, model))
    return encoder


def tensors_of(name, model):
    """The encoder's tensors of a model, or their gradients' names."""
    _, kind, _ = MODELS[name]
    found = {}
    for theirs, tensor in model.state_dict().items():
        for prefix, ours in kind.prefixes.items():
            if theirs.startswith(prefix):
                found[ours + theirs.removeprefix(prefix)] = tensor
                break
    return found


def drawn_patches(encoder, grids, seed=0):
    """Items of random bytes; those with several frames hold them. Of sound random windows."""
    generator = np.random.default_rng(seed)
    if isinstance(encoder, Qwen2AudioEncoder):
        drawn = generator.standard_normal((len(grids), 10, 400)).astype(np.float32)
        return [Sound(one, frames) for one, frames in zip(drawn, grids, strict=True)]
    resizing = encoder.shape.resizing
    found = []
    for grid in grids:
        frames = resizing.frames_per_patch if grid[0] > 1 else 1
        values = 3 * frames * resizing.patch**2
        data = generator.integers(0, 256, (np.prod(grid), values), dtype=np.uint8)
        found.append(Patches(data, tuple(grid)))
    return found


def grids_of(name):
    """Of several sizes; a video where the encoder takes one. Of sound numbers of frames."""
    if name == "qwen2-audio":
        return [7, 400, 50, 51, 52, 7]
    if name.startswith("llava"):
        return [(1, 6, 6)] * 3
    return [(1, 4, 6), (1, 10, 8), (3, 6, 14), (1, 2, 2), (1, 4, 6)]
