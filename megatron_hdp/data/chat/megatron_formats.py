"""Megatron-LM's own prompt formats: the ids and trained tokens of its ``--sft``.

What it does (0.16.1 to 0.19; ``SFTTokenizer``, ``SFTDataset``): a conversation is written by the
format's template and tokenized as a whole, then each turn alone; turns must be slices of the whole.
System, user and tool turns are masked, of assistants' the first tokens, whose number the format
knows; ``default`` and, from 0.18 on, ``identity`` mask nothing. Targets that are the padding id are
masked, wherever they come from. Release 0.16 appends the end-of-document token to a conversation
that does not end with it; later ones do not.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_hdp.arrays import BoolArray, Int64Array
from megatron_hdp.data.chat.rows import (
    BadConversationError,
    Conversation,
    Message,
    require_whole_characters,
)
from megatron_hdp.data.chat.templates import ChatTemplate
from megatron_hdp.data.tokenizers import Tokenizer

PREFIX = "megatron:"
_RELEASES = ("0.16", "0.17", "0.18", "0.19")
_DEFAULT_RELEASE = "0.19"
_LAST_THAT_ENDS_DOCUMENTS = "0.16"
_FIRST_WITHOUT_IDENTITY_MASKS = "0.18"


class _Format(NamedTuple):
    write: Callable[[Message], str] | None
    """Makes the text of a turn; None: the tokenizer's template does, of all turns."""
    num_prefix_tokens: int
    """First tokens of an assistant's turn, which are given to the model."""
    pad: str | None
    """Text of the token that pads; None: the tokenizer's padding, else its end of documents."""
    since: str
    """First release that knows it."""


def _nano_v2(message: Message) -> str:
    role, content = message["role"], message.get("content", "")
    if role == "assistant":
        return f"<SPECIAL_11>Assistant\n{content.strip()}\n<SPECIAL_12>\n"
    if role not in ("system", "user"):
        return ""
    for switch in ("/think", "/no_think"):
        content = content.replace(switch, "")
    head = "<SPECIAL_10>System" if role == "system" else "<SPECIAL_11>User"
    return f"{head}\n{content.strip()}\n"


def _h_aligned(message: Message) -> str:
    role, line = message["role"], message.get("content", "").strip() + "\n"
    if role == "assistant":
        return str(line)
    if role == "user":
        return f"<SPECIAL_11>User\n{line}<SPECIAL_11>Assistant\n"
    return f"<SPECIAL_10>System\n{line}" if role == "system" else ""


_FORMATS = {
    "nemotron-nano-v2": _Format(_nano_v2, 3, "<unk>", "0.16"),
    "nemotron-h-aligned": _Format(_h_aligned, 0, "<SPECIAL_233>", "0.16"),
    "identity": _Format(lambda message: str(message.get("content", "")), 0, "<unk>", "0.17"),
    "default": _Format(None, 0, None, "0.17"),
}


class MegatronFormat:
    """One of Megatron-LM's formats, with one tokenizer."""

    def __init__(self, name: str, tokenizer: Tokenizer, append_eod: bool) -> None:
        """Prepare a format.

        Args:
            name: ``FORMAT`` or ``FORMAT@RELEASE``, such as ``identity@0.17``; without a release
                masks are those of 0.19, and ``append_eod`` alone decides about the end.
            tokenizer: of the model.
            append_eod: end conversations with the end-of-document token, if the release does.

        Raises:
            ValueError: no such format, release, or template of the tokenizer.
        """
        name, _, release = name.partition("@")
        found = re.fullmatch(r"(\d+\.\d+)(\.\w+)?", release or _DEFAULT_RELEASE)
        if name not in _FORMATS or found is None or found[1] not in _RELEASES:
            raise ValueError(
                f"template megatron:{name}{release and '@' + release}: expected one of "
                f"{', '.join(_FORMATS)}, alone or with @RELEASE of {', '.join(_RELEASES)}"
            )
        self._format, known = _FORMATS[name], found[1]
        if known < self._format.since:
            raise ValueError(
                f"template megatron:{name}@{release}: Megatron-LM knows this format from "
                f"{self._format.since} on"
            )
        self._tokenizer = tokenizer
        self._appends = append_eod and (not release or known <= _LAST_THAT_ENDS_DOCUMENTS)
        self._masks_turns = name != "default" and (
            name != "identity" or known < _FIRST_WITHOUT_IDENTITY_MASKS
        )
        self._pad = self._pad_id()
        self._template = self._own_template() if self._format.write is None else None
        template = self._template.source if self._template else ""
        self.source = f"{name} {self._masks_turns} {self._appends} {template}"
        """What decides the tokens besides the tokenizer's vocabulary."""

    def tokens(self, conversation: Conversation) -> tuple[Int64Array, BoolArray]:
        """Return a conversation's ids and which of them are trained.

        Raises:
            BadConversationError: the reason.
        """
        if self._template is None:
            assert self._format.write is not None
            text = "".join(map(self._format.write, conversation.messages))
        else:
            text = self._template.render(conversation.messages)
        require_whole_characters(text)
        ids, _ = self._tokenizer.tokenize_markup(text)
        masks = self._masks_turns
        is_trained = self._mask(conversation, ids) if masks else np.ones(len(ids), dtype=np.bool_)
        if self._appends and (len(ids) == 0 or ids[-1] != self._tokenizer.eod):
            ids = np.append(ids, self._tokenizer.eod)
            is_trained = np.append(is_trained, True)
        if self._pad is not None:
            is_trained &= ids != self._pad
        return ids, is_trained

    def _mask(self, conversation: Conversation, ids: Int64Array) -> BoolArray:
        """Return the assistants' tokens but their first ones; turns are found by their lengths."""
        assert self._format.write is not None
        is_trained = np.zeros(len(ids), dtype=np.bool_)
        begin, before = 0, ""
        for number, message in enumerate(conversation.messages):
            turn, _ = self._tokenizer.tokenize_markup(self._format.write(message))
            end = begin + len(turn)
            if not np.array_equal(ids[begin:end], turn):
                raise BadConversationError(
                    f"the tokens of message {number} are others alone than in the conversation"
                )
            if message["role"] == "assistant":
                if before not in ("user", "tool"):
                    raise BadConversationError(
                        f"message {number}: the assistant after {before or 'nothing'}, expected a "
                        "user or a tool before it"
                    )
                is_trained[begin + self._format.num_prefix_tokens : end] = True
            begin, before = end, message["role"]
        if begin != len(ids):
            raise BadConversationError("the tokens of the turns are not those of the conversation")
        return is_trained

    def _pad_id(self) -> int | None:
        if self._format.pad is not None:
            return self._tokenizer.id_of(self._format.pad)
        text = self._tokenizer.special_tokens.get("pad_token")
        return self._tokenizer.eod if text is None else self._tokenizer.id_of(text)

    def _own_template(self) -> ChatTemplate:
        source = self._tokenizer.chat_template
        if source is None:
            raise ValueError(
                "template megatron:default: the tokenizer has no chat template, expected one in "
                "its folder; give another format or chatml"
            )
        return ChatTemplate(source, "the tokenizer's template", self._tokenizer.special_tokens)
