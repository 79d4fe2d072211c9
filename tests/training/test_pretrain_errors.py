"""Bad input ends in a message that says what to do, before anything is written."""

import contextlib
import errno
import io
import os
import re
from unittest import mock

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_hdp import pretrain_gpt
from megatron_hdp.megatron.checkpoint.checkpoints import NotSavedError
from megatron_hdp.runtime.health import RankFailure
from tests.training import runs
from tests.training.runs import lines_of

LENGTHS = [20, 33, 1, 64, 7, 50, 12, 9]
SEQ_LENGTH = 64


def flags(folder, **changes):
    """A small run that works, as flags; `changes` by field, None to leave a flag out."""
    settings = {"seq_length": SEQ_LENGTH, "train_iters": 2, "global_batch_size": 4}
    settings |= {"hdp_tokens_per_rank": 64, "save": folder / "out" / "checkpoints"}
    settings |= {"metrics_path": folder / "out" / "metrics.jsonl"}
    settings |= {"tensorboard_dir": folder / "out" / "tensorboard"}
    return runs.flags(folder, **(settings | changes))


def write(folder, lengths, largest_token=256):
    """A corpus of counting tokens, the first of the last document aside; 0 makes it empty."""
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=np.uint16)
    for length in lengths:
        tokens = np.arange(length) % 256
        if length and length == lengths[-1]:
            tokens[0] = largest_token
        builder.add_document(tokens, [length] if length else [])
    builder.finalize(str(folder / "corpus.idx"))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, LENGTHS)
    return tmp_path


def entry(argv):
    """Body of a rank: the exit code, standard output and error of the training command."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("megatron_hdp.megatron.parallel.join_job"),  # the fixture joined it
        mock.patch("megatron_hdp.megatron.parallel.leave_job"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = pretrain_gpt.main(argv)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("error", "alone", "survives"),
    [
        (ValueError("--lr"), 2, 2),
        (PermissionError(errno.EACCES, "Permission denied", "corpus.bin"), 2, 2),
        (OSError(errno.ENOSPC, "No space left on device"), 2, 3),
        (NotSavedError("the checkpoint of iteration 3 could not be saved"), 2, 3),
        (RankFailure("rank 2 died"), 3, 3),
    ],
)
def test_what_a_job_that_survives_calls_a_loss(error, alone, survives):
    def told():
        try:
            raise error
        except type(error) as cause:
            raise ValueError("metrics.jsonl cannot be written") from cause

    assert pretrain_gpt.code_of(error, survives=False) == alone
    assert pretrain_gpt.code_of(error, survives=True) == survives
    if isinstance(error, OSError):
        with pytest.raises(ValueError, match="cannot be written") as caught:
            told()
        assert pretrain_gpt.code_of(caught.value, survives=True) == survives


def check_refused(code, error, folder, *expected):
    """A message without traceback, with everything expected in it, and nothing written."""
    assert code == 2, error
    assert re.match(r"pretrain_gpt: error( on rank \d+)?: ", error), error
    assert "Traceback" not in error, error
    for text in expected:
        assert text in error, f"{text!r} is not in: {error}"
    assert not (folder / "out").exists(), [str(path) for path in (folder / "out").rglob("*")]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"hdp_tokens_per_rank": 0}, ("--hdp-tokens-per-rank", "found 0", "at least 1")),
        ({"hdp_tokens_per_rank": "many"}, ("--hdp-tokens-per-rank", "'many'")),
        ({"hdp_tokens_per_rank": None}, ("needs --hdp-tokens-per-rank",)),
        ({"lr_warmup_iters": 2}, ("--lr-warmup-iters", "2", "--lr-decay-iters", "lower")),
        ({"lr_warmup_fraction": 1.0}, ("warm-up", "--lr-decay-iters", "lower")),
        ({"attention_dropout": 0.1}, ("--attention-dropout", "0.1", "pass --attention-dropout 0")),
        ({"hdp_global_batch_tokens": 100}, ("both", "exactly one")),
        ({"hdp_stratgy": "static"}, ("--hdp-stratgy", "did you mean '--hdp-strategy'?")),
        ({"num_layers": None}, ("--num-layers", "missing")),
        ({"seq_length": -1}, ("--seq-length", "found -1", "at least 1")),
    ],
)
def test_a_bad_flag_is_refused(folder, capsys, changes, expected):
    code = pretrain_gpt.main(flags(folder, **changes))
    check_refused(code, capsys.readouterr().err, folder, *expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("hdp-token-per-rank: 64\n", ("unknown key", "did you mean 'hdp-tokens-per-rank'?")),
        ("num_layers: two\n", ("num_layers", "'two'", "int")),
        ("num_layers: [1\n", ("not valid YAML",)),
        ("- 1\n", ("found a list", "expected keys and values")),
    ],
)
def test_a_bad_config_file_is_refused(folder, capsys, text, expected):
    path = folder / "run.yaml"
    path.write_text(text)
    code = pretrain_gpt.main(["--config", str(path), *flags(folder)])
    check_refused(code, capsys.readouterr().err, folder, "run.yaml", *expected)


def cut(name, keep):
    """What cuts a file of the corpus to a part of its bytes."""
    return lambda folder: os.truncate(folder / name, keep((folder / name).stat().st_size))


def file(name, text):
    """What writes a file."""
    return lambda folder: (folder / name).write_text(text)


def unknown_token(folder):
    """Metrics of an earlier run are there, too."""
    write(folder, LENGTHS, largest_token=257)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


def nothing(folder):
    """All is well with the files."""


COSTS = {"hdp_cost_model": "cost.json"}
METRICS = {"metrics_path": "metrics.jsonl"}
UNKNOWN = METRICS | {"global_batch_size": len(LENGTHS), "hdp_corrupt_limit": 0}
FLASH, TENSOR = {"hdp_attention": "flash-attn"}, {"tensor_model_parallel_size": 2}
TOO_LONG = ("65 tokens", "64", "--hdp-long-sequence truncate or split")
NO_GPU = ("--hdp-attention flash-attn", "device 'cpu'", "needs an NVIDIA GPU", "auto")
OTHER_TOKENIZER = ("ids from 0 to 256", "train with the tokenizer", "1 corrupt documents in a row")
BAD_DATA = {  # what is done to the folder, flags, words of the message
    "sequence-too-long": (lambda f: write(f, [*LENGTHS, SEQ_LENGTH + 1]), {}, *TOO_LONG),
    "bin-truncated": (cut("corpus.bin", lambda n: n - 2), {}, "corpus.bin", "truncated", "bytes"),
    "idx-truncated": (cut("corpus.idx", lambda n: n // 2), {}, "corpus.idx", "build the pair"),
    "bin-missing": (lambda f: (f / "corpus.bin").unlink(), {}, "corpus.bin", "preprocess"),
    "idx-missing": (lambda f: (f / "corpus.idx").unlink(), {}, "corpus.idx", "preprocess"),
    "only-empty-documents": (lambda f: write(f, [0, 0, 0]), {}, "none with a token", "--split"),
    "bad-split": (nothing, {"split": "0,0,0"}, "--split", "at least one above 0"),
    "no-training-documents": (nothing, {"split": "0,1,0"}, "no sequence", "--split"),
    "unknown-token": (unknown_token, UNKNOWN, *OTHER_TOKENIZER),
    "no-gpu": (nothing, FLASH, *NO_GPU),
    "too-few-ranks": (nothing, TENSOR, "1 ranks", "--nproc-per-node", "--tensor-model-parallel-s"),
    "not-metrics": (file("metrics.jsonl", "loss 3.5\n"), METRICS, "metrics.jsonl", "move it away"),
    "costs-missing": (nothing, COSTS, "cost.json", "No such file"),
} | {
    f"costs-{text}": (file("cost.json", text), COSTS, "cost.json", *expected)
    for text, *expected in (
        ("{", "not JSON"),
        ("[1, 2]", "found list", "expected an object"),
        ('{"a": 1e-15}', "'b'", "missing", "add it"),
        ('{"a": 1e-15, "bb": 1}', "unknown key 'bb'", "nearest is 'b'"),
        ('{"a": -1, "b": 1e-9, "kv_bytes_per_token": 64}', "a is -1", "expected"),
    )
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_refused(run_ranks, folder, case):
    spoil, changes, *expected = BAD_DATA[case]
    spoil(folder)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    is_path = COSTS | METRICS
    changes = {name: folder / to if name in is_path else to for name, to in changes.items()}
    ((code, _, error),) = run_ranks(1, entry, flags(folder, **changes))
    check_refused(code, error, folder, *expected)
    assert {path: path.read_bytes() for path in folder.iterdir()} == files


def no_place_to_save(folder, case):
    """A value of --save that is of no use, and what is said of it."""
    place = folder / "place"
    if case == "file":
        place.write_text("")
        return place, ("File exists", "--save needs a folder")
    if case == "too-long":
        return folder / "out" / ("x" * 300), ("File name too long", "--save needs a folder")
    place.mkdir()
    (place / "latest_checkpointed_iteration.txt").write_text("garbage")
    return place, ("latest_checkpointed_iteration.txt: found 'garbage', expected the number",)


@pytest.mark.parametrize("case", ["file", "too-long", "garbage-tracker"])
def test_a_place_that_cannot_take_checkpoints_is_refused_before_training(run_ranks, folder, case):
    save, expected = no_place_to_save(folder, case)
    answers = run_ranks(2, entry, flags(folder, save=save))
    for code, output, error in answers:
        check_refused(code, error, folder, *expected)
        assert "iteration" not in output.replace("iterations", "")


@pytest.mark.parametrize("num_ranks, strategy", [(1, "static"), (2, "naive"), (2, "dp-balance")])
def test_a_sequence_that_fits_on_no_number_of_ranks_is_refused(
    run_ranks, folder, num_ranks, strategy
):
    argv = flags(folder, hdp_tokens_per_rank=64 // num_ranks - 1, hdp_strategy=strategy)
    for code, _, error in run_ranks(num_ranks, entry, [*argv, "--global-batch-size", "1"]):
        check_refused(code, error, folder, "64", "--hdp-tokens-per-rank")


def test_the_least_capacity_and_the_largest_token_are_not_refused(run_ranks, folder):
    limits = {"hdp_tokens_per_rank": 32, "global_batch_size": len(LENGTHS)}
    argv = flags(folder, **limits, tensorboard_dir=None, save=None)
    assert [code for code, _, _ in run_ranks(2, entry, argv)] == [0, 0]


def test_empty_documents_are_skipped_and_counted(run_ranks, folder):
    write(folder, [0, *LENGTHS[:3], 0, 0, *LENGTHS[3:]])
    argv = flags(folder, tensorboard_dir=None, save=None)
    (code, output, error), _ = run_ranks(2, entry, argv)
    assert code == 0, error
    assert f"{len(LENGTHS)} sequences to train on (documents: 3 empty and skipped" in output
    assert output.count("attention: torch-sdpa-cpu; not transformer-engine: ") == 1
    assert [step["step"] for step in lines_of(folder / "out/metrics.jsonl")] == [1, 2]
