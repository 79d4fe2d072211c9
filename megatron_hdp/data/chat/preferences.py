"""Rows of preferences become one form of pairs or labelled answers, or are refused with a reason.

A pair is rendered as two conversations that share a prompt; what is trained is the answers alone.
Texts that are no conversations are tokenised as they stand: a prompt, an answer behind it, and the
end of the document.
"""

import hashlib
from dataclasses import dataclass, replace
from itertools import takewhile
from os.path import commonprefix
from typing import Any

import numpy as np

from megatron_hdp.data.chat.conversations import ChatTokens, Conversations
from megatron_hdp.data.chat.megatron_formats import PREFIX
from megatron_hdp.data.chat.rows import (
    BadConversationError,
    Message,
    read_row,
    require_whole_characters,
)
from megatron_hdp.data.sides import PAIRS
from megatron_hdp.data.tokenizers import Tokenizer

_VERSION = 1  # of what this module makes of a row: another result is another version
_EXPECTED = {
    PAIRS: "`chosen` and `rejected` (with `prompt` or without), `context` and `completions`, or "
    "`messages` and `rejected_response` or `rejected_messages`",
    "labelled": "`prompt`, `completion` and `label`, or `messages` and `label`",
}
_LABELS = {True: True, False: False, "true": True, "false": False}


@dataclass(frozen=True)
class _Answer:
    """One side of a row: texts, or messages of which the last ones are the answer."""

    name: str
    """For messages."""
    prompt: Any
    """Text or messages."""
    answer: Any
    """The same."""
    is_good: bool

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to prefer."""
        return not (self.answer.strip() if isinstance(self.answer, str) else self.answer)


class Preferences:
    """Makes tokens of rows of preferences, as `Conversations` does of others."""

    def __init__(
        self,
        kind: str,
        tokenizer: Tokenizer,
        template: str | None = None,
        train_on: str = "assistant",
    ) -> None:
        """Prepare tokenizer and template.

        Args:
            kind: ``pairs`` or ``labelled``.
            tokenizer: of the model.
            template: as of `Conversations`; a text becomes a turn of the user's or the assistant's
                where one is given, and stands as it is where none is.
            train_on: ``assistant``: each of the answer's turns; ``last``: only the last one.

        Raises:
            ValueError: as of `Conversations`, or what decides by itself what is trained.
        """
        if train_on == "all" or (template or "").startswith(PREFIX):
            found = "train-on all" if train_on == "all" else f"template {template}"
            raise ValueError(
                f"{found} with preferences: it would train prompts as well; expected answers alone"
            )
        self._kind = kind
        self._tokenizer = tokenizer
        self._has_turns = template is not None
        self._conversations = Conversations(tokenizer, template, train_on)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits over all but the tokenizer that decides what rows become."""
        parts = (_VERSION, self._kind, self._has_turns, self._conversations.fingerprint())
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def render(self, row: Any) -> list[ChatTokens]:
        """Return the documents of a row: of a pair the chosen one, then the rejected one.

        Raises:
            BadConversationError: the row cannot be trained on; the message is a short reason.
            ValueError: none of the first rows could be masked: the template is at fault.
        """
        if not isinstance(row, dict):
            raise BadConversationError(f"the row is no object, expected {_EXPECTED[self._kind]}")
        found = []
        answers = _pair(row) if self._kind == PAIRS else [_labelled(row)]
        for one in answers:
            if one.is_empty:
                raise BadConversationError(f"{one.name} is empty, expected an answer")
            try:
                found.append(replace(self._tokens(one, row), is_good=one.is_good))
            except BadConversationError as error:
                raise BadConversationError(f"{one.name}: {error}") from error
        if len(found) == 2 and np.array_equal(found[0].ids, found[1].ids):
            raise BadConversationError(
                f"{answers[0].name} and {answers[1].name} are equal, expected two answers"
            )
        return found

    def _tokens(self, one: _Answer, row: Message) -> ChatTokens:
        is_text = isinstance(one.prompt, str) and isinstance(one.answer, str)
        if is_text and not self._has_turns:
            return self._of_texts(one.prompt, one.answer)
        prompt, answer = _messages(one.prompt, "user"), _messages(one.answer, "assistant")
        shared = {key: row[key] for key in ("tools", "system") if key in row}
        conversation = read_row({**shared, "messages": [*prompt, *answer]})
        first = len(conversation.messages) - len(answer)
        trained = [is_one and i >= first for i, is_one in enumerate(conversation.is_trained)]
        return self._conversations.tokens(replace(conversation, is_trained=trained))

    def _of_texts(self, prompt: str, answer: str) -> ChatTokens:
        for text in (prompt, answer):
            require_whole_characters(text)
        ids = [self._tokenizer.tokenize_markup(text)[0] for text in (prompt, answer) if text]
        tokens = np.concatenate([*ids, [self._tokenizer.eod]]).astype(np.int64)
        first = max(len(ids[0]) if prompt else 0, 1)  # nothing predicts a first token
        return ChatTokens(tokens, np.array([[first, len(tokens)]]))


def _pair(row: Message) -> list[_Answer]:
    """Return the chosen and the rejected side of a row."""
    if row.get("completions") is not None:
        return _ranked(row)
    if row.get("messages") is not None:
        return _beside_messages(row)
    for name, other in (("chosen", "rejected"), ("rejected", "chosen")):
        if row.get(name) is None and row.get(other) is not None:
            raise BadConversationError(f"`{other}` without `{name}`, expected both sides")
    if row.get("chosen") is None:
        raise _unknown(row, PAIRS)
    prompt, chosen, rejected = (row.get(name) for name in ("prompt", "chosen", "rejected"))
    if prompt is None or isinstance(prompt, str) and isinstance(chosen, list):
        prompt, chosen, rejected = _without_prompt(chosen, rejected)
    return [
        _Answer("`chosen`", prompt, chosen, True),
        _Answer("`rejected`", prompt, rejected, False),
    ]


def _without_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return the prompt that both sides begin with, and what follows it."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise BadConversationError("`chosen` and `rejected` are not both texts or messages")
    if isinstance(chosen, str):
        num = len(commonprefix([chosen, rejected]))
        num -= chosen[:num].endswith(" ")  # a space is of the word behind it
    else:
        num = len(list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected))))  # noqa: B905
    return chosen[:num], chosen[num:], rejected[num:]


def _ranked(row: Message) -> list[_Answer]:
    """Return the sides of a row with ``context`` and ``completions`` of a ``rank`` each."""
    given = row["completions"]
    if not isinstance(given, list) or not all(
        isinstance(one, dict) and isinstance(one.get("rank"), int) for one in given
    ):
        raise BadConversationError("`completions` are no list of objects with a `rank`")
    if len({one["rank"] for one in given}) != len(given) or len(given) != 2:
        raise BadConversationError(
            f"{len(given)} `completions` of the ranks {[one['rank'] for one in given]}, expected "
            "two of different ranks"
        )
    best, worst = sorted(given, key=lambda one: int(one["rank"]))
    context = row.get("context") or []
    return [
        _Answer(f"the completion of rank {one['rank']}", context, one.get("completion") or [], good)
        for one, good in ((best, True), (worst, False))
    ]


def _beside_messages(row: Message) -> list[_Answer]:
    """Return the sides of a row whose ``messages`` end with the chosen answer."""
    messages = _messages(row["messages"], "user")
    other = row.get("rejected_messages")
    if other is not None:
        prompt, chosen, rejected = _without_prompt(messages, _messages(other, "user"))
    elif isinstance(row.get("rejected_response"), str):
        prompt, chosen, rejected = messages[:-1], messages[-1:], row["rejected_response"]
    else:
        raise BadConversationError(
            "`messages` without `rejected_response` or `rejected_messages`, expected both sides"
        )
    name = "`rejected_response`" if other is None else "`rejected_messages`"
    return [_Answer("`messages`", prompt, chosen, True), _Answer(name, prompt, rejected, False)]


def _labelled(row: Message) -> _Answer:
    label = row.get("label")
    if label is None or (row.get("completion") is None and row.get("messages") is None):
        raise _unknown(row, "labelled")
    known = label.strip().lower() if isinstance(label, str) else label
    if not isinstance(known, str | int) or known not in _LABELS:
        raise BadConversationError(f"`label` is {label!r}, expected true or false")
    if row.get("completion") is not None:
        return _Answer("`completion`", row.get("prompt") or "", row["completion"], _LABELS[known])
    messages = _messages(row["messages"], "user")
    return _Answer("`messages`", messages[:-1], messages[-1:], _LABELS[known])


def _messages(given: Any, role: str) -> list[Any]:
    """Return messages, or a text as the one of a role."""
    if isinstance(given, str):
        return [{"role": role, "content": given}] if given else []
    if not isinstance(given, list):
        raise BadConversationError(f"found {given!r:.40}, expected a text or a list of messages")
    return given


def _unknown(row: Message, kind: str) -> BadConversationError:
    keys = ", ".join(map(str, row)) or "none"
    return BadConversationError(f"found the keys {keys}, expected {_EXPECTED[kind]}")
