"""FLOP and memory of encoders by their shapes: what PyTorch counts and keeps."""

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.megatron.step.test_offload import LiveMemory

pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")
from tests.support.vision_models import MODELS, drawn_patches

WIDE = {
    **{"hidden_size": 64, "intermediate_size": 160},
    **{"d_model": 64, "encoder_ffn_dim": 160, "encoder_layers": 6, "num_hidden_layers": 5},
}
FAMILIES = [name for name in MODELS if name != "qwen3-vl-moe"]  # its encoder is qwen3-vl's


def encoder_and_items(name, dtype):
    """Wider than other tests' are, so that statistics of norms count little; equal items."""
    _, kind, config = MODELS[name]
    part = "audio_config" if name == "qwen2-audio" else "vision_config"
    settings = config[part] | {key: one for key, one in WIDE.items() if key in config[part]}
    torch.manual_seed(0)
    encoder = kind(config | {part: settings}).to(dtype)
    for weight in encoder.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    grid = 400 if name == "qwen2-audio" else (1, 6, 6) if "llava" in name else (1, 12, 24)
    return encoder, drawn_patches(encoder, [grid] * 4)


@pytest.mark.parametrize("trained", ["all", "projector", "none"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_pytorch_counts(name, trained):
    """Windows are full here. Whisper's first frames see fewer neighbours than a formula knows."""
    encoder, items = encoder_and_items(name, torch.float32)
    for weight_name, weight in encoder.named_parameters():
        in_projector = weight_name.startswith(encoder.projectors)
        weight.requires_grad_(trained == "all" or trained == "projector" and in_projector)
    patches = np.array([encoder.patches(one) for one in items])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        rows = encoder(items)
        if trained != "none":
            rows.sum().backward()
    expected = encoder.training_flop(patches)
    if trained == "projector" and not name.startswith("qwen3") and not name.startswith("qwen2."):
        given, _ = encoder.shape.projector_widths  # no norm asks for a gradient of what it is given
        between = encoder.shape.projector_hidden or encoder.shape.row_hidden
        expected -= 2 * given * between * patches.sum() / encoder.patches_per_row
    exact = 1e-9 if name != "qwen2-audio" else 0.06
    assert counter.get_total_flops() == pytest.approx(expected, rel=exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_backward_needs(name, dtype):
    """Statistics of norms, of softmax and rotations are left out: here they are a few percent."""
    encoder, items = encoder_and_items(name, dtype)
    patches = sum(encoder.patches(one) for one in items)
    weights = list(encoder.parameters())
    there = {one.untyped_storage().data_ptr() for one in weights}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        rows = encoder(items)
    found = encoder.shape.kept_bytes(rows.element_size())
    assert found == pytest.approx(sum(kept.values()) / patches, rel=0.07)

    gradient = torch.ones_like(rows)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    del rows
    with LiveMemory([*weights, *[one.grad for one in weights], gradient]) as live:
        encoder(items).backward(gradient)
    most = found + encoder.shape.working_bytes(gradient.element_size())
    assert most == pytest.approx(live.peak / patches, rel=0.06)


@pytest.mark.parametrize("change", [{"ffn": 1}, {"hidden": 1}, {"values": 1}, {"layers": 1}])
def test_a_wrong_shape_is_noticed(change):
    from dataclasses import replace

    encoder, items = encoder_and_items("qwen3-vl", torch.float32)
    shape, patches = encoder.shape, np.array([encoder.patches(one) for one in items])
    other = replace(shape, **{key: getattr(shape, key) + one for key, one in change.items()})
    assert other.training_flop(patches) != shape.training_flop(patches)
    assert other.kept_bytes(2) != shape.kept_bytes(2)
