"""Ids from remembered words are those of the library, whatever the text and the tokenizer."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.tokenizers.remembered_words import (
    KNOWN_PATTERNS,
    RememberedWords,
    ascii_pattern,
    compiled_for_ascii,
    heeds_surroundings,
)
from tests.support.examples import some

tokenizers = pytest.importorskip("tokenizers", reason="pip install 'megatron-hdp[tokenizers]'")

PIECES = (
    *("a", "Zebra", "HELLOworld", "don't", "WE'RE", "'s", "'S", "1", "12345", "é", "naïve", "ß"),
    *(" ", "  ", "\n", "\r\n", "\n\n ", "\t", "\x0b", "\x1c", "\x1f", "\x7f", "\0", "\x85", "\xa0"),
    *("!", "...", "/", "//\n", "_", "-", "(", ")", "漢字", "\u0301", "e\u0301", "😀", "٣", "Ⅷ"),
    *("\u2028", "\u180e", "ǅ", "ʰ", "ſ", "\u212a", "def f(x):\n    return x ** 2\n", "\u200d"),
    *("<|end|>", "<|end", "|>", "<tool>", "  x" * 200),
)
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=30).map("".join)


def pre_tokenizer(pattern):
    if pattern is None:
        return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizers.pre_tokenizers.Sequence([split, bytes_])


def trained(pattern, normalizer=None):
    """A small BPE over the pieces, with two added tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizer(pattern)
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    draw = random.Random(1)
    texts = ["".join(draw.choices(PIECES, k=20)) for _ in range(100)]
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens(["<tool>"])
    return backend


def words_of(backend, pattern, added=("<|end|>", "<tool>")):
    model = backend.model
    return RememberedWords(pattern, lambda word: [one.id for one in model.tokenize(word)], added)


def ids_of(words, backend, text):
    ids = []
    for part in words.parts_of(text):
        asked = isinstance(part, str)
        ids += backend.encode(part, add_special_tokens=False).ids if asked else part
    return ids


NORMALISED = (KNOWN_PATTERNS[2], tokenizers.normalizers.NFC())
TRAINED = [(None,), *((pattern,) for pattern in KNOWN_PATTERNS), NORMALISED]


@pytest.fixture(scope="module", params=TRAINED, ids=["2", "2s", "4", "q", "4o", "normal form"])
def backend(request):
    return trained(*request.param), compiled_for_ascii(request.param[0] or KNOWN_PATTERNS[0])


@settings(max_examples=some(100))
@given(text=TEXTS)
def test_ids_are_those_of_the_library(backend, text):
    tokenizer, pattern = backend
    words = words_of(tokenizer, pattern)
    assert ids_of(words, tokenizer, text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_another_cut_would_be_noticed():
    backend = trained(None)
    wrong = re.compile(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+")
    text = "a  b\x1cc"
    right = backend.encode(text, add_special_tokens=False).ids
    assert ids_of(words_of(backend, compiled_for_ascii(KNOWN_PATTERNS[0])), backend, text) == right
    assert ids_of(words_of(backend, wrong), backend, text) != right


def test_most_text_is_remembered_and_other_text_is_cut_out():
    backend = trained(None)
    words = words_of(backend, compiled_for_ascii(KNOWN_PATTERNS[0]))
    plain = "one two three " * 200
    known, asked, rest = words.parts_of(plain + "é" + plain)
    assert isinstance(known, list) and isinstance(rest, list)
    assert isinstance(asked, str) and len(asked) < 300
    assert words.parts_of("a <tool> b") == ["a <tool> b"]


def test_few_words_and_no_long_ones_are_kept(monkeypatch):
    monkeypatch.setattr("megatron_hdp.data.tokenizers.remembered_words._MOST_WORDS", 5)
    asked = []
    words = RememberedWords(
        compiled_for_ascii(KNOWN_PATTERNS[0]), lambda word: asked.append(word) or [len(word)], ()
    )
    for text in ("a", "a", "x" * 65, "x" * 65, "b c d e f", "a"):
        words.parts_of(text)
    assert asked.count("a") == 2  # once more after all were forgotten
    assert asked.count("x" * 65) == 2


@pytest.mark.parametrize("pattern", [None, *KNOWN_PATTERNS])
def test_known_tokenizers_are_recognised(pattern):
    state = json.loads(pre_tokenizer(pattern).__getstate__())
    assert ascii_pattern(None, state) == compiled_for_ascii(pattern or KNOWN_PATTERNS[0])
    assert ascii_pattern({"type": "NFC"}, state) is not None
    assert ascii_pattern({"type": "Lowercase"}, state) is None


def level(**flags):
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, **flags}


def sequence(*parts):
    return {"type": "Sequence", "pretokenizers": list(parts)}


SPLIT = {"type": "Split", "pattern": {"Regex": KNOWN_PATTERNS[0]}, "invert": False}
OTHERS = [
    None,
    {"type": "Whitespace"},
    level(add_prefix_space=True),
    {"type": "ByteLevel"},
    level(use_regex=False),
    sequence(),
    sequence({"type": "Digits", "individual_digits": True}, level()),
    sequence(SPLIT | {"behavior": "Removed"}, level(use_regex=False)),
]


@pytest.mark.parametrize("state", OTHERS)
def test_others_are_left_to_the_library(state):
    assert ascii_pattern(None, state) is None


def test_tokens_that_look_around():
    token = tokenizers.AddedToken
    assert not heeds_surroundings(token("<|end|>"))
    assert heeds_surroundings(token("<|end|>", rstrip=True))
    assert heeds_surroundings(token("<|end|>", single_word=True))
    assert heeds_surroundings(token("a b"))
