"""``--model`` takes a name or a YAML file of flags, and says what is wrong with either."""

from pathlib import Path

import pytest

from megatron_hdp.cli.shared.models import describe, find_model
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.planner.shape import MODELS

TINY = str(Path(__file__).parents[3] / "configs" / "tiny-cpu.yaml")

SHAPE = "num-layers: 2\nhidden-size: 64\nnum-attention-heads: 4\n"
MIXTRAL = """
# flags of a training run; only the shape counts
model:
  num-layers: 32
  hidden_size: 4096
  num-attention-heads: 32
  group-query-attention: true
  num-query-groups: 8
  ffn-hidden-size: 14336
  swiglu: true
  vocab-size: 32000
experts:
  num-experts: 8
  moe-router-topk: 2
  moe-router-load-balancing-type: aux_loss
pipeline-model-parallel-size: 4
lr: 1e-4
data-path: [a, b]
"""


def model_in(tmp_path, text):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return find_model(str(path))


def test_a_name():
    assert find_model("llama-70b") is MODELS["llama-70b"]


def test_a_file_with_other_flags_in_it(tmp_path):
    model = model_in(tmp_path, MIXTRAL)
    assert model.kv_bytes_per_token == 131_072
    assert model.active_parameters == pytest.approx(12.75e9, rel=0.01)
    assert model.shape.expert_parameters == 32 * 3 * 4096 * 14336 * 2


def test_a_configuration_of_this_repository():
    model = find_model(TINY)
    assert (model.shape.num_layers, model.shape.travelling_size) == (2, 2 * 64)
    layers = 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128)
    assert model.active_parameters == layers + 64 * 384  # the output layer, 257 bytes padded


def test_a_configuration_that_names_its_parts():
    model = find_model(TINY.replace("tiny-cpu", "bytescale/llama-70b-1m"))
    assert (model.shape.num_layers, model.shape.travelling_size) == (80, 80 * 2 * 8 * 128)
    assert model.active_parameters == pytest.approx(68.5e9 + 128_256 * 8192, rel=0.01)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("groups", [(), ("--group-query-attention",), ("--num-query-groups", "2")])
def test_what_is_left_out_is_filled_in_as_training_does(tmp_path, swiglu, groups):
    required = "--num-layers 2 --hidden-size 640 --num-attention-heads 4 --seq-length 8"
    argv = [*required.split(), "--train-iters=1", "--lr=1", "--data-path=x", *groups]
    trained = parse_arguments(argv + ["--swiglu"] * swiglu)
    text = "num-layers: 2\nhidden-size: 640\nnum-attention-heads: 4\n"
    text += "swiglu: true\n" * swiglu
    if groups:
        text += f"{groups[0].removeprefix('--')}: {groups[1] if len(groups) > 1 else 'true'}\n"
    model = model_in(tmp_path, text)
    kv_size = trained.num_query_groups * trained.kv_channels
    assert model.shape.travelling_size == 2 * 2 * kv_size
    attention = 640 * (2 * 640 + 2 * kv_size)
    mlp = (3 if swiglu else 2) * 640 * trained.ffn_hidden_size
    assert model.active_parameters == 2 * (attention + mlp) + model.shape.embedding


def test_an_experts_own_size_counts(tmp_path):
    shape = "num-layers: 1\nhidden-size: 64\nnum-attention-heads: 1\nffn-hidden-size: 100\n"
    dense = model_in(tmp_path, shape)
    assert model_in(tmp_path, shape + "moe-ffn-hidden-size: 7\n") == dense
    experts = model_in(tmp_path, shape + "num-experts: 4\nmoe-ffn-hidden-size: 7\n")
    assert experts.active_parameters - dense.active_parameters == 64 * (2 * (2 * 7 - 100) + 4)
    assert (dense.shape.expert_parameters, experts.shape.expert_parameters) == (0, 64 * 2 * 2 * 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num-layers: 2\nhidden-size: 64\n", r"model\.yaml: --num-attention-heads is missing"),
        ("num-layer: 2\n", r"unknown key 'num-layer': did you mean 'num-layers'"),
        ("num-layers: two\n", r"num-layers: found 'two', expected a value of type int"),
        ("num-layers: 0\nhidden-size: 64\nnum-attention-heads: 4\n", "--num-layers: found 0"),
        ("num-layers: 2\nhidden-size: 65\nnum-attention-heads: 4\n", "65 is not a multiple of"),
        (f"{SHAPE}num-query-groups: 3\n", "--num-attention-heads 4 is not a multiple of --num-que"),
        ("- 1\n", "found a list, expected keys and values"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        model_in(tmp_path, text)


def test_neither_name_nor_file():
    with pytest.raises(ValueError, match=r"--model: .*'lama'.*nearest.*path of a .yaml file"):
        find_model("lama")
    with pytest.raises(ValueError, match=r"--model absent\.yaml: no such file; expected one of"):
        find_model("absent.yaml")


def test_description():
    assert describe("llama-7b", MODELS["llama-7b"]) == (
        "llama-7b  (7B parameters a token, 131,072 B of K and V a token)"
    )
    assert "98.3K parameters" in describe("tiny", find_model(TINY))
