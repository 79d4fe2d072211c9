"""What is wrong with a model, a checkpoint or a target is one sentence, and nothing is written."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hdp.cli.main import main
from megatron_hdp.convert import to_megatron
from megatron_hdp.convert.files.dist_writer import DistFile
from megatron_hdp.convert.files.safetensors_file import SafetensorsWriter, read_header
from tests.convert.models import save_model
from tests.megatron.checkpoint.small import flip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model in one file, the same in shards, and its checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    save_model("qwen3", folder / "model")
    save_model("qwen3", folder / "shards", max_shard_size="40KB")
    to_megatron.to_megatron(folder / "model", folder / "checkpoint", None, print)
    return folder


def changed(name="config.json", **values):
    """Damage: a file of JSON that says something else."""

    def change(folder):
        content = json.loads((folder / name).read_text()) | values
        kept = {key: value for key, value in content.items() if value != "gone"}
        (folder / name).write_text(json.dumps(kept))

    return change


def tensors(change):
    """Damage: other tensors."""

    def rewrite(folder):
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS)

    return rewrite


def without(name):
    """Damage: a file that is not there."""
    return lambda folder: (folder / name).unlink()


def cut(name):
    """Damage: a file without its last bytes."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 3)


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-{number:05d}-of-00004.safetensors" for number in (1, 2)]
Q_NORM = "model.layers.1.self_attn.q_norm.weight"
MODELS = {
    "another architecture": (
        changed(architectures=["GPT2LMHeadModel"]),
        "found the architecture GPT2LMHeadModel, expected one of LlamaForCausalLM",
    ),
    "no such configuration": (changed(rms_norm_eps="gone"), "found no 'rms_norm_eps', expected it"),
    "a size in quotes": (
        changed(hidden_size="64"),
        "config.json: found hidden_size '64', expected a number from 1 on",
    ),
    "a size with a fraction": (changed(num_hidden_layers=2.0), "found num_hidden_layers 2.0"),
    "no heads": (changed(num_attention_heads=0), "found num_attention_heads 0, expected"),
    "an epsilon that is no number": (
        changed(rms_norm_eps=float("nan")),
        "found rms_norm_eps nan, expected a finite number",
    ),
    "a negative epsilon": (changed(rms_norm_eps=-1), "--norm-epsilon: found -1, expected at least"),
    "a base of 0": (
        changed(rope_parameters={"rope_theta": 0, "rope_type": "default"}),
        "--rotary-base: found 0, expected at least 1",
    ),
    "a base in quotes": (
        changed(rope_parameters={"rope_theta": "1e6", "rope_type": "default"}),
        "found rope_theta '1e6', expected a finite number",
    ),
    "positions in words": (changed(rope_parameters="linear"), "found rope_parameters 'linear'"),
    "a switch in quotes": (
        changed(tie_word_embeddings="false"),
        "found tie_word_embeddings 'false', expected true or false",
    ),
    "another activation": (
        changed(hidden_act="gelu"),
        "found hidden_act gelu in a model of Qwen3, expected silu",
    ),
    "unknown scaling of positions": (
        changed(rope_parameters={"rope_type": "longrope"}),
        "rope_type: found longrope, expected",
    ),
    "no folder": (shutil.rmtree, "config.json: found no such file, expected a model's"),
    "no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json: not valid JSON",
    ),
    "a truncated file": (cut(WEIGHTS), "bytes where its header speaks of"),
    "an empty file": (
        lambda folder: os.truncate(folder / WEIGHTS, 0),
        "expected a whole file of safetensors: fetch it again",
    ),
    "no weights": (without(WEIGHTS), "found no weights, expected model.safetensors or shards with"),
    "a tensor too many": (
        tensors(lambda found: found.update({"model.extra": torch.zeros(2)})),
        "found 1 tensors that no model of Qwen3 with this config.json has, expected none: "
        "model.extra",
    ),
    "a missing tensor": (
        tensors(lambda found: found.pop(Q_NORM)),
        f"expected also {Q_NORM}: fetch all shards",
    ),
    "another shape": (
        tensors(lambda found: found.update({Q_NORM: torch.zeros(13)})),
        f"found {Q_NORM} of shape [13], expected [12] by config.json",
    ),
    "integers for weights": (
        tensors(lambda found: found.update({Q_NORM: found[Q_NORM].view(torch.int32)})),
        f"found {Q_NORM} of type I32, expected a weight of F64, F32, F16, BF16, or one that",
    ),
    "8 bits without scales": (
        tensors(lambda found: found.update({Q_NORM: found[Q_NORM].to(torch.float8_e4m3fn)})),
        f"found {Q_NORM} of type F8_E4M3, expected a weight of",
    ),
    "layers of two types": (
        tensors(lambda found: found.update({Q_NORM: found[Q_NORM].half()})),
        "found layers in torch.float16 and in torch.float32, expected one type",
    ),
}
OF_SHARDS = {
    "a truncated shard": (cut(SHARDS[1]), "-of-00004.safetensors: found"),
    "no index": (without(INDEX), f"without {INDEX}, expected it beside them"),
    "a missing shard": (
        without(SHARDS[1]),
        f"found 3 of 4 shards, expected those of {INDEX}: fetch model-00002",
    ),
    "a shard of another folder": (
        changed(INDEX, weight_map={Q_NORM: f"../{SHARDS[0]}"}),
        f"found the shard '../{SHARDS[0]}', expected the name of a file in its folder",
    ),
    "a shard by its whole path": (
        changed(INDEX, weight_map={Q_NORM: f"/tmp/{SHARDS[0]}"}),
        f"found the shard '/tmp/{SHARDS[0]}', expected the name of a file in its folder",
    ),
    "a shard of no name": (
        changed(INDEX, weight_map={Q_NORM: 7}),
        "found 0 of 1 shards, expected those of",
    ),
    "shards of two revisions": (
        lambda folder: shutil.copyfile(folder / SHARDS[0], folder / SHARDS[1]),
        "speaks of tensors that their shards do not hold: ",
    ),
}


def refused(capsys, argv, expected):
    """Whether a command ends with one sentence."""
    assert main(["convert", *map(str, argv)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("megatron-hdp convert: error: ") and expected in error, error


@pytest.mark.parametrize("name", [*MODELS, *OF_SHARDS])
def test_models(saved, tmp_path, capsys, name):
    damage, expected = (MODELS | OF_SHARDS)[name]
    shutil.copytree(saved / ("shards" if name in OF_SHARDS else "model"), tmp_path / "model")
    damage(tmp_path / "model")
    target = tmp_path / "checkpoint"
    refused(capsys, ["--from-hf", tmp_path / "model", "--to", target], expected)
    assert not target.exists()


def test_shards_may_be_links_as_in_the_cache_of_hugging_face(saved, tmp_path):
    blobs, model = shutil.copytree(saved / "shards", tmp_path / "blobs"), tmp_path / "model"
    model.mkdir()
    for path in blobs.iterdir():
        (model / path.name).symlink_to(Path("..", "blobs", path.name))
    assert to_megatron.Model.find(model).tensors


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
    back = ["--from", saved / "checkpoint", "--to-hf"]
    for place in (tmp_path / "file" / "below", tmp_path / ("long" * 80), Path("/proc/w")):
        for words in (["--from-hf", model, "--to", place], [*back, place]):
            refused(capsys, words, "expected a new name, of at most 200 bytes, in a folder where")


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has such a disk")
def test_a_disk_that_fills_while_torch_writes():
    file = DistFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        file.write(("a",), (1 << 16,), (0,), (1 << 16,), torch.zeros(1 << 16))
    with contextlib.suppress(OSError):
        file.close()


def test_two_at_once(saved, tmp_path, capsys):
    argv = ["--from-hf", saved / "model", "--to", tmp_path / "checkpoint"]
    carry = to_megatron.hf_folder.carry

    def meanwhile(*arguments):
        refused(capsys, argv, "locked by process")
        carry(*arguments)

    with mock.patch.object(to_megatron.hf_folder, "carry", meanwhile):
        assert main(["convert", *map(str, argv)]) == 0


CONFIG = "hugging_face/config.json"
CHECKPOINTS = {
    "nothing there": (shutil.rmtree, "found no checkpoint, expected the folder of --save"),
    "no configuration": (
        lambda folder: shutil.rmtree(folder / "hugging_face"),
        "expected the model's configuration: give --like",
    ),
    "a truncated file": (cut("release/__0_0.distcp"), "checkpoint is damaged, take another one"),
    "a flipped byte": (
        lambda folder: flip(folder / "release/__0_0.distcp", 3000),
        "__0_0.distcp: found the XXH3",
    ),
    "a flipped byte, without checksums": (
        lambda folder: (
            flip(folder / "release/__0_0.distcp", 3000),
            (folder / "release/checksums.json").unlink(),
        ),
        "__0_0.distcp: found another CRC-32 of",
    ),
    "a flipped byte of the list": (
        lambda folder: flip(folder / "release/.metadata", 300),
        ".metadata: found the XXH3",
    ),
    "no list of tensors": (without("release/.metadata"), ".metadata: found no such file"),
    "another model": (
        changed(CONFIG, num_hidden_layers=3),
        "of another model: found --num-layers 2, expected 3 as in config.json: give --like",
    ),
    "a size in quotes": (
        changed("hugging_face/config.json", vocab_size="300"),
        "hugging_face/config.json: found vocab_size '300', expected a number from 1 on",
    ),
    "another family": (
        changed(CONFIG, architectures=["LlamaForCausalLM"]),
        "found tensors that the model in config.json does not have, expected none: "
        "decoder.layers.self_attention.k_layernorm.weight, decoder.layers.self_attention.q_",
    ),
    "more embeddings than there are": (
        changed(CONFIG, vocab_size=301),
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
    cut("a.safetensors")(tmp_path)
    with pytest.raises(ValueError, match="it became shorter meanwhile"):
        stored.read()
