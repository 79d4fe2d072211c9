"""What is wrong with a model, a checkpoint or a target is one sentence, and nothing is written."""

import errno
import json
import os
import shutil
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hdp.cli.main import main
from megatron_hdp.convert import to_megatron
from megatron_hdp.convert.files.safetensors_file import SafetensorsWriter, read_header
from tests.convert.models import save_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model in one file, the same in shards, and its checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    save_model("qwen3", folder / "model")
    save_model("qwen3", folder / "shards", max_shard_size="40KB")
    to_megatron.to_megatron(folder / "model", folder / "checkpoint", None, print)
    return folder


def changed(path, **values):
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder, number=1):
    return sorted(folder.glob("model-*.safetensors"))[number]


def cut(path):
    os.truncate(path, path.stat().st_size - 3)


Q_NORM = "model.layers.1.self_attn.q_norm.weight"
MODELS = {
    "another architecture": (
        "model",
        lambda folder: changed(folder / "config.json", architectures=["GPT2LMHeadModel"]),
        "found the architecture GPT2LMHeadModel, expected one of LlamaForCausalLM",
    ),
    "no such configuration": (
        "model",
        lambda folder: changed(folder / "config.json", rms_norm_eps="gone"),
        "found no 'rms_norm_eps', expected it",
    ),
    "another activation": (
        "model",
        lambda folder: changed(folder / "config.json", hidden_act="gelu"),
        "found hidden_act gelu in a model of Qwen3, expected silu",
    ),
    "unknown scaling of positions": (
        "model",
        lambda folder: changed(folder / "config.json", rope_parameters={"rope_type": "longrope"}),
        "rope_type: found longrope, expected",
    ),
    "no folder": ("model", shutil.rmtree, "config.json: found no such file, expected a model's"),
    "no JSON": (
        "model",
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json: not valid JSON",
    ),
    "a truncated file": (
        "model",
        lambda folder: cut(folder / "model.safetensors"),
        "bytes where its header speaks of",
    ),
    "an empty file": (
        "model",
        lambda folder: os.truncate(folder / "model.safetensors", 0),
        "expected a whole file of safetensors: fetch it again",
    ),
    "no weights": (
        "model",
        lambda folder: (folder / "model.safetensors").unlink(),
        "found no weights, expected model.safetensors or shards with",
    ),
    "a truncated shard": (
        "shards",
        lambda folder: cut(shard(folder)),
        "-of-00004.safetensors: found",
    ),
    "no index": (
        "shards",
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
        "without model.safetensors.index.json, expected it beside them",
    ),
    "a missing shard": (
        "shards",
        lambda folder: shard(folder).unlink(),
        "found 3 of 4 shards, expected those of model.safetensors.index.json: fetch model-00002",
    ),
    "shards of two revisions": (
        "shards",
        lambda folder: shutil.copyfile(shard(folder, 0), shard(folder)),
        "speaks of tensors that their shards do not hold: ",
    ),
    "a tensor too many": (
        "model",
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({"model.extra": torch.zeros(2)})
        ),
        "found 1 tensors that no model of Qwen3 with this config.json has, expected none: "
        "model.extra",
    ),
    "a missing tensor": (
        "model",
        lambda folder: change_tensors(folder, lambda tensors: tensors.pop(Q_NORM)),
        f"expected also {Q_NORM}: fetch all shards",
    ),
    "another shape": (
        "model",
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({Q_NORM: torch.zeros(13)})
        ),
        f"found {Q_NORM} of shape [13], expected [12] by config.json",
    ),
    "layers of two types": (
        "model",
        lambda folder: change_tensors(
            folder, lambda tensors: tensors.update({Q_NORM: tensors[Q_NORM].half()})
        ),
        "found layers in torch.float16 and in torch.float32, expected one type",
    ),
}


def refused(capsys, argv, expected):
    """Whether a command ends with one sentence."""
    assert main(["convert", *map(str, argv)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("megatron-hdp convert: error: ") and expected in error, error


@pytest.mark.parametrize("name", MODELS)
def test_models(saved, tmp_path, capsys, name):
    which, damage, expected = MODELS[name]
    shutil.copytree(saved / which, tmp_path / "model")
    damage(tmp_path / "model")
    target = tmp_path / "checkpoint"
    refused(capsys, ["--from-hf", tmp_path / "model", "--to", target], expected)
    assert not target.exists()


def test_targets(saved, tmp_path, capsys):
    model = saved / "model"
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    refused(capsys, ["--from-hf", model, "--to", saved], "found something there, expected nothing")
    refused(capsys, ["--from-hf", model, "--to", tmp_path / "file"], "found something there")
    taken = ["--to", tmp_path / "new", "--config", tmp_path / "file"]
    refused(capsys, ["--from-hf", model, *taken], "found a file there, expected none")
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "thesis.tex").write_text("mine")
    refused(capsys, ["--from-hf", model, "--to", tmp_path / "a"], "files that no conversion has")
    assert (tmp_path / "a.partial" / "thesis.tex").exists()
    assert main(["convert", "--from-hf", str(model), "--to", str(tmp_path / "empty")]) == 0


def test_flags_of_the_other_direction(saved, tmp_path, capsys):
    model, new = saved / "model", tmp_path / "new"
    refused(capsys, ["--from-hf", model, "--to-hf", new], "expected --from-hf with --to, or")
    refused(capsys, ["--from-hf", model, "--to", new, "--like", model], "--like: found it with")
    other = ["--from", saved / "checkpoint", "--to-hf", new, "--config", new]
    refused(capsys, other, "--config: found it with --from")


def test_a_full_disk(saved, tmp_path, capsys):
    full = OSError(errno.ENOSPC, "No space left on device")
    there = ["--from-hf", saved / "model", "--to", tmp_path / "there"]
    back = ["--from", saved / "checkpoint", "--to-hf", tmp_path / "back"]
    with mock.patch("torch.save", side_effect=full):
        refused(capsys, there, "bytes free, expected room for what is left: make room")
    with mock.patch("os.posix_fallocate", side_effect=full):
        refused(capsys, back, "bytes free, expected room for what is left: make room")
    assert main(["convert", *map(str, there)]) == 0 == main(["convert", *map(str, back)])


def test_two_at_once(saved, tmp_path, capsys):
    argv = ["--from-hf", saved / "model", "--to", tmp_path / "checkpoint"]
    carry = to_megatron.hf_folder.carry

    def meanwhile(*arguments):
        refused(capsys, argv, "locked by process")
        carry(*arguments)

    with mock.patch.object(to_megatron.hf_folder, "carry", meanwhile):
        assert main(["convert", *map(str, argv)]) == 0


CHECKPOINTS = {
    "nothing there": (shutil.rmtree, "found no checkpoint, expected the folder of --save"),
    "no configuration": (
        lambda folder: shutil.rmtree(folder / "hugging_face"),
        "expected the model's configuration: give --like",
    ),
    "a truncated file": (
        lambda folder: cut(folder / "release" / "__0_0.distcp"),
        "the checkpoint is damaged, take another one",
    ),
    "no list of tensors": (
        lambda folder: (folder / "release" / ".metadata").unlink(),
        ".metadata: found no such file",
    ),
    "another model": (
        lambda folder: changed(folder / "hugging_face" / "config.json", num_hidden_layers=3),
        "of another model: found --num-layers 2, expected 3 as in config.json: give --like",
    ),
    "another family": (
        lambda folder: changed(
            folder / "hugging_face" / "config.json", architectures=["LlamaForCausalLM"]
        ),
        "found tensors that the model in config.json does not have, expected none: "
        "decoder.layers.self_attention.k_layernorm.weight, decoder.layers.self_attention.q_",
    ),
    "more embeddings than there are": (
        lambda folder: changed(folder / "hugging_face" / "config.json", vocab_size=301),
        "of shape [300, 32], expected [301, 32] or more rows by config.json",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(saved, tmp_path, capsys, name):
    damage, expected = CHECKPOINTS[name]
    shutil.copytree(saved / "checkpoint", tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint")
    target = tmp_path / "model"
    refused(capsys, ["--from", tmp_path / "checkpoint", "--to-hf", target], expected)
    assert not target.exists()


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path):
    path = tmp_path / "a.safetensors"
    file = SafetensorsWriter(path, {"a": (torch.float32, (100,))})
    file.write("a", torch.ones(100))
    file.close()
    (stored,) = read_header(path).values()
    cut(path)
    with pytest.raises(ValueError, match="it became shorter meanwhile"):
        stored.read()
