"""The command as its page shows it, on a tiny Llama."""

import argparse
import contextlib
import json
import shutil

import pytest
import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import FileSystemReader

from megatron_hdp.cli.main import main
from megatron_hdp.convert.files.hf_folder import read_json
from megatron_hdp.megatron.checkpoint.folder import CheckpointFolder
from megatron_hdp.megatron.checkpoint.verification import verify
from megatron_hdp.megatron.options import parse_arguments
from tests.convert.models import save_model
from tests.convert.test_families import same_tensors
from tests.support.processes import run_python

THERE = "convert --from-hf Llama-3.1-8B --to weights --config llama.yaml"
BACK = "convert --from weights --to-hf Llama-3.1-8B-again"
TRAINING = ["--train-iters=1", "--lr=0"]


def test_as_documented(tmp_path):
    model = save_model("llama3.1", tmp_path / "Llama-3.1-8B", dtype=torch.bfloat16)
    (model / "tokenizer.json").write_text("{}")
    (model / "original.bin").write_text("not taken along")
    with contextlib.chdir(tmp_path):
        assert main(THERE.split()) == 0 == main(BACK.split())
        arguments = parse_arguments(["--config=llama.yaml", *TRAINING], needs_data=False)
    assert same_tensors(tmp_path / "Llama-3.1-8B-again", model)
    assert (tmp_path / "Llama-3.1-8B-again" / "tokenizer.json").exists()
    assert not (tmp_path / "Llama-3.1-8B-again" / "original.bin").exists()
    found = {
        name: getattr(arguments, name)
        for name in ("num_layers", "num_query_groups", "bf16", "use_rope_scaling", "seq_length")
    }
    expected = {"num_layers": 2, "num_query_groups": 2, "bf16": True, "use_rope_scaling": True}
    assert found == expected | {"seq_length": 16384}
    assert arguments.rope_scaling_factor == 32 and not arguments.add_bias_linear
    assert arguments.tokenizer_model == str((tmp_path / "weights" / "hugging_face").resolve())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("Llama-3.1-8B", "Llama-3.1-8B-again", "llama.yaml", "weights"),
    ]


@pytest.mark.slow
def test_it_shows_no_warning_that_users_cannot_act_on(tmp_path):
    save_model("llama3", tmp_path / "Llama-3.1-8B")
    for command in (THERE, BACK):
        words = "-m", "megatron_hdp.cli.main", *command.split()
        done = run_python(*words, cwd=tmp_path, PYTHONWARNINGS="")
        assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr


def converted(name, folder):
    """Saves a model and converts it to ``weights``; returns its folder."""
    model = save_model(name, folder / "model")
    assert main(["convert", "--from-hf", str(model), "--to", str(folder / "weights")]) == 0
    return model


def test_what_the_checkpoint_says_of_itself(tmp_path, capsys):
    converted("qwen2", tmp_path)
    release = CheckpointFolder(tmp_path / "weights").release()
    verdict = verify(release, 0)
    assert verdict.is_good and verdict.has_checksums and not verdict.added_files
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "weights")]) == 0
    words = capsys.readouterr().out
    assert "release             good" in words and "latest good one is release: --load" in words
    (release / "__0_0.distcp").rename(tmp_path / "part")
    assert main(["verify", str(tmp_path / "weights")]) == 1
    assert "none is good" in capsys.readouterr().out
    (tmp_path / "part").rename(release / "__0_0.distcp")
    common = dist_checkpointing.load_common_state_dict(str(release))
    assert isinstance(common["args"], argparse.Namespace)
    assert (common["iteration"], common["checkpoint_version"]) == (0, 3.0)
    assert (common["args"].padded_vocab_size, common["args"].add_qkv_bias) == (300, True)
    tensors = dist_checkpointing.load_tensors_metadata(str(release))
    assert tensors["decoder.layers.self_attention.linear_qkv.weight"].global_shape == (2, 64, 32)
    assert "output_layer.weight" not in tensors  # tied


def test_another_configuration_comes_back_with_like(tmp_path):
    model = converted("qwen2", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(
        json.dumps(read_json(model / "config.json") | {"rms_norm_eps": 1e-3, "dtype": "bfloat16"})
    )
    shutil.rmtree(tmp_path / "weights" / "hugging_face")
    back = ["convert", "--from", str(tmp_path / "weights"), "--to-hf", str(tmp_path / "back")]
    assert main([*back, "--like", str(other)]) == 0
    found = read_json(tmp_path / "back" / "config.json")
    # what the checkpoint was trained with counts
    assert (found["rms_norm_eps"], found["dtype"]) == (1e-6, "float32")


def test_keys_of_transformer_engine_lead_to_the_same_bytes(tmp_path):
    """Its specification has another norm before experts, and more states besides weights."""
    converted("mixtral", tmp_path)
    metadata = FileSystemReader(tmp_path / "weights" / "release").read_metadata()
    places = {}
    for index, place in metadata.storage_data.items():
        places.setdefault(index.fqn, []).append((place.relative_path, place.offset))
    local, engines = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    assert places[f"decoder.layers.{local}"] == places[f"decoder.layers.{engines}"]
    for state in (
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2",
        "decoder.layers.self_attention.core_attention._extra_state/shard_0_2",
        "decoder.layers.pre_mlp_layernorm._extra_state/shard_1_2",
        "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.3_2.4",
        "decoder.final_layernorm._extra_state/shard_0_1",
    ):
        assert len(places[state]) == 1, state
