"""Megatron's flags of data in a stock checkout: without HDP its own, with HDP its figures."""

import importlib.util
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.data.chat import tiny_tokenizer
from tests.megatron.lm.runs import (
    CHECKOUT,
    HDP,
    MARKS,
    drive,
    planned,
    require_same_bits,
    scalars,
)
from tests.support.drawn import first_rows
from tests.support.gradients import write_corpus
from tests.support.sources import LENGTHS

ROWS = 12
STILL = ["--lr", "1e-30", "--min-lr", "0", "--weight-decay", "0"]
pytestmark = [*MARKS, pytest.mark.slow]


def why_no_rows():
    """Why stock Megatron cannot train on rows of ``--sft`` here; nothing where it can."""
    if importlib.util.find_spec("datasets") is None:
        return "stock Megatron reads the rows of --sft by another package: pip install datasets"
    script = Path(CHECKOUT or ".", "pretrain_gpt.py")
    counts = script.exists() and "update_seqlen_stats_from_cu_seqlens" in script.read_text()
    if counts and not torch.cuda.is_available():
        return "stock --sft of this release counts tokens on a GPU, whatever the model runs on"
    return ""


of_rows = pytest.mark.skipif(bool(why_no_rows()), reason=why_no_rows() or "it can")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The runs on tokens, made by one process that imports Megatron once."""
    folder = tmp_path_factory.mktemp("stock data")
    for seed, name in enumerate(LENGTHS):
        (folder / name).mkdir()
        write_corpus(folder / name, [length * 9 for length in LENGTHS[name]], seed)
    drive(folder, [*blends(folder), *sets(folder)])
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """The runs on conversations, likewise."""
    folder = tmp_path_factory.mktemp("conversations")
    drive(folder, rows(folder))
    return folder


def blends(folder):
    """The same weighted blend, by the script alone and by the plugin without its flag."""
    web, code = (str(folder / name / "corpus") for name in ("web", "code"))
    run = partial(planned, folder, ranks=1, steps=2, data=["--data-path", "0.7", web, "0.3", code])
    flags = ["--data-cache-path", str(folder / "blend cache"), "--split", "50,50,0"]
    return [
        run("blend stock", extra=flags, plugin=False, save="of blend stock"),
        run("blend off", extra=flags, save="of blend off"),
    ]


def sets(folder):
    """Several validation sets: how stock logs them, and under HDP."""
    corpora = {name: str(folder / name / "corpus") for name in LENGTHS}
    data = ["--train-data-path", corpora["web"], "--valid-data-path", *corpora.values()]
    data += ["--multiple-validation-sets", "--data-cache-path", str(folder / "set cache")]
    run = partial(planned, folder, steps=2, data=data)
    flags = [*HDP, "512", "--seq-length", "1024", "--max-position-embeddings", "1024"]
    flags += ["--metrics-path", str(folder / "sets.jsonl"), "--global-batch-size", "12"]
    flags += ["--eval-iters", "2", "--log-validation-ppl-to-tensorboard"]
    plan = [
        run("sets stock", 1, ["--full-validation"], plugin=False),
        run("sets", 2, flags),
    ]
    if has_names():
        plan += [run("named sets", 2, [*flags, "--validation-set-names", "a", "b", "c"])]
    return [without_split(one) for one in plan]


def has_names():
    """Whether the release names validation sets by anything but their numbers."""
    with open(f"{CHECKOUT}/megatron/training/training.py") as file:
        return "validation_set_names" in file.read()


def without_split(run):
    """The run without ``--split``, which does not go with data for each split."""
    at = run["arguments"].index("--split")
    del run["arguments"][at : at + 2]
    return run


def rows(folder):
    """Conversations: the same by the script alone and the plugin without its flag; and by HDP.

    One row a step, with weights that stay as they are, so that a row has one loss.
    """
    tiny_tokenizer.write(folder / "tokenizer")
    with open(folder / "chat.jsonl", "w") as file:
        for i in range(ROWS):
            question = {"role": "user", "content": f"{i} and {i * i}?"}
            answer = {"role": "assistant", "content": "hello " * (i + 1) + str(i)}
            more = [{"role": "user", "content": "go on"}, answer] if i % 3 == 0 else []
            print(json.dumps({"messages": [question, answer, *more]}), file=file)
    flags = ["--sft", "--sft-tokenizer-prompt-format", "nemotron-nano-v2", "--eval-iters", "0"]
    flags += ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    flags += ["--global-batch-size", "1", "--split", "100,0,0", *legacy_tokenizer()]
    data = ["--data-path", str(folder / "chat.jsonl")]
    run = partial(planned, folder, ranks=1, steps=ROWS, data=data)
    stock = partial(run, sft=True)
    saves = ["--save-interval", str(ROWS)]
    hdp = [*flags, *STILL, *HDP, "256", "--finetune"]
    hdp += ["--metrics-path", str(folder / "rows.jsonl"), *saves]
    return [
        stock("sft stock", extra=[*flags, *saves], plugin=False, save="of sft stock"),
        stock("sft off", extra=[*flags, *saves], save="of sft off"),
        stock("rows stock", extra=[*flags, *saves, *STILL], plugin=False, save="of rows"),
        run("rows", extra=hdp, load="of rows"),
    ]


def legacy_tokenizer():
    """Flags by which a release builds the tokenizer of ``--sft`` for its datasets."""
    path = Path(CHECKOUT, "megatron", "training", "tokenizer", "sft_tokenizer.py")
    return ["--legacy-tokenizer"] if path.exists() else []


def test_without_the_flag_a_blend_is_stock_bit_for_bit(folder):
    require_stock(folder, "blend", 2)
    assert scalars(folder, "blend off")["lm loss validation"]


@of_rows
def test_without_the_flag_conversations_are_stock_bit_for_bit(chats):
    require_stock(chats, "sft", ROWS)


def require_stock(folder, kind, steps):
    """The same weights and logs of the script alone and of the plugin without its flag."""
    require_same_bits(folder, f"of {kind} off", f"of {kind} stock", steps)
    of_stock, of_off = scalars(folder, f"{kind} stock"), scalars(folder, f"{kind} off")
    assert sorted(of_stock["lm loss"]) == list(range(1, steps + 1))
    for tag in ("lm loss", "grad-norm", "learning-rate"):
        assert of_stock[tag] == of_off[tag]
    assert len(set(of_stock["lm loss"].values())) == steps
    assert of_stock.get("lm loss validation") == of_off.get("lm loss validation")


@of_rows
def test_a_row_has_the_loss_that_stock_gives_it(chats):
    """Stock reads the rows one after the other, HDP in the order of its epoch."""
    stock = scalars(chats, "rows stock")["lm loss"]
    records = [json.loads(line) for line in (chats / "rows.jsonl").read_text().splitlines()]
    assert sorted(stock) == [one["step"] for one in records] == list(range(1, ROWS + 1))
    order = first_rows(ROWS, 7)
    assert sorted(order) == list(range(ROWS)) and list(order) != list(range(ROWS))
    for row, record in zip(order, records, strict=True):
        assert record["loss"] == pytest.approx(stock[row + 1], abs=1e-5), row
        others = [value for step, value in stock.items() if step != row + 1]
        assert min(abs(record["loss"] - value) for value in others) > 2e-5


WORDS = re.compile(
    r" validation-(\S+) loss at (.*?) \| lm loss value: (\S+) \| lm loss PPL: (\S+) "
)


def logged(folder, name, rank=0):
    """The losses of sets in a log: by when and set, as words."""
    found = WORDS.findall((folder / f"log {name}.{rank}").read_text())
    return {(when, label): (loss, perplexity) for label, when, loss, perplexity in found}


def test_each_validation_set_is_logged_as_stock_logs_it(folder):
    stock, ours = logged(folder, "sets stock"), logged(folder, "sets", rank=1)
    assert ("iteration 2", "2") in stock and stock.keys() == ours.keys()
    records = [json.loads(line) for line in (folder / "sets.jsonl").read_text().splitlines()]
    found, tags = records[1]["validation_sources"], scalars(folder, "sets")
    assert [Path(name).parent.name for name in found] == list(LENGTHS)
    for number, loss in enumerate(found.values()):
        value, perplexity = ours["iteration 2", str(number)]
        assert float(value) == pytest.approx(loss, rel=1e-6)
        assert float(perplexity) == pytest.approx(2.718281828459045**loss, rel=1e-5)
        tag = f"lm loss validation-{number}"
        assert tags[tag] == {2: pytest.approx(loss, rel=1e-6)}
        assert tags[f"{tag} vs samples"] == {24: tags[tag][2]}
        assert tags[f"{tag} ppl"] == {2: pytest.approx(float(perplexity), rel=1e-5)}
    of_stock = {tag for tag in scalars(folder, "sets stock") if "validation" in tag}
    assert of_stock <= set(tags)


@pytest.mark.skipif(not CHECKOUT or not has_names(), reason="names of sets: releases from 0.18 on")
def test_validation_sets_have_the_names_that_they_were_given(folder):
    assert ("iteration 2", "b") in logged(folder, "named sets", rank=1)
    assert "lm loss validation-c" in scalars(folder, "named sets")
