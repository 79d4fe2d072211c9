"""With Hugging Face tokenizers: their own template, whole texts, tokens that cross borders."""

import pytest

from megatron_hdp.data.chat import Conversations
from megatron_hdp.data.chat.rows import Conversation
from megatron_hdp.data.chat.templates import TODAY
from megatron_hdp.data.tokenizers import build_tokenizer
from tests.data.chat import tiny_tokenizer
from tests.data.chat.test_conversations import said
from tests.data.chat.tiny_tokenizer import text_of
from tests.data.chat.written import WRITTEN

transformers = pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "é<b>"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "<é>"}}]
TALK = [
    said("system", " be short "),
    said("user", "hi é€😀"),
    said("assistant", "hello hello\n\n"),
    said("user", "more <|im_end|>"),
    said("assistant", " hello", reasoning_content="hm"),
]
WITH_TOOLS = [
    *TALK[:2],
    {"role": "assistant", "tool_calls": [CALL]},
    said("tool", '{"found": 1}'),
    *TALK[2:],
]


def trained(tokenizer, tokens):
    return [text_of(tokenizer, tokens.ids[start:stop]) for start, stop in tokens.spans]


def in_text(messages):
    """Messages with the arguments of calls as JSON text."""
    return Conversation(messages, None, []).with_text_arguments().messages


@pytest.fixture
def tokenizer(tmp_path):
    return build_tokenizer(tiny_tokenizer.write(tmp_path / "hf"))


def by(template, tokenizer, folder, *messages):
    """Tokens of a row by the template of a text."""
    (folder / "given.jinja").write_text(template)
    (tokens,) = Conversations(tokenizer, str(folder / "given.jinja")).render(
        {"messages": list(messages)}
    )
    return tokens


@pytest.fixture
def same_day(monkeypatch):
    """Lets transformers write the day that we write."""

    class Day:
        now = staticmethod(lambda: TODAY)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Day)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("messages", [TALK, WITH_TOOLS], ids=["plain", "tools"])
def test_ids_are_those_of_transformers(name, messages, tmp_path, same_day):
    written = WRITTEN[name]
    if messages is WITH_TOOLS and not (written.takes_tools and written.takes_calls):
        messages = TALK[1:]
    if name == "chatml":  # ours refuses thoughts
        messages = [*messages[:-1], said("assistant", "hello")]
    tools = TOOLS if written.takes_tools else None
    where = tiny_tokenizer.write(tmp_path / "hf", template=written.source)
    tokenizer = build_tokenizer(where)
    (tokens,) = Conversations(tokenizer).render({"messages": messages, "tools": tools})
    theirs = transformers.AutoTokenizer.from_pretrained(where.removeprefix("hf:"))
    messages = [{**one, "thinking": one.get("reasoning_content")} for one in messages]
    asked = in_text(messages) if written.text_arguments else messages
    expected = theirs.apply_chat_template(asked, tools=tools, return_dict=False)
    assert tokens.ids.tolist() == expected
    pieces = list(written.pieces(messages, tools))
    assert text_of(tokenizer, tokens.ids) == "".join(text for text, _ in pieces)
    believed = "".join(text for text, is_trained in pieces if is_trained)
    assert "".join(trained(tokenizer, tokens)) == believed


def test_a_bos_that_the_template_writes_stands_once(tmp_path, tokenizer):
    for name, num_bos in (("gemma", 1), ("chatml", 0)):
        tokens = by(WRITTEN[name].source, tokenizer, tmp_path, *TALK[1:3])
        assert (tokens.ids == tokenizer.id_of("<bos>")).sum() == num_bos
        assert tokens.ids[-1] != tokenizer.eod  # nor is an end of document added


def test_the_token_that_ends_a_turn_is_trained_and_white_space_behind_it_is_not(tokenizer):
    row = {"messages": [said("user", "a"), said("assistant", " hello"), said("user", "b")]}
    (tokens,) = Conversations(tokenizer).render(row)
    assert trained(tokenizer, tokens) == [" hello<|im_end|>"]
    ((start, stop),) = tokens.spans
    assert tokens.ids[stop - 1] == tokenizer.id_of("<|im_end|>")
    assert stop - start == 2


def test_a_token_that_crosses_a_border_counts_where_it_begins(tmp_path, tokenizer):
    """A token of two lines begins in the prompt and ends in the turn, or the other way round."""
    row = {"messages": [said("user", "a"), said("assistant", "\nb")]}
    (tokens,) = Conversations(tokenizer).render(row)
    assert trained(tokenizer, tokens) == ["b<|im_end|>"]
    template = (
        "{% for m in messages %}{{ m.role[:1] + m.content + '\n' }}\n{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    turns = [said("user", "u"), said("assistant", "b"), said("user", "c")]
    tokens = by(template, tokenizer, tmp_path, *turns)
    assert text_of(tokenizer, tokens.ids) == "uu\n\nab\n\nuc\n\n"
    assert trained(tokenizer, tokens) == ["b\n\n"]


def test_of_several_templates_the_default_is_taken(tmp_path):
    sources = {"other": "x", "default": WRITTEN["gemma"].source}
    tokenizer = build_tokenizer(tiny_tokenizer.write(tmp_path / "hf", template=sources))
    assert tokenizer.chat_template == WRITTEN["gemma"].source
    where = tiny_tokenizer.write(tmp_path / "none", template={"b": "x", "a": "y"})
    with pytest.raises(ValueError, match="templates named a, b, expected one named default"):
        Conversations(build_tokenizer(where))


def test_a_template_in_a_file_of_its_own(tmp_path):
    where = tiny_tokenizer.write(tmp_path / "hf")
    assert build_tokenizer(where).chat_template is None
    (tmp_path / "hf" / "chat_template.jinja").write_text(WRITTEN["gemma"].source)
    assert build_tokenizer(where).chat_template == WRITTEN["gemma"].source


def test_a_tokenizer_that_tells_no_places_is_refused(tmp_path, monkeypatch):
    room = "megatron_hdp.data.tokenizers.hugging_face"
    monkeypatch.setattr(f"{room}.whole_backend", lambda path: None)
    monkeypatch.setattr(f"{room}.backend_of", lambda tokenizer: None)
    tokenizer = build_tokenizer(tiny_tokenizer.write(tmp_path / "hf"))
    monkeypatch.setattr(type(tokenizer._tokenizer), "is_fast", False)
    with pytest.raises(ValueError, match="does not tell where tokens begin: expected a fast one"):
        Conversations(tokenizer)
