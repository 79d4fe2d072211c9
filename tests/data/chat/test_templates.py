"""Chat templates: what they may use, what is said of bad ones, and who is blamed for what."""

import json
import sys

import pytest

from megatron_hdp.data.chat import BadConversationError, Conversations
from megatron_hdp.data.chat.rows import Conversation
from megatron_hdp.data.chat.templates import ChatTemplate
from megatron_hdp.data.tokenizers import ByteTokenizer
from tests.data.chat.test_conversations import NamedBytes, said
from tests.data.chat.written import WRITTEN

PAIR = [said("user", "hi"), said("assistant", "hello")]
LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"


def rendered(source, messages=PAIR, **more):
    return ChatTemplate(source, "it", {"bos_token": "<bos>"}).render(messages, **more)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<bos>"),
        ("{% if 1 %}\n  a\n  {% endif %}\n", "  a\n"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x }}", "a"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueFalse"),
        ("{{ messages[0].get('content') }}", "hi"),
    ],
)
def test_what_templates_may_use(source, text):
    assert rendered(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].none.content }}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_fails_over_a_row_is_the_rows(source):
    with pytest.raises(BadConversationError, match="the chat template refuses it: "):
        rendered(source)


def test_a_refusal_is_told_in_the_templates_words(tmp_path):
    path = tmp_path / "strict.jinja"
    path.write_text(WRITTEN["gemma"].source)
    row = {"messages": [PAIR[0], *PAIR]}
    with pytest.raises(BadConversationError, match="refuses it: roles must alternate"):
        Conversations(NamedBytes(), str(path)).render(row)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": PAIR, "tools": [{"name": "look"}]},
        {"messages": [PAIR[0], {"role": "assistant", "tool_calls": [{"name": "look"}]}]},
        {"messages": [PAIR[0], {**PAIR[1], "thinking": "hm"}]},
    ],
)
def test_chatml_leaves_nothing_out(row):
    with pytest.raises(BadConversationError, match="ChatML has no form for"):
        Conversations(ByteTokenizer()).render(row)


@pytest.mark.parametrize("row", [[], [said("user", "more"), said("assistant", "bye")]])
def test_calls_that_a_template_leaves_out_are_no_empty_turns(tmp_path, row):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]}
    chats = made(tmp_path, LOOP + PROMPT)
    with pytest.raises(BadConversationError, match="leaves out the tool calls of message 1"):
        chats.render({"messages": [PAIR[0], call, *row]})


def test_a_template_is_asked_once_more_with_arguments_as_text(tmp_path):
    source = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}" + (
        "{{ c.function.name + c.function.arguments }};{% endfor %}{% endfor %}"
    )
    calls = [{"name": "look", "arguments": {"at": "é"}}]
    row = {"messages": [PAIR[0], {"role": "assistant", "tool_calls": calls}]}
    (tokens,) = made(tmp_path, source).render(row)
    assert bytes(tokens.ids.tolist()).decode() == 'hilook{"at": "é"};'
    with pytest.raises(BadConversationError, match='can only concatenate str .not "dict"'):
        made(tmp_path, source + "{{ 1 + '' }}", train_on="all").render(row)


def made(tmp_path, source, **more):
    path = tmp_path / "given.jinja"
    path.write_text(source)
    return Conversations(NamedBytes(), str(path), **more)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% for %}", "given.jinja does not compile, line 2: .* expected a Jinja template"),
        ("{% for m in messages %}{% endfor %}", "cannot be masked"),
        ("a", "cannot be masked"),
        (LOOP + "{{ messages | length }}" + PROMPT, None),
        ("{{ messages | length }}" + LOOP + PROMPT, None),
        ("{{ messages | map(attribute='role') | join }}", "leaves out what the assistant says"),
        ("{{ messages[99].content }}" + LOOP, None),  # rows may be longer
    ],
)
def test_templates_that_can_never_do(source, message, tmp_path):
    if message is None:
        made(tmp_path, source)
        return
    with pytest.raises(ValueError, match=message) as caught:
        made(tmp_path, source)
    assert not isinstance(caught.value, BadConversationError)
    if "compile" not in message:
        made(tmp_path, source, train_on="all")


@pytest.mark.parametrize("masks_one", [False, True])
def test_a_template_that_masks_no_row_is_blamed(tmp_path, masks_one):
    """Turns are numbered from the end: a beginning never looks like a beginning of the whole."""
    backwards = "{% for m in messages %}{{ loop.revindex }}[{{ m.role }}]{{ m.content | upper }};"
    source = "{% if messages | length > 2 %}" + backwards + "{% endfor %}{% else %}" + LOOP
    chats = made(tmp_path, source + "{% endif %}" + PROMPT)
    longer = {"messages": PAIR + PAIR}
    if masks_one:
        chats.render({"messages": PAIR})
    for _ in range(40 if masks_one else 31):
        with pytest.raises(BadConversationError, match="cannot be masked where message 1 "):
            chats.render(longer)
    if not masks_one:
        with pytest.raises(ValueError, match="none of the first 32 conversations") as caught:
            chats.render(longer)
        assert not isinstance(caught.value, BadConversationError)


def test_a_content_that_stands_twice_is_not_guessed(tmp_path):
    """The earlier turn changes when others follow, and its content cannot be told from a copy."""
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if not loop.last %}({{ m.content }}){% endif %};{% endfor %}" + PROMPT
    )
    chats = made(tmp_path, source)
    chats.render({"messages": PAIR})
    with pytest.raises(BadConversationError, match="cannot be masked where message 1"):
        chats.render({"messages": PAIR + PAIR})


@pytest.mark.parametrize("template", [None, "megatron:identity"])
def test_half_a_surrogate_pair_is_damage(template):
    """A row that is JSON text has passed those who read files."""
    row = {"messages": json.dumps([said("user", "é"), said("assistant", "a\udc00b")])}
    with pytest.raises(BadConversationError, match=r"half a surrogate pair \(.udc00\)"):
        Conversations(ByteTokenizer(), template).render(row)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"template": "absent.jinja"}, "template 'absent.jinja': no such file; expected chatml, "),
        ({"train_on": "user"}, "train-on 'user': expected one of assistant, last, all"),
    ],
)
def test_unknown_choices(arguments, message):
    with pytest.raises(ValueError, match=message):
        Conversations(ByteTokenizer(), **arguments)


def test_a_template_in_another_encoding(tmp_path):
    path = tmp_path / "latin.jinja"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match="latin.jinja: expected text in UTF-8"):
        Conversations(ByteTokenizer(), str(path))


def test_missing_jinja(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'megatron-hdp\[data\]'"):
        Conversations(ByteTokenizer())
    Conversations(ByteTokenizer(), "megatron:identity")  # needs none


def test_fingerprints_tell_what_decides_the_tokens(tmp_path):
    identity = "megatron:identity"
    options = [{}, {"train_on": "last"}, {"template": identity}, {"template": identity + "@0.17"}]
    options.append({"template": identity, "append_eod": False})
    given = [Conversations(ByteTokenizer(), **one) for one in options]
    found = [one.fingerprint() for one in (*given, made(tmp_path, LOOP + PROMPT))]
    assert len(set(found)) == len(found) and all(len(one) == 16 for one in found)
    assert Conversations(ByteTokenizer(), "chatml").fingerprint() == found[0]
    assert Conversation(PAIR, None, [False, True]).split()[0].messages == PAIR
