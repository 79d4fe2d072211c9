"""Rows: the forms that conversations come in, and why some are refused."""

import json

import pytest

from megatron_hdp.data.chat import BadConversationError, Conversations
from megatron_hdp.data.chat.rows import read_row
from megatron_hdp.data.tokenizers import ByteTokenizer

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
PAIR = [USER, ANSWER]
EMPTY = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}


def messages(row):
    return read_row(row).messages


def share(*turns):
    return [{"from": who, "value": what} for who, what in turns]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": PAIR, "id": 7, "images": [], "chosen": None},
        {"messages": json.dumps(PAIR)},
        {"conversation": PAIR},
        {"conversations": share(("human", "hi"), ("gpt", "hello"))},
        {"conversations": share(("User", "hi"), ("model", "hello"))},
        {"messages": [{"role": " user", "content": "hi"}, {**ANSWER, "tool_calls": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ANSWER]},
        {"messages": [{"role": "user", "content": ["hi"]}, {**ANSWER, "tool_calls": []}]},
    ],
)
def test_forms_of_one_conversation(row):
    assert messages(row) == PAIR


def test_parts_become_lines():
    row = parts({"type": "text", "text": "a"}, {"text": "b"})
    assert messages(row)[0]["content"] == "a\nb"


def test_a_system_message_beside_the_conversation():
    row = {"conversations": share(("human", "hi"), ("gpt", "hello")), "system": "be short"}
    assert messages(row) == [{"role": "system", "content": "be short"}, *PAIR]
    row["conversations"] = share(("system", "own"), ("human", "hi"), ("gpt", "hello"))
    assert messages(row)[0]["content"] == "own"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([CALL], CALL),
        (json.dumps([CALL]), CALL),
        ([{"name": "look", "arguments": '{"at": 1}'}], CALL),
        ([EMPTY | {"function": {"name": "f", "arguments": ""}}], EMPTY),
    ],
)
def test_calls_take_one_form(calls, expected):
    assert messages(calling(calls))[1] == {"role": "assistant", "tool_calls": [expected]}


def test_calls_and_results_of_sharegpt():
    text = json.dumps(CALL["function"])
    row = {
        "conversations": share(
            ("human", "hi"), ("function_call", text), ("observation", "1"), ("gpt", "hello")
        ),
        "tools": json.dumps([{"name": "look"}]),
    }
    conversation = read_row(row)
    roles = [one["role"] for one in conversation.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert conversation.messages[1] == {"role": "assistant", "tool_calls": [CALL]}
    assert conversation.tools == [{"name": "look"}]
    assert read_row({"messages": PAIR, "tools": ""}).tools is None


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_under_the_names_that_templates_read(name):
    found = messages({"messages": [USER, {**ANSWER, name: "hm"}]})[1]
    assert found["reasoning_content"] == found["thinking"] == "hm"


def test_a_turn_of_weight_0_is_not_trained():
    row = {"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]}
    assert read_row(row).is_trained == [False, False, False, True]
    (tokens,) = Conversations(ByteTokenizer()).render(row)
    assert len(tokens.spans) == 1
    for on in ("assistant", "last"):
        row = {"messages": [USER, {**ANSWER, "weight": 0}]}
        with pytest.raises(BadConversationError, match="no token of an assistant's turn to train"):
            Conversations(ByteTokenizer(), train_on=on).render(row)


def parts(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def calling(calls):
    return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": calls}]}


def said(*roles):
    return {"messages": [{"role": role, "content": role} for role in roles]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "the row is a list, expected an object with `messages`"),
        ({"text": "a"}, "no conversation among the keys text; expected `messages`"),
        ({}, "no conversation among the keys of an empty row"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": "hi"}, "`messages` is text but no JSON"),
        ({"messages": {}}, "`messages` is an object, expected a list"),
        ({"messages": ["hi"]}, "message 0 is text, expected an object"),
        ({"messages": [{"content": "a"}]}, "message 0 has no `role`"),
        (said("user", "critic"), "message 1 has the role 'critic'; expected system, user"),
        ({"messages": [{"role": 3, "content": "a"}]}, "message 0 has the role 3"),
        ({"messages": [{"role": "user"}]}, r"message 0 \(user\) has no `content`"),
        ({"messages": [{"role": "user", "content": 5}]}, "content that is a number"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "an empty assistant turn"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 1: an empty assistant turn"),
        ({"chosen": PAIR, "rejected": PAIR}, "a preference pair .* expected one conversation"),
        ({"messages": PAIR, "images": ["a.png"]}, "key `images`; supported are conversations of"),
        (parts({"type": "image_url"}), "a part or key `image_url`"),
        (parts({"type": "text"}), "message 0 has a part without text"),
        (calling(3), "`tool_calls` that are a number"),
        (calling([{}]), "a tool call without a name"),
        (calling([{"name": "f", "arguments": "{"}]), "arguments of a tool call of .* no JSON"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "has the weight 0.5, expected 0 or 1"),
        ({"messages": PAIR, "tools": "{"}, "`tools` is text but no JSON"),
        ({"messages": PAIR, "tools": {}}, "`tools` is an object, expected a list"),
        (said("user", "system", "assistant"), "message 1: system after user"),
        (said("assistant", "user"), "the assistant begins: nothing to answer"),
        (said("user", "tool", "assistant"), "message 1: tool after user"),
        (said("user"), "no assistant turn to train on"),
        (said("system", "user", "user"), "no assistant turn to train on"),
    ],
)
def test_what_is_refused(row, reason):
    with pytest.raises(BadConversationError, match=reason):
        Conversations(ByteTokenizer()).render(row)


@pytest.mark.parametrize(
    "roles",
    [
        ("user", "user", "assistant"),
        ("system", "assistant", "user", "assistant"),
        ("system", "developer", "user", "assistant", "tool", "tool", "assistant", "assistant"),
        ("user", "assistant", "user"),
    ],
)
def test_orders_that_are_taken(roles):
    (tokens,) = Conversations(ByteTokenizer()).render(said(*roles))
    assert len(tokens.spans) == roles.count("assistant")
