"""A row of conversation data becomes the ids of a document and the spans of its trained tokens."""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.chat.masks import Range, TurnFinder, UnmaskableError
from megatron_hdp.data.chat.megatron_formats import PREFIX, MegatronFormat
from megatron_hdp.data.chat.rows import (
    BadConversationError,
    Conversation,
    read_row,
    require_whole_characters,
)
from megatron_hdp.data.chat.templates import CHATML, ChatTemplate
from megatron_hdp.data.media import ItemPlace
from megatron_hdp.data.spec import TRAIN_ON
from megatron_hdp.data.tokenizers import Tokenizer

_VERSION = 1  # of what this room makes of a row: another result is another version
_NUM_TO_BLAME_TEMPLATE = 32


@dataclass(frozen=True)
class ChatTokens:
    """One conversation, which becomes one document."""

    ids: Int64Array
    """Its tokens."""
    spans: Int64Array
    """``int64[m, 2]``: ``[start, stop)`` of trained tokens, rising, never the first token."""
    is_good: bool | None = None
    """Of preferences: whether it is the chosen or a desirable answer."""
    items: tuple[ItemPlace, ...] = ()
    """Its pictures, in their order."""
    item_tokens: tuple[int, ...] = ()
    """The token that stands for each."""


class Conversations:
    """Makes tokens of rows, all with one tokenizer and one template.

    **Ids** are those of the template's text, tokenized once as a whole, special tokens in it read
    as such, and none added: neither a BOS besides the one that the template writes, nor an
    end-of-document token, for a conversation ends as its template ends it, which is what a model is
    served with. Only the ``megatron:`` formats append one, as Megatron-LM does.

    **Trained** is a token that begins within an assistant's turn, from behind the prompt that asks
    for it to the token that ends it. So of tokens that cross a border, the one at a turn's begin is
    not trained, and the one at its end is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        train_on: str = "assistant",
        append_eod: bool = True,
    ) -> None:
        """Prepare tokenizer and template.

        Args:
            tokenizer: of the model.
            template: ``chatml``; ``megatron:FORMAT`` or ``megatron:FORMAT@RELEASE``
                (:class:`~megatron_hdp.data.chat.megatron_formats.MegatronFormat`); a file that
                holds a Jinja template; None: the tokenizer's own, else ChatML.
            train_on: ``assistant``: each of its turns; ``last``: only its last turn; ``all``: every
                token but the first. A ``megatron:`` format decides by itself.
            append_eod: False: keeps ``megatron:`` formats from ending conversations with the
                end-of-document token.

        Raises:
            ValueError: what is given is unknown, does not compile, or cannot be masked.
            ModuleNotFoundError: jinja2 is not installed.
        """
        if train_on not in TRAIN_ON:
            raise ValueError(f"train-on {train_on!r}: expected one of {', '.join(TRAIN_ON)}")
        tokenizer.tokenize_markup("a")  # refuses a tokenizer that does not tell places
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._num_unmasked: int | None = 0  # rows so far that failed so; None: one did not
        self._format: MegatronFormat | None = None
        if template is not None and template.startswith(PREFIX):
            if train_on != "assistant":
                raise ValueError(
                    f"train-on {train_on} with template {template}: this format decides itself "
                    "what is trained; leave train-on out"
                )
            self._format = MegatronFormat(template.removeprefix(PREFIX), tokenizer, append_eod)
            return
        self._template = _template(tokenizer, template)
        self._finder = TurnFinder(self._template) if train_on != "all" else None

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits over all but the tokenizer that decides what rows become."""
        source = self._format.source if self._format else self._template.source
        text = "\0".join((str(_VERSION), source, self._train_on))
        return hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=8).hexdigest()

    def render(self, row: Any) -> list[ChatTokens]:
        """Return the documents of a row: one, or under ``megatron:`` one for each system message.

        Raises:
            BadConversationError: the row cannot be trained on; the message is a short reason.
            ValueError: none of the first rows could be masked: the template is at fault.
        """
        conversation = read_row(row)
        if self._format is not None:
            return [self._by_format(one) for one in conversation.split()]
        return [self.tokens(conversation)]

    def tokens(self, conversation: Conversation) -> ChatTokens:
        """Return the document of a conversation, by the template and not by a format.

        Raises:
            BadConversationError, ValueError: as of `render`.
        """
        conversation.check_order()
        return self._by_template(conversation)

    def _by_format(self, conversation: Conversation) -> ChatTokens:
        assert self._format is not None
        conversation.check_order()
        ids, is_trained = self._format.tokens(conversation)
        steps = np.diff(is_trained.astype(np.int8), prepend=0, append=0)
        spans = np.stack([np.flatnonzero(steps > 0), np.flatnonzero(steps < 0)], axis=1)
        return ChatTokens(ids, _normal(spans, conversation))

    def _by_template(self, conversation: Conversation) -> ChatTokens:
        conversation, text = self._written(conversation)
        require_whole_characters(text)
        turns = self._turns(conversation, text)
        ids, places = self._tokenizer.tokenize_markup(text)
        borders = np.searchsorted(places, np.asarray(turns, dtype=np.int64).reshape(-1, 2))
        return ChatTokens(ids, _normal(borders.astype(np.int64), conversation))

    def _written(self, conversation: Conversation) -> tuple[Conversation, str]:
        """Return a conversation as the template takes it, and what the template makes of it."""
        try:
            return conversation, self._template.render(conversation.messages, conversation.tools)
        except BadConversationError:
            if not any("tool_calls" in message for message in conversation.messages):
                raise
            other = conversation.with_text_arguments()
            with suppress(BadConversationError):
                return other, self._template.render(other.messages, other.tools)
            raise

    def _turns(self, conversation: Conversation, text: str) -> list[Range]:
        """Return the ranges of characters to train on."""
        if self._finder is None:
            return [(0, len(text) + 1)]
        numbers = [number for number, trained in enumerate(conversation.is_trained) if trained]
        if not numbers:
            raise _nothing_to_train(conversation)
        if self._train_on == "last":
            numbers = numbers[-1:]
        try:
            turns = self._finder.find(conversation, text, numbers)
        except UnmaskableError as error:
            self._blame_template(error)
            raise
        self._num_unmasked = None
        return turns

    def _blame_template(self, error: UnmaskableError) -> None:
        """Count what could not be masked; if it is all of the first rows, no row can be."""
        if self._num_unmasked is None:
            return
        self._num_unmasked += 1
        if self._num_unmasked >= _NUM_TO_BLAME_TEMPLATE:
            raise ValueError(
                f"none of the first {self._num_unmasked} conversations can be masked, the last "
                f"because {error}: give a template that writes a turn the same whatever follows, "
                "or train-on all"
            ) from error


def _template(tokenizer: Tokenizer, template: str | None) -> ChatTemplate:
    """Return the template that a user named, or the tokenizer's."""
    if template is None and tokenizer.chat_template is not None:
        source, name = tokenizer.chat_template, "the tokenizer's template"
    elif template in (None, "chatml"):
        source, name = CHATML, "ChatML"
    else:
        assert template is not None
        source, name = _read(template), f"template {template}"
    return ChatTemplate(source, name, tokenizer.special_tokens)


def _read(path: str) -> str:
    if not os.path.isfile(path):
        raise ValueError(
            f"template {path!r}: no such file; expected chatml, megatron:FORMAT or a file that "
            "holds a Jinja template"
        )
    with open(path, encoding="utf-8") as stream:
        try:
            return stream.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"template {path}: expected text in UTF-8 ({error})") from error


def _normal(spans: Int64Array, conversation: Conversation) -> Int64Array:
    """Return spans without the first token, empty ones left out, those that touch as one."""
    spans = np.maximum(spans, 1)
    spans = spans[spans[:, 0] < spans[:, 1]]
    if not len(spans):
        raise _nothing_to_train(conversation)
    apart = spans[1:, 0] > spans[:-1, 1]
    starts = spans[np.concatenate(([True], apart)), 0]
    stops = spans[np.concatenate((apart, [True])), 1]
    return np.stack([starts, stops], axis=1)


def _nothing_to_train(conversation: Conversation) -> BadConversationError:
    if any(message["role"] == "assistant" for message in conversation.messages):
        return BadConversationError("no token of an assistant's turn to train on")
    return BadConversationError("no assistant turn to train on")
