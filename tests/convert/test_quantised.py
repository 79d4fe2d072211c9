"""Weights of 8 and 4 bits become what their formats say, and then are a model like any other."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_hdp.convert.files import quantised
from megatron_hdp.convert.files.safetensors_file import read_header
from megatron_hdp.convert.to_hugging_face import to_hugging_face
from megatron_hdp.convert.to_megatron import to_megatron
from tests.convert.models import save_model
from tests.convert.test_families import same_tensors

BLOCK = 16


def quantise(folder, change, settings):
    """Replaces some tensors of a model; returns the folder that holds what they stand for."""
    expected = folder.with_name("expected")
    shutil.copytree(folder, expected)
    few, whole = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts, value = change(name, tensor)
        few |= parts
        whole[name] = value
    save_file(few, folder / "model.safetensors")
    save_file(whole, expected / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    (expected / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return expected


def in_fp8(name, tensor):
    if not name.endswith("proj.weight"):
        return {name: tensor.bfloat16()}, tensor.bfloat16()
    rows, columns = tensor.shape
    scales = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) + 0.5
    values = (10 * tensor).to(torch.float8_e4m3fn)
    whole = torch.empty_like(tensor, dtype=torch.bfloat16)
    for row in range(rows):
        for column in range(columns):
            factor = scales[row // BLOCK, column // BLOCK]
            whole[row, column] = values[row, column].float() * factor
    return {name: values, f"{name}_scale_inv": scales}, whole


def in_mxfp4(name, tensor):
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: tensor.bfloat16()}, tensor.bfloat16()
    experts, columns, rows = tensor.shape
    generator = torch.Generator().manual_seed(len(name))
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator)
    scales = torch.randint(120, 130, (experts, rows, columns // 32), generator=generator)
    blocks, scales = blocks.to(torch.uint8), scales.to(torch.uint8)
    whole = convert_moe_packed_tensors(blocks, scales)
    assert whole.shape == tensor.shape
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, whole.contiguous()


CASES = {
    "deepseek": (in_fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "gpt-oss-32": (in_mxfp4, {"quant_method": "mxfp4"}),
}


@pytest.mark.parametrize("name", CASES)
def test_they_become_bfloat16(tmp_path, name):
    change, settings = CASES[name]
    model = save_model(name, tmp_path / "model")
    expected = quantise(model, change, settings)
    to_megatron(model, tmp_path / "checkpoint", None, print)
    to_hugging_face(tmp_path / "checkpoint", tmp_path / "back", print)
    assert same_tensors(tmp_path / "back", expected)


@pytest.mark.parametrize(
    ("name", "kind", "other"),
    [("deepseek", "_scale_inv", torch.int32), ("gpt-oss-32", "_scales", torch.float32)],
)
def test_scales_of_another_type_are_refused(tmp_path, name, kind, other):
    change, settings = CASES[name]
    model = save_model(name, tmp_path / "model")
    quantise(model, change, settings)
    tensors = load_file(model / "model.safetensors")
    spoilt = next(key for key in tensors if key.endswith(kind))
    save_file({**tensors, spoilt: tensors[spoilt].to(other)}, model / "model.safetensors")
    with pytest.raises(ValueError, match=f"found {spoilt} of type [IF]32, expected"):
        to_megatron(model, tmp_path / "checkpoint", None, print)


def test_other_quantisations_are_refused(tmp_path):
    model = save_model("qwen3", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    for settings, expected in (
        ({"quant_method": "awq"}, "found weights quantised by awq, expected fp8, mxfp4 or none"),
        ({"quant_method": "fp8"}, "without model.layers.0.*scale_inv, expected its scales"),
    ):
        (model / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        if settings["quant_method"] == "fp8":
            tensors = load_file(model / "model.safetensors")
            tensors = {key: one.to(torch.float8_e4m3fn) for key, one in tensors.items()}
            save_file({"model.layers.0.a": tensors.popitem()[1]}, model / "model.safetensors")
        with pytest.raises(ValueError, match=expected):
            to_megatron(model, tmp_path / "checkpoint", None, print)
    stored = read_header(model / "model.safetensors")
    name = next(iter(stored))
    with pytest.raises(ValueError, match="expected one for each block of weight_block_size"):
        quantised.as_read(
            {"quantization_config": settings}, {**stored, f"{name}_scale_inv": stored[name]}
        )
