"""What of a conversation is trained, under templates with the traits of well-known ones."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.chat import Conversations
from megatron_hdp.data.tokenizers import ByteTokenizer
from tests.data.chat.written import TOKENS, WRITTEN


class NamedBytes(ByteTokenizer):
    """Bytes, with texts for the tokens that templates name."""

    special_tokens = TOKENS


def conversations(tmp_path, name, **more):
    path = tmp_path / f"{name}.jinja"
    path.write_text(WRITTEN[name].source)
    return Conversations(NamedBytes(), str(path), **more)


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """Conversations by the name of their template."""
    folder = tmp_path_factory.mktemp("templates")
    return {name: conversations(folder, name) for name in WRITTEN}


def masked(tokens):
    """The text of the ids, and the mask byte by byte."""
    mask = np.zeros(len(tokens.ids), dtype=bool)
    for start, stop in tokens.spans:
        assert 0 < start < stop <= len(mask) and not mask[start:stop].any()
        mask[start:stop] = True
    return bytes(tokens.ids.tolist()), mask


def believed(name, messages, tools=None):
    found = WRITTEN[name].pieces(messages, tools)
    pieces = [(text.encode(), is_trained) for text, is_trained in found if text]
    mask = np.concatenate([np.full(len(raw), is_trained) for raw, is_trained in pieces])
    mask[0] = False
    return b"".join(raw for raw, _ in pieces), mask


def assert_as_believed(name, found, messages, tools=None):
    (tokens,) = found
    assert tokens.ids.dtype == tokens.spans.dtype == np.int64
    text, mask = masked(tokens)
    expected_text, expected_mask = believed(name, messages, tools)
    assert text == expected_text
    assert shown(text, mask) == shown(expected_text, expected_mask)


def shown(text, mask):
    """The trained pieces of a text and what lies between them."""
    runs = itertools.groupby(zip(text, mask, strict=True), key=lambda one: one[1])
    return [(bool(key), bytes(byte for byte, _ in run).decode()) for key, run in runs]


hard = [
    *("assistant", "<|im_start|>assistant\n", "<|im_end|>", "<|im_end|>\n<|im_start|>user\n"),
    *("<|eot|>", "</turn>\n", "<|end|>", "<|start|>assistant", "[INST]", " [/INST]", "</s>", "<A>"),
    *("qzx", "qzxqzx", "zero", "one", "a<think>\n", "{{ x }}", "{%", "\n", "  ", "Assistant:"),
    "é€😀",
]
texts = st.lists(st.one_of(st.sampled_from(hard), st.text("ab \n", max_size=4)), max_size=4).map(
    "".join
)
contents = texts.filter(str.strip)


def said(role, content, **more):
    return {"role": role, "content": content, **more}


@st.composite
def plain_talks(draw):
    """Optional system message, rounds of a user and the assistant."""
    messages = [said("system", draw(contents))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [said("user", draw(contents)), said("assistant", draw(contents))]
    return messages


@st.composite
def talks_with_tools(draw):
    """Rounds in which the assistant calls tools before it answers, with or without thoughts."""

    def thoughts():
        return {"reasoning_content": "thought " + draw(texts)} if draw(st.booleans()) else {}

    messages = [said("system", draw(contents))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(said("user", draw(contents)))
        for _ in range(draw(st.integers(0, 2))):
            function = {"name": "look", "arguments": {"at": draw(texts)}}
            calls = [{"type": "function", "function": function}]
            messages.append({"role": "assistant", "tool_calls": calls, **thoughts()})
            messages.append(said("tool", draw(contents)))
        messages.append(said("assistant", draw(contents), **thoughts()))
    return messages


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=40)
@given(messages=plain_talks())
def test_plain_talks(name, messages, every):
    assert_as_believed(name, every[name].render({"messages": messages}), messages)


@pytest.mark.parametrize("name", [name for name, one in WRITTEN.items() if one.takes_tools])
@settings(max_examples=40)
@given(messages=talks_with_tools())
def test_talks_with_tools(name, messages, every):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    if not WRITTEN[name].takes_calls:
        messages = [one for one in messages if "content" in one and one["role"] != "tool"]
    row = {"messages": messages, "tools": json.dumps(tools)}
    aliased = [{**one, "thinking": one.get("reasoning_content")} for one in messages]
    assert_as_believed(name, every[name].render(row), aliased, tools)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_last_turn_alone_and_all(name, tmp_path):
    messages = [said(*one) for one in zip(3 * ("user", "assistant"), "abcdef", strict=True)]
    (last,) = conversations(tmp_path, name, train_on="last").render({"messages": messages})
    (usual,) = conversations(tmp_path, name).render({"messages": messages})
    (whole,) = conversations(tmp_path, name, train_on="all").render({"messages": messages})
    assert len(usual.spans) == 3
    assert last.spans.tolist() == usual.spans[-1:].tolist()
    assert whole.spans.tolist() == [[1, len(whole.ids)]]
    assert whole.ids.tolist() == usual.ids.tolist() == last.ids.tolist()


@pytest.mark.parametrize("name", WRITTEN)
def test_equal_contents_are_told_apart(name, every):
    """Where a template moves the system message, the order of contents is not that of messages."""
    roles = ["system", *4 * ("user", "assistant")]
    messages = [said(role, "hi") for role in roles]
    assert_as_believed(name, every[name].render({"messages": messages}), messages)


def test_a_planted_wrong_mask_is_found(every):
    messages = [said("user", "hi"), said("assistant", "hello")]
    (tokens,) = every["qwen"].render({"messages": messages})
    for shift in ([0, 1], [-1, 0], [0, -1], [1, 0]):
        wrong = type(tokens)(tokens.ids, tokens.spans + shift)
        with pytest.raises(AssertionError):
            assert_as_believed("qwen", [wrong], messages)
    assert_as_believed("qwen", [tokens], messages)
