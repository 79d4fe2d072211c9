"""A conversion holds one tensor at a time, and one that is killed goes on where it was."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_hdp.convert import to_hugging_face, to_megatron
from megatron_hdp.convert.families.table import pieces
from megatron_hdp.convert.files import hf_folder
from megatron_hdp.convert.files.safetensors_file import SafetensorsWriter, Stored, read_header
from tests.convert.models import save_model

_CONTEXT = multiprocessing.get_context("fork")
_WIDE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32768,
    "hidden_size": 256,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}
LARGEST = 32768 * 256 * 4
SLACK = 6 << 20  # of Python and its allocator, which the model's 170 MB would exceed by far


def in_a_process(function, *arguments):
    """Exit code of a process of its own that calls a function."""
    process = _CONTEXT.Process(target=function, args=arguments)
    process.start()
    process.join(570)
    return process.exitcode


def write_in_shards(folder, num_shards):
    """A model of zeros in several files, none of which is in memory as a whole."""
    folder.mkdir()
    (folder / "config.json").write_text(hf_folder.json.dumps(_WIDE))
    family = to_megatron.family_of(_WIDE, "")
    shapes = {e.name: e.shape for p in pieces(family, _WIDE, stacked=True) for e in p.entries}
    names, shard_of = sorted(shapes), {}
    for number in range(num_shards):
        path = folder / f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = names[number::num_shards]
        file = SafetensorsWriter(path, {name: (torch.float32, shapes[name]) for name in mine})
        for name in mine:
            file.write(name, torch.zeros(shapes[name]))
            shard_of[name] = path.name
        file.close()
    hf_folder.write_index(folder, shard_of, 0)
    return folder


def peak_growth(convert, *arguments):
    """By how many bytes a process that converts becomes larger, at most."""

    def measured(answer):
        def kb(name):
            return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])

        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = kb("VmRSS")
        convert(*arguments)
        answer.send((kb("VmHWM") - before) << 10)

    receives, sends = _CONTEXT.Pipe()
    assert in_a_process(measured, sends) == 0
    return receives.recv()


@pytest.mark.slow
def test_memory_is_that_of_the_largest_tensor(tmp_path):
    to_megatron.to_megatron(save_model("qwen2", tmp_path / "a"), tmp_path / "b", None, print)
    to_hugging_face.to_hugging_face(tmp_path / "b", tmp_path / "c", print)  # loads what it needs
    model = write_in_shards(tmp_path / "model", 3)
    there = (to_megatron.to_megatron, model, tmp_path / "checkpoint", None, print)
    back = (to_hugging_face.to_hugging_face, tmp_path / "checkpoint", tmp_path / "back", print)
    for convert in (there, back):
        grown = peak_growth(*convert)
        print(f"{convert[0].__name__}: {grown / LARGEST:.2f} times the largest tensor")
        assert grown <= 1.5 * LARGEST + SLACK
    assert read_header(tmp_path / "back" / "model.safetensors").keys() == {
        name for path in model.glob("*.safetensors") for name in read_header(path)
    }


def content(folder):
    """Every file of a folder, without what tells one writing from another."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".metadata", "checksums.json", "common.pt")
    }


def assert_equal(target, whole):
    """Of two conversions of one model; their folders' names stand in some files."""
    old, new = (f"/{folder.name}/".encode() for folder in (whole, target))
    expected = {name: text.replace(old, new) for name, text in content(whole).items()}
    assert content(target) == expected


def killed_at(owner, method, call, convert, *arguments):
    """Converts, and kills its process at a call of a method; returns whether it came that far."""

    def killed():
        calls, original = [], getattr(owner, method)

        def counted(*args, **named):
            calls.append(1)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **named)

        with mock.patch.object(owner, method, counted):
            convert(*arguments)

    return in_a_process(killed) == -signal.SIGKILL


def num_calls(owner, method, convert, *arguments):
    original = getattr(owner, method)
    with mock.patch.object(owner, method, autospec=True, side_effect=original) as calls:
        convert(*arguments)
    return calls.call_count


@contextlib.contextmanager
def small_files():
    """Files of a few tensors each."""
    with (
        mock.patch.object(to_megatron, "FILE_BYTES", 20_000),
        mock.patch.object(to_hugging_face, "SHARD_BYTES", 20_000),
    ):
        yield


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_killed_one_goes_on(tmp_path, way, capsys):
    model = save_model("mixtral", tmp_path / "model")
    with small_files():
        there = (to_megatron.to_megatron, model)
        if way == "there":
            convert, where, rest = there, (Stored, "read"), (None, print)
        else:
            to_megatron.to_megatron(model, tmp_path / "checkpoint", None, print)
            convert = (to_hugging_face.to_hugging_face, tmp_path / "checkpoint")
            where, rest = (SafetensorsWriter, "write"), (print,)
        in_all = num_calls(*where, *convert, tmp_path / "whole", *rest)
        target = tmp_path / "target"
        for call in (1, in_all // 2, in_all // 3):  # of those that are left each time
            assert killed_at(*where, call, *convert, target, *rest)
            assert not target.exists() and target.with_name("target.partial").is_dir()
        assert killed_at(os, "rename", 1, *convert, target, *rest)  # all but the last step is done
        assert not target.exists()
        assert num_calls(*where, *convert, target, *rest) == 0
        assert "resuming with" in capsys.readouterr().out
    assert_equal(target, tmp_path / "whole")
    assert not target.with_name("target.partial").exists()


@pytest.mark.parametrize("owner, method", [(os, "rename"), (shutil, "rmtree"), (Path, "mkdir")])
def test_a_kill_at_a_seam_is_survived(tmp_path, owner, method):
    model, target = save_model("qwen2", tmp_path / "model"), tmp_path / "target"
    convert = (to_megatron.to_megatron, model, target, None, print)
    call = 1
    while killed_at(owner, method, call, *convert):
        if target.exists():
            shutil.rmtree(target)
        call += 1
    assert call > 1 and len(content(target)) > 5


def test_another_source_begins_anew(tmp_path, capsys):
    target = tmp_path / "target"
    with small_files():
        for name in ("qwen2", "qwen3"):
            model = save_model(name, tmp_path / name)
            assert killed_at(Stored, "read", 9, to_megatron.to_megatron, model, target, None, print)
        to_megatron.to_megatron(model, target, None, print)
        to_megatron.to_megatron(model, tmp_path / "whole", None, print)
    assert_equal(target, tmp_path / "whole")
