"""How a template writes turns, learned from what it makes of a few made-up messages."""

import os
from dataclasses import dataclass
from typing import Any

from megatron_hdp.data.chat.rows import BadConversationError, Message, TooCostlyError
from megatron_hdp.data.chat.templates import ChatTemplate

MARK = "qzx"
"""Stands for a content; words that no template writes by itself."""
_USER: Message = {"role": "user", "content": "zero"}
_ANSWER: Message = {"role": "assistant", "content": MARK}


@dataclass(frozen=True)
class Traits:
    """What a template puts around contents."""

    ends: tuple[str, ...] = ()
    """Texts that end turns: of the last one, of one before others, of one that calls tools."""
    bare_ends: tuple[str, ...] = ()
    """Where no text ends turns: the white space that stands there instead, or nothing."""
    closing: str = ""
    """What it puts behind the last turn's end, at the end of every text."""
    headers: tuple[str, ...] = ()
    """With what turns before others begin of what a prompt says; the whole prompt left out."""
    quiet: str = ""
    """What a prompt for an answer without thoughts adds to one with, if it adds to it."""


def traits_of(template: ChatTemplate) -> Traits:
    """Learn a template's traits; what it refuses to write for this teaches nothing."""
    alone = beginning(template, [_USER, _ANSWER])
    if alone is None or MARK not in alone:
        return Traits()
    followed = beginning(template, [_USER, _ANSWER, _USER]) or ""
    tail = alone.rpartition(MARK)[2]
    closing = _closing(template, tail, followed.rpartition(MARK)[2])
    tails = {
        tail.removesuffix(closing),
        *(text.rpartition(MARK)[2] for text in _before_others(template, _ANSWER, closing)),
    }
    ends = {one.rstrip() for one in tails} - {""}
    if ends:
        tails, ends = set(), ends | _ends_of_calls(template, closing)
    return Traits(
        ends=tuple(sorted(ends)),
        bare_ends=tuple(sorted(tails)),
        closing=closing,
        headers=_headers(template, followed, closing),
        quiet=_quiet(template, closing),
    )


def beginning(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[Any] | None = None,
    closing: str = "",
    *,
    prompt: bool = False,
    thinking: bool = True,
) -> str | None:
    """Return the text of messages, without what closes it; None where the template refuses."""
    try:
        text = template.render(messages, tools, prompt=prompt, thinking=thinking)
    except TooCostlyError:
        raise
    except BadConversationError:
        return None
    return text.removesuffix(closing)


def prompts(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[Any] | None = None,
    *,
    thinking_only: bool = False,
) -> list[str]:
    """Return each text that can ask for the turn after the messages."""
    texts = (
        beginning(template, messages, tools, prompt=True, thinking=thinking)
        for thinking in _switches(template)[: 1 if thinking_only else None]
    )
    return [text for text in texts if text is not None]


def questions(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[Any] | None = None,
    closing: str = "",
) -> list[str]:
    """Return what the prompts add to the messages, the longest first."""
    added = set()
    for thinking in _switches(template):
        plain = beginning(template, messages, tools, closing, thinking=thinking)
        asked = beginning(template, messages, tools, prompt=True, thinking=thinking)
        if plain is not None and asked is not None and asked.startswith(plain):
            added.add(asked.removeprefix(plain))
    return sorted(added - {""}, key=lambda one: (-len(one), one))


def _switches(template: ChatTemplate) -> tuple[bool, ...]:
    return (True, False) if template.knows_thinking else (True,)


def _closing(template: ChatTemplate, tail: str, tail_before_others: str) -> str:
    """Return the end of a tail if it is the token that ends texts, but none of a turn's."""
    end = tail.rstrip()
    inner = end.removesuffix(template.eos_token).rstrip()
    if not tail_before_others or inner in ("", end) or tail_before_others.startswith(end):
        return ""
    return tail[len(inner) :] if tail_before_others.startswith(inner) else ""


def _before_others(template: ChatTemplate, turn: Message, closing: str) -> list[str]:
    """Return a conversation as it is written once the next turn is asked for, without that."""
    asked = beginning(template, [_USER, turn], prompt=True)
    for question in questions(template, [_USER], closing=closing):
        if asked is not None and asked.endswith(question):
            return [asked.removesuffix(question)]
    return []


def _ends_of_calls(template: ChatTemplate, closing: str) -> set[str]:
    """Return what two turns that call different tools have in common at their end."""
    found = []
    for name, arguments in (("one", {"one": "two"}), ("two", {"three": 4})):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        alone = beginning(template, [_USER, turn], closing=closing)
        found.append([alone or "", *_before_others(template, turn, closing)])
    ends = {
        os.path.commonprefix([first[::-1], second[::-1]])[::-1].rstrip()
        for first, second in zip(*found, strict=False)
        if first != second  # else it writes no calls
    }
    return ends - {""}


def _quiet(template: ChatTemplate, closing: str) -> str:
    """Return what the longer one of two questions adds to the other."""
    found = questions(template, [_USER], closing=closing)
    if len(found) != 2 or not found[0].startswith(found[1]):
        return ""
    return found[0].removeprefix(found[1])


def _headers(template: ChatTemplate, followed: str, closing: str) -> tuple[str, ...]:
    """Return how turns begin where that is only the first part of a prompt."""
    before = followed.partition(MARK)[0] if MARK in followed else ""
    parts = {
        question[:length]
        for question in questions(template, [_USER], closing=closing)
        for length in range(1, len(question))
        if before.endswith(question[:length]) and question[:length].strip()
    }
    return tuple(sorted(parts, key=len, reverse=True)[:1])
