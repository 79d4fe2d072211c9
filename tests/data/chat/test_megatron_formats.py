"""Megatron-LM's formats: the same ids and trained tokens as its ``--sft``, release by release."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.data.chat import BadConversationError, Conversations
from megatron_hdp.data.tokenizers import ByteTokenizer, build_tokenizer
from tests.data.chat import tiny_tokenizer
from tests.data.chat.test_conversations import said
from tests.data.chat.tiny_tokenizer import text_of
from tests.data.chat.written import LLAMA

pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
FORMATS = ["nemotron-nano-v2", "nemotron-h-aligned", "identity", "default"]
SYSTEM, USER, ANSWER = said("system", "be\n"), said("user", " hi é "), said("assistant", " hello")
UNDATED = LLAMA.replace("strftime_now('%d %b %Y')", "'a day'")
ROWS = [
    [SYSTEM, USER, ANSWER],
    [USER, ANSWER, said("user", "more"), said("assistant", "x\n\n"), said("user", "last")],
    [SYSTEM, USER, ANSWER, SYSTEM, USER, ANSWER, said("system", "x"), USER, said("assistant", "y")],
    [said("system", "a /no_think"), said("user", "/think b/think"), said("assistant", "/think c")],
    [SYSTEM, USER, said("assistant", "unknown <unk> token")],
    [USER, said("assistant", "it ends</s>"), USER, said("assistant", "ends</s>")],
    [said("user", "a\n"), said("assistant", "\nb")],
]


@pytest.fixture
def folders(tmp_path):
    """A tokenizer that pads with a token of its own, and one that pads with its end."""
    return [
        tiny_tokenizer.write(tmp_path / str(pad), template=UNDATED, pad_token=pad)
        for pad in ("<unk>", None)
    ]


def ours(tokenizer, template, row):
    """Ids of a row's conversations one after the other, their mask, and where they begin."""
    try:
        found = Conversations(tokenizer, template).render({"messages": row})
    except BadConversationError:
        return None
    borders = np.cumsum([0, *(len(one.ids) for one in found)])
    mask = np.zeros(borders[-1], dtype=bool)
    for one, begin in zip(found, borders[:-1], strict=True):
        for start, stop in one.spans + begin:
            mask[start:stop] = True
    return np.concatenate([one.ids for one in found]).tolist(), mask.tolist(), borders[:-1]


def stock(folders, rows, path):
    """The release that lies on a path, and what it makes of rows, by folder and format."""
    given = {
        "folders": [folder.removeprefix("hf:") for folder in folders],
        "formats": FORMATS,
        "rows": rows,
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("stock_sft.py")],
        input=json.dumps(given),
        env=os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return ".".join(found["release"].split(".")[:2]), found["samples"]


def compare(folder, release, samples):
    """Every format that the release knows, row by row; returns how many rows both took."""
    tokenizer = build_tokenizer(folder)
    taken = 0
    for name, of_format in samples.items():
        template = f"megatron:{name}@{release}"
        if of_format is None:
            with pytest.raises(ValueError, match="knows this format from 0.17 on"):
                Conversations(tokenizer, template)
            continue
        for number, sample in enumerate(of_format):
            found = ours(tokenizer, template, ROWS[number])
            assert (found is None) == (sample is None), (name, number)
            if found is None:
                continue
            ids, mask, begins = found
            assert sample["tokens"][: len(ids)] == ids, (name, number)
            theirs = np.roll(np.array(sample["loss_mask"], bool), 1)
            assert not theirs[len(ids) :].any()
            theirs[begins] = False  # in a row of several, one predicts the next one's first token
            assert theirs[: len(ids)].tolist() == mask, (name, number)
            taken += 1
    return taken


def compare_all(folders, path):
    release, samples = stock(folders, ROWS, path)
    for folder, of_folder in zip(folders, samples, strict=True):
        assert compare(folder, release, of_folder) >= 12


@pytest.mark.slow  # what formats write stands below
@pytest.mark.megatron_lm
@pytest.mark.skipif(not CHECKOUT, reason="set MEGATRON_LM_PATH to a Megatron-LM checkout")
def test_rows_become_what_a_checkout_makes_of_them(folders):
    compare_all(folders, CHECKOUT)


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="needs megatron-core 0.17 or newer, with Megatron's training code",
)
def test_rows_become_what_the_installed_megatron_makes_of_them(folders):
    compare_all(folders, os.environ.get("PYTHONPATH", ""))


def shown(tokenizer, template, row, **more):
    """Of each conversation: its text, and the texts of its spans."""
    found = Conversations(tokenizer, f"megatron:{template}", **more).render({"messages": row})
    return [
        (text_of(tokenizer, one.ids), [text_of(tokenizer, one.ids[a:b]) for a, b in one.spans])
        for one in found
    ]


SHOWN = "<SPECIAL_10>System\nbe\n<SPECIAL_11>User\nhi é\n<SPECIAL_11>Assistant\nhello\n"
CASES = [
    ("nemotron-nano-v2@0.17", SHOWN + "<SPECIAL_12>\n", "hello\n<SPECIAL_12>\n"),
    ("nemotron-h-aligned", SHOWN + "</s>", "hello\n</s>"),
    ("identity", "be\n hi é  hello</s>", "e\n hi é  hello</s>"),
    ("identity@0.17.1", "be\n hi é  hello", " hello"),
    ("identity@0.18", "be\n hi é  hello", "e\n hi é  hello"),
]


@pytest.mark.parametrize(("template", "text", "span"), CASES)
def test_what_formats_write(tmp_path, template, text, span):
    tokenizer = build_tokenizer(tiny_tokenizer.write(tmp_path / "hf"))
    assert shown(tokenizer, template, ROWS[0]) == [(text, [span])]
    (without,) = shown(tokenizer, template, ROWS[0], append_eod=False)
    assert without[0] == text.removesuffix("</s>")


def test_a_row_of_several_becomes_several(tmp_path):
    tokenizer = build_tokenizer(tiny_tokenizer.write(tmp_path / "hf"))
    one = shown(tokenizer, "nemotron-h-aligned", ROWS[0])
    assert shown(tokenizer, "nemotron-h-aligned", ROWS[0] + ROWS[0]) == one + one


def test_a_planted_wrong_mask_is_found(folders):
    """A stock that masks one token more, or writes another id."""
    ids, mask, _ = ours(build_tokenizer(folders[0]), "megatron:nemotron-nano-v2@0.16", ROWS[0])

    def compared(ids, mask):
        sample = {"tokens": ids + [0] * 5, "loss_mask": [*mask[1:], *[0] * 6]}
        return compare(folders[0], "0.16", {"nemotron-nano-v2": [sample], "identity": None})

    assert compared(ids, mask) == 1
    with pytest.raises(AssertionError):
        compared(ids, [*mask[:-3], False, *mask[-2:]])
    with pytest.raises(AssertionError):
        compared([*ids[:-1], 7], mask)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([SYSTEM, ANSWER], "message 1: the assistant after system, expected a user"),
        ([ANSWER, USER], "the assistant begins"),
        ([USER, said("assistant", "")], "an empty assistant turn"),
        ([SYSTEM, USER], "no assistant turn to train on"),
    ],
)
def test_what_is_refused(tmp_path, row, reason):
    tokenizer = build_tokenizer(tiny_tokenizer.write(tmp_path / "hf"))
    with pytest.raises(BadConversationError, match=reason):
        Conversations(tokenizer, "megatron:nemotron-nano-v2@0.17").render({"messages": row})


@pytest.mark.parametrize(
    ("template", "more", "message"),
    [
        ("nemotron", {}, "megatron:nemotron: expected one of nemotron-nano-v2, .*@RELEASE"),
        ("identity@0.15", {}, "megatron:identity@0.15: expected one of"),
        ("identity@0.16.1", {}, "knows this format from 0.17 on"),
        ("default", {}, "the tokenizer has no chat template, expected one"),
        ("identity", {"train_on": "last"}, "this format decides itself what is trained"),
    ],
)
def test_formats_that_cannot_be_had(template, more, message):
    with pytest.raises(ValueError, match=message):
        Conversations(ByteTokenizer(), f"megatron:{template}", **more)
