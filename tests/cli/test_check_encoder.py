"""``megatron-hdp check`` of a model of pictures: its encoder's memory, and time by sizes."""

import json
from dataclasses import fields, replace

import pytest

from megatron_hdp.cli.checking import as_text, check
from megatron_hdp.cli.main import main
from megatron_hdp.encoders import described_encoder
from megatron_hdp.media import ENCODERS
from tests.cli.test_check import CONFIGS, SOUND

VISION = {
    **{"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2},
    **{"out_hidden_size": 1024, "num_position_embeddings": 36, "deepstack_visual_indexes": [0]},
}
LAYER = 4 * 64**2 + 2 * 64 * 96 + (3 + 1 + 1) * 64 + 96 + 4 * 64
MERGER = 256**2 + 256 * 1024 + 256 + 1024
PARAMETERS = 1536 * 64 + 64 + 36 * 64 + 3 * LAYER + 2 * MERGER + 2 * (64 + 256)
KEPT = 3 * (9 * 64 + 2 * 96) + 1536 + 64 + 2 * 3 * 64  # numbers of a patch


@pytest.fixture
def model(tmp_path):
    """Writes a configuration with an encoder, and further lines."""

    def write(*lines):
        (tmp_path / "model").mkdir(exist_ok=True)
        config = {"model_type": "qwen3_vl", "vision_config": VISION}
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        path = tmp_path / "run.yaml"
        path.write_text("\n".join([SOUND, f"hdp-encoder: {tmp_path / 'model'}", *lines]))
        return path

    return write


def found_of(path, gpus=8, **others):
    return check([str(path)], num_gpus=gpus, gpu_memory_bytes=80e9, preset="github", **others)


def test_its_weights_are_on_every_gpu(model, tmp_path):
    (tmp_path / "text.yaml").write_text(SOUND)
    text, found = found_of(tmp_path / "text.yaml"), found_of(model())
    assert found.encoder.parameters == found.encoder.trained_parameters == PARAMETERS
    assert found.memory.weights - text.memory.weights == 2 * PARAMETERS
    assert found.memory.gradients - text.memory.gradients == 4 * PARAMETERS
    assert found.memory.optimizer - text.memory.optimizer == pytest.approx(12 * PARAMETERS / 8)
    assert found.memory.pack == pytest.approx(16_384 * 2 * (KEPT + 96 + 2 * 64))
    assert found.memory.total - text.memory.total == pytest.approx(7.5 * PARAMETERS)
    assert found.step == replace(text.step, planning_ms=found.step.planning_ms)
    assert "nor the memory of rows: give --items" in as_text(found)
    staged = found_of(model("pipeline-model-parallel-size: 2", "hdp-encoder-patches: 100"))
    others = found_of(model("pipeline-model-parallel-size: 2", "hdp-frozen: ['hdp_encoder.*']"))
    for one, other in zip(staged.stages, others.stages, strict=True):
        assert one.pack == pytest.approx(100 * 2 * (KEPT + 96 + 2 * 64))
        assert one.gradients - other.gradients == 4 * PARAMETERS
        assert (one.weights, other.pack) == (other.weights, 0)


def test_pictures_of_a_step(model, tmp_path):
    """Sixteen equal ones over eight GPUs: two calls' worth each, whatever the tensor ranks."""
    sizes = tmp_path / "sizes.txt"
    sizes.write_text("512 512\n" * 16)  # 1,024 patches, 256 rows
    path = model("tensor-model-parallel-size: 2", "sequence-parallel: true")
    text, found = found_of(path), found_of(path, items=str(sizes))
    encoder = found.encoder
    assert (encoder.num_items, encoder.num_rows, encoder.efficiency) == (16, 4096, 1.0)
    assert encoder.patches_per_pack == 2048
    shape = described_encoder(tmp_path / "model").shape
    linear, quadratic = shape.flop()
    assert encoder.step_s == pytest.approx(2 * 4 * (1024 * linear + 1024**2 * quadratic) / 400e12)
    assert found.step.step_s - text.step.step_s == pytest.approx(encoder.step_s)
    held, made = 4 * 256 / 2, 2 * 256  # four of sixteen for a pair of tensor ranks; two a GPU
    assert found.memory.rows == 2 * 1024 * 2 * (2 * held + 3 * made)
    flop = text.step.flops_per_s * text.step.step_s * 8 + encoder.flop
    assert found.step.flops_per_s == pytest.approx(flop / found.step.step_s / 8)
    assert "efficiency 1.000: 16 items, 4,096 rows" in as_text(found)


def test_stages_encode_in_their_gaps(model, tmp_path):
    """Few sequences on four stages, so that pipelines wait long; small pictures."""
    (tmp_path / "sizes.txt").write_text("256 256\n" * 200)
    lines = ["pipeline-model-parallel-size: 4"]
    how = {"items": str(tmp_path / "sizes.txt")}
    found = found_of(model(*lines), **how)
    encoder, outside = found.encoder, found_of(model(*lines, "hdp-media-waves: 1"), **how).encoder
    assert encoder.outside_s == outside.step_s and outside.outside_s is None
    assert 0 <= encoder.step_s < 0.7 * encoder.outside_s
    text = found_of(model(*lines))
    assert found.step.step_s == pytest.approx(text.step.step_s + encoder.step_s)
    assert "of it, in gaps of the pipeline; " in as_text(found)
    assert "gaps" not in as_text(found_of(model(*lines, "hdp-media-waves: 1"), **how))


def test_rows_that_do_not_fit(model, tmp_path):
    """A limit is named that fits; then the others are parked in host memory."""
    sizes = tmp_path / "sizes.txt"
    sizes.write_text("512 512\n" * 400_000)
    given, memory = {"items": str(sizes)}, {"host_memory_bytes": 4e12}
    assert found_of(model()).is_sound
    (refusal,) = found_of(model(), **given).refusals
    fitting = int(refusal.split("--hdp-encoder-rows ")[1].split(" fits")[0].replace(",", ""))
    found = found_of(model(f"hdp-encoder-rows: {fitting}"), **given, **memory)
    assert found.is_sound
    assert found.memory.rows == 2 * 1024 * 2 * 3 * fitting
    assert found.parked_bytes == 2 * 1024 * 2 * 3 * 400_000 * 256 / 8
    assert "of a wave" in as_text(found) and "parked rows" in as_text(found)
    assert not found_of(model(f"hdp-encoder-rows: {fitting + 10_000}"), **given).is_sound
    memory["host_memory_bytes"] = 1e11
    (refusal,) = found_of(model(f"hdp-encoder-rows: {fitting}"), **given, **memory).refusals
    assert refusal.startswith("--hdp-encoder-rows")


def test_a_call_that_does_not_fit(model, tmp_path):
    found = found_of(model("hdp-encoder-patches: 40_000_000"))
    (refusal,) = found.refusals
    fitting = int(refusal.split("--hdp-encoder-patches ")[1].split(" fits")[0].replace(",", ""))
    assert found_of(model(f"hdp-encoder-patches: {fitting}")).is_sound
    assert not found_of(model(f"hdp-encoder-patches: {fitting + 100}")).is_sound


def test_refusals(model, tmp_path, capsys):
    assert "no weight whose name" in found_of(model("hdp-frozen: ['hdp_encoders.*']")).refusals[0]
    everything = "hdp-frozen: ['hdp_encoder.*', 'decoder.*', 'embedding.*']"
    assert "every weight frozen" in found_of(model(everything)).refusals[0]
    assert found_of(model("hdp-frozen: ['decoder.*', 'embedding.*']")).is_sound
    path = model()
    (tmp_path / "model" / "config.json").unlink()
    assert "found no such file" in found_of(path).refusals[0]
    (tmp_path / "text.yaml").write_text(SOUND)
    sizes = ["--items", "docs/example-sizes.txt"]
    assert main(["check", str(tmp_path / "text.yaml"), "--gpus", "8", *sizes]) != 0
    assert "--items has no effect without --hdp-encoder" in capsys.readouterr().err


SHAPES = {"qwen3-vl-8b": "qwen3-vl", "qwen2.5-vl-7b": "qwen2.5-vl", "llava-1.5-7b": "clip-l-336"}
MILLIONS = {"qwen3-vl-8b": 576.4, "qwen2.5-vl-7b": 676.6, "llava-1.5-7b": 324.5}


@pytest.mark.parametrize("name", SHAPES)
def test_shipped_encoders_are_the_published_ones(name):
    """Equal to the table of encoders, and as large as the models' files say."""
    encoder, known = described_encoder(CONFIGS / "encoders" / name), ENCODERS[SHAPES[name]]
    own = {"row_hidden"} if name == "qwen2.5-vl-7b" else set()
    if name == "llava-1.5-7b":
        own = {"layers", "resizing"}  # the last layer but one gives the rows
        assert (encoder.shape.layers, encoder.shape.resizing.square) == (23, 336)
    for one in (item.name for item in fields(known) if item.name not in own):
        assert getattr(encoder.shape, one) == getattr(known, one), one
    millions = sum(one.numel() for one in encoder.parameters()) / 1e6
    assert millions == pytest.approx(MILLIONS[name], abs=0.06)


@pytest.mark.parametrize(
    ("lines", "names"),
    [("64 64", "pictures"), ("64 64 6", "videos"), ("64 64\n64 64 6", "pictures, videos")],
)
def test_items_are_called_what_they_are(model, tmp_path, lines, names):
    (tmp_path / "sizes.txt").write_text(f"{lines}\n")
    found = found_of(model(), items=str(tmp_path / "sizes.txt"))
    assert f"\n  {names:<20}" in as_text(found)


def test_sounds_are_called_sounds(model, tmp_path):
    path = model()
    audio = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2}
    config = {"model_type": "qwen2_audio", "audio_config": audio | {"encoder_ffn_dim": 96}}
    config["text_config"] = {"hidden_size": 1024}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "sizes.txt").write_text("1 300\n")
    for items in (None, str(tmp_path / "sizes.txt")):
        assert f"\n  {'sounds':<20}" in as_text(found_of(path, items=items))
