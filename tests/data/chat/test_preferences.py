"""Rows of preferences, as others write them, become pairs of an answer that is trained alone."""

import re

import pytest

from megatron_hdp.data.chat import BadConversationError, Preferences
from megatron_hdp.data.tokenizers import build_tokenizer
from tests.data.chat import tiny_tokenizer
from tests.data.chat.test_conversations import NamedBytes
from tests.data.chat.written import WRITTEN

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")

EOD = NamedBytes().eod
ASK, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "2 + 2?"), ("assistant", "four"), ("assistant", "five"))
)
EARLIER = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
CONVERSATIONS = {
    "trl": {"prompt": [*EARLIER, ASK], "chosen": [GOOD], "rejected": [BAD]},
    "trl, implicit": {"chosen": [*EARLIER, ASK, GOOD], "rejected": [*EARLIER, ASK, BAD]},
    "prompt in text": {
        "prompt": "2 + 2?",
        "chosen": [*EARLIER, ASK, GOOD],
        "rejected": [*EARLIER, ASK, BAD],
    },
    "answers in text": {"prompt": [*EARLIER, ASK], "chosen": "four", "rejected": "five"},
    "nemo-rl": {
        "context": [*EARLIER, ASK],
        "completions": [{"rank": 1, "completion": [BAD]}, {"rank": 0, "completion": [GOOD]}],
        "task_name": "sums",
    },
    "ms-swift": {"messages": [*EARLIER, ASK, GOOD], "rejected_response": "five"},
    "ms-swift, messages": {
        "messages": [*EARLIER, ASK, GOOD],
        "rejected_messages": [*EARLIER, ASK, BAD],
    },
}


def preferences(kind="pairs", template="chatml", **more):
    return Preferences(kind, NamedBytes(), template, **more)


def texts(found):
    """(whether it is preferred, the text, the parts that are trained) of each side."""
    sides = []
    for one in found:
        raw = [bytes([i]) if i < 256 else b"<eod>" for i in one.ids]
        parts = [b"".join(raw[slice(*span)]).decode() for span in one.spans]
        sides.append((one.is_good, b"".join(raw).decode(), parts))
    return sides


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations(name):
    (good, chosen, of_chosen), (bad, rejected, of_rejected) = texts(
        preferences().render(CONVERSATIONS[name])
    )
    assert (good, bad) == (True, False)
    assert chosen.replace("four", "five") == rejected
    assert [one.strip() for one in of_chosen] == ["four<|im_end|>"], "nothing of the prompt"
    assert [one.strip() for one in of_rejected] == ["five<|im_end|>"]
    assert chosen.count("hello") == chosen.count("2 + 2?") == 1


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "one two", "chosen": " three", "rejected": " four"},
        {"chosen": "one two three", "rejected": "one two four"},
    ],
)
def test_texts_stand_as_they_are(row):
    found = texts(preferences(template=None).render(row))
    assert found == [
        (True, "one two three<eod>", [" three<eod>"]),
        (False, "one two four<eod>", [" four<eod>"]),
    ]


def test_texts_are_turns_where_a_template_is_given():
    row = {"prompt": "2 + 2?", "chosen": "four", "rejected": "five"}
    turns = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
    assert texts(preferences().render(row)) == texts(preferences().render(turns))
    assert preferences().fingerprint() != preferences(template=None).fingerprint()


@pytest.mark.parametrize(
    ("row", "is_good"),
    [
        ({"prompt": "2 + 2?", "completion": "four", "label": True}, True),
        ({"prompt": [ASK], "completion": [GOOD], "label": False}, False),
        ({"messages": [ASK, GOOD], "label": "true"}, True),
    ],
)
def test_labelled_answers(row, is_good):
    (found,) = texts(preferences("labelled").render(row))
    assert found[0] == is_good
    assert [one.strip() for one in found[2]] == ["four<|im_end|>"]


WHOLE = {"prompt": "2 + 2?", "chosen": "four", "rejected": "five"}
WRONG = {
    "no rejected side": (WHOLE | {"rejected": None}, "`chosen` without `rejected`"),
    "no chosen side": ({"prompt": "2", "rejected": "five"}, "`rejected` without `chosen`"),
    "equal": (WHOLE | {"rejected": "four"}, "`chosen` and `rejected` are equal"),
    "empty": (WHOLE | {"rejected": " "}, "`rejected` is empty"),
    "no turn": ({"prompt": [ASK], "chosen": [GOOD], "rejected": []}, "`rejected` is empty"),
    "equal, implicit": ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "`chosen` is empty"),
    "ends with the user": (
        {"prompt": [ASK, GOOD], "chosen": [ASK], "rejected": [BAD]},
        "`chosen`: no token of an assistant",
    ),
    "three": (
        {"context": [ASK], "completions": [{"rank": i, "completion": [BAD]} for i in range(3)]},
        r"3 `completions` of the ranks \[0, 1, 2\], expected two",
    ),
    "one rank": (
        {"context": [ASK], "completions": [{"rank": 0, "completion": [BAD]}] * 2},
        "expected two of different ranks",
    ),
    "messages alone": ({"messages": [ASK, GOOD]}, "`messages` without `rejected_response`"),
    "another row": ({"text": "2 + 2"}, "found the keys text, expected `chosen` and `rejected`"),
    "no label": ({"prompt": "2", "completion": "four"}, "found the keys prompt, completion"),
    "a score": ({"prompt": "2", "completion": "four", "label": 0.3}, "`label` is 0.3"),
    "no object": ([WHOLE], "the row is no object"),
    "half a character": (WHOLE | {"chosen": "\ud83d"}, "`chosen`: half a surrogate pair"),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_sentence_says_what_is_wrong(name):
    row, words = WRONG[name]
    kind = "labelled" if name in ("no label", "a score") else "pairs"
    for template in (None, "chatml"):
        with pytest.raises(BadConversationError, match=words):
            preferences(kind, template).render(row)


@pytest.mark.parametrize(
    "more", [{"train_on": "all"}, {"template": "megatron:identity"}], ids=["all", "megatron"]
)
def test_prompts_are_never_trained(more):
    with pytest.raises(ValueError, match=re.escape("would train prompts")):
        preferences(**more)


@pytest.mark.parametrize("name", WRITTEN)
def test_other_templates(tmp_path, name):
    path = tmp_path / "x.jinja"
    path.write_text(WRITTEN[name].source)
    try:
        found = texts(preferences(template=str(path)).render(CONVERSATIONS["trl"]))
    except BadConversationError:
        pytest.skip("a template that refuses such conversations")
    assert all(word in part for word, (_, _, (part,)) in zip(("four", "five"), found, strict=True))


@pytest.mark.slow
def test_texts_are_tokenised_as_trl_does(tmp_path):
    options = pytest.importorskip("trl.import_utils")
    for name, value in vars(options).copy().items():
        if isinstance(value, tuple):  # (False, None) is true: TRL asks an older transformers
            setattr(options, name, value[0])
    trainer = pytest.importorskip("trl.trainer.dpo_trainer", exc_type=ImportError)
    prompts = pytest.importorskip("trl.data_utils")
    transformers = pytest.importorskip("transformers")
    mine = build_tokenizer(tiny_tokenizer.write(tmp_path / "hf"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    rows = [
        {"prompt": "User hello", "chosen": " hello Assistant", "rejected": "\n\n<|eot|> no"},
        {"chosen": "the System is up", "rejected": "the System is down"},
        {"chosen": "a user hello", "rejected": "a user nods"},
    ]
    for row in rows:
        given = row if "prompt" in row else prompts.extract_prompt(row)
        expected = trainer.DPOTrainer.tokenize_row(given, theirs, None, None, False)
        prompt = expected["prompt_input_ids"]
        sides = [prompt + expected[f"{side}_input_ids"] for side in ("chosen", "rejected")]
        found = Preferences("pairs", mine).render(row)
        assert [one.ids.tolist() for one in found] == sides
        assert [one.spans.tolist() for one in found] == [[[len(prompt), len(x)]] for x in sides]
