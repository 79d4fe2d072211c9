"""Rows as people have them become one form of conversation, or are refused with a reason."""

import json
from dataclasses import dataclass
from typing import Any

from megatron_hdp.data.characters import half_pair

Message = dict[str, Any]

CONVERSATION_KEYS = ("messages", "conversations", "conversation")
_ROLE_KEYS = ("role", "from")
_CONTENT_KEYS = ("content", "value")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_MEDIA_KEYS = ("image", "images", "audio", "audios", "video", "videos")
LEADING = ("system", "developer")
_ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("function", "ipython", "observation", "tool_response"), "tool"),
}
_CALL_ROLES = ("function_call", "tool_call")  # an assistant's turn that is nothing but calls


class BadConversationError(ValueError):
    """A row that cannot be trained on; the message is a short reason."""


class TooCostlyError(BadConversationError):
    """A template takes too much time or memory over a row."""


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates expect them."""

    messages: list[Message]
    """Each has ``role`` (system, developer, user, assistant or tool), and ``content`` as one string
    unless it has none; what else a message has (``tool_calls``, ``reasoning_content``) is kept."""
    tools: list[Any] | None
    """Descriptions of tools, for the template."""
    is_trained: list[bool]
    """Of each message: whether it is an assistant's that the row does not exclude."""

    def check_order(self) -> None:
        """Refuse roles in an order that no conversation has.

        Raises:
            BadConversationError: the reason.
        """
        before = ""
        for number, message in enumerate(self.messages):
            role = message["role"]
            if role in LEADING and before not in ("", "system"):
                raise BadConversationError(f"message {number}: {role} after {before}")
            if role == "assistant" and not before:
                raise BadConversationError("the assistant begins: nothing to answer")
            if role == "tool" and before not in ("assistant", "tool"):
                raise BadConversationError(
                    f"message {number}: tool after {before or 'nothing'}, expected the assistant "
                    "before it"
                )
            before = role

    def with_text_arguments(self) -> "Conversation":
        """Return the conversation with arguments of calls as JSON text, as some templates want."""
        messages = [
            message | {"tool_calls": [_in_text(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in self.messages
        ]
        return Conversation(messages, self.tools, self.is_trained)

    def split(self) -> list["Conversation"]:
        """Cut before each system message, as Megatron-LM reads a row."""
        begins = [i for i, message in enumerate(self.messages) if message["role"] == "system"]
        borders = [0, *(i for i in begins if i > 0), len(self.messages)]
        return [
            Conversation(self.messages[start:stop], self.tools, self.is_trained[start:stop])
            for start, stop in zip(borders[:-1], borders[1:], strict=True)
        ]


def read_row(row: Any) -> Conversation:
    """Return the conversation of a row; the order of its roles is not checked yet.

    Args:
        row: an object with ``messages`` of ``role`` and ``content`` or, as ShareGPT has it,
            ``conversations`` of ``from`` and ``value``; optional ``tools`` and ``system``. Lists
            may be JSON text.

    Raises:
        BadConversationError: the reason.
    """
    if not isinstance(row, dict):
        raise BadConversationError(f"the row is {_kind(row)}, expected an object with `messages`")
    found = _messages_of(row)
    messages = [_message(number, one) for number, one in enumerate(found)]
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    is_trained = [_is_trained(number, one) for number, one in enumerate(messages)]
    return Conversation(messages, _tools_of(row), is_trained)


def require_whole_characters(text: str) -> None:
    """Refuse half a surrogate pair, which JSON within a row's texts may hold.

    Raises:
        BadConversationError: there is one.
    """
    if half := half_pair(text):
        raise BadConversationError(f"half a surrogate pair ({half}), which is no text")


def _messages_of(row: Message) -> list[Any]:
    """Return the raw messages."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        raise BadConversationError(
            "a preference pair (`chosen`, `rejected`), expected one conversation a row, in "
            "`messages` or `conversations`; for pairs give the source format: pairs"
        )
    for key in _MEDIA_KEYS:
        if row.get(key):
            raise _media(key)
    named = [key for key in CONVERSATION_KEYS if row.get(key) is not None]
    if not named:
        raise BadConversationError(
            f"no conversation among the keys {', '.join(map(str, row)) or 'of an empty row'}; "
            "expected `messages` or `conversations`"
        )
    found = from_json(row[named[0]], f"`{named[0]}`")
    if not isinstance(found, list):
        raise BadConversationError(f"`{named[0]}` is {_kind(found)}, expected a list of messages")
    if not found:
        raise BadConversationError(f"`{named[0]}` is empty")
    return found


def _tools_of(row: Message) -> list[Any] | None:
    tools = row.get("tools")
    if tools is None or tools == "":
        return None
    tools = from_json(tools, "`tools`")
    if not isinstance(tools, list):
        raise BadConversationError(f"`tools` is {_kind(tools)}, expected a list or its JSON text")
    return tools or None


def _message(number: int, found: Any) -> Message:
    """Return a message under the usual names; keys without a value are left out."""
    if not isinstance(found, dict):
        raise BadConversationError(f"message {number} is {_kind(found)}, expected an object")
    message = {key: value for key, value in found.items() if value is not None}
    role_key = next((key for key in _ROLE_KEYS if key in message), None)
    if role_key is None:
        raise BadConversationError(f"message {number} has no `role`")
    name = message.pop(role_key)
    content_key = next((key for key in _CONTENT_KEYS if key in message), None)
    content = _text(number, message.pop(content_key)) if content_key else None
    known = name.strip().lower() if isinstance(name, str) else None
    if known in _CALL_ROLES:
        calls = from_json(content or "", f"message {number} (`{known}`)")
        message["tool_calls"] = calls if isinstance(calls, list) else [calls]
        known, content = "assistant", None
    if known not in _ROLES:
        raise BadConversationError(
            f"message {number} has the role {name!r}; expected system, user, assistant or tool"
        )
    return _completed(number, _ROLES[known], content, message)


def _completed(number: int, role: str, content: str | None, message: Message) -> Message:
    """Return a message of a known role with its content, its calls and its reasoning in place."""
    result: Message = {"role": role, **({} if content is None else {"content": content}), **message}
    if "tool_calls" in message:
        result["tool_calls"] = _calls(number, message["tool_calls"])
        if not result["tool_calls"]:
            del result["tool_calls"]
    if role != "assistant" and content is None:
        raise BadConversationError(f"message {number} ({role}) has no `content`")
    if role == "assistant" and not (content or "").strip() and "tool_calls" not in result:
        raise BadConversationError(f"message {number}: an empty assistant turn")
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    if reasoning is not None:  # templates read one of two names
        result |= {"reasoning_content": reasoning, "thinking": reasoning}
    return result


def _text(number: int, content: Any) -> str:
    """Return a content as one string; its parts become lines, as engines serve them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadConversationError(f"message {number} has content that is {_kind(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise _media(kind)
        if not isinstance(text, str):
            raise BadConversationError(f"message {number} has a part without text")
        texts.append(text)
    return "\n".join(texts)


def _calls(number: int, calls: Any) -> list[Message]:
    """Return tool calls as templates expect them: ``function`` with arguments as an object."""
    calls = from_json(calls, f"`tool_calls` of message {number}")
    if not isinstance(calls, list):
        raise BadConversationError(f"message {number} has `tool_calls` that are {_kind(calls)}")
    result = []
    for call in calls:
        function = call.get("function") or call if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadConversationError(f"message {number} has a tool call without a name")
        function = {key: function[key] for key in ("name", "arguments") if key in function}
        if isinstance(function.get("arguments"), str):
            what = f"arguments of a tool call of message {number}"
            function["arguments"] = from_json(function["arguments"] or "{}", what)
        rest = {key: value for key, value in call.items() if key not in ("name", "arguments")}
        result.append({"type": "function", **rest, "function": function})
    return result


def _in_text(call: Message) -> Message:
    function = dict(call["function"])
    if "arguments" in function:
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function}


def _is_trained(number: int, message: Message) -> bool:
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise BadConversationError(f"message {number} has the weight {weight!r}, expected 0 or 1")
    return message["role"] == "assistant" and bool(weight)


def from_json(value: Any, what: str) -> Any:
    """Return what a JSON text says, or what is no text as it is.

    Raises:
        BadConversationError: it is no JSON; calls it by its name, `what`.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadConversationError(f"{what} is text but no JSON ({error})") from error


def _media(kind: Any) -> BadConversationError:
    return BadConversationError(
        f"a part or key `{kind}`; supported are conversations of text alone"
    )


def _kind(value: Any) -> str:
    names = {str: "text", list: "a list", dict: "an object", type(None): "null", bool: "a boolean"}
    return names.get(type(value), "a number")
