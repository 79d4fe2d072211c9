"""Rows with pictures, videos or sounds: a text with tokens for them, and where they lie.

Pictures are named under ``image`` or ``images``, in the order of the ``<image>`` marks of the texts
(LLaVA, ShareGPT), or in parts of contents (``{type: image, image: ..}``, ``{type: image_url, ..}``,
as OpenAI and Qwen have them; a part that names none stands for the next one of ``images``). A
picture with a caption becomes a question without words and its answer. ``texts`` and ``images`` of
one length (OBELICS), or ``text_list`` and ``image_info`` (MMC4), are a document, all of it trained.
Of sounds the same holds with ``audio`` in place of ``image``, of videos with ``video``; a video is
a file or a list of frames. In place of a path there may be the bytes: a ``data:`` URL, or OpenAI's
``input_audio``.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.data.chat.conversations import ChatTokens, Conversations
from megatron_hdp.data.chat.megatron_formats import PREFIX
from megatron_hdp.data.chat.rows import (
    CONVERSATION_KEYS,
    BadConversationError,
    from_json,
    require_whole_characters,
)
from megatron_hdp.data.media import (
    BETWEEN,
    INLINE,
    MOST_BYTES,
    MOST_SIDE,
    ItemPlace,
    ItemSize,
    MediaError,
    MediaSettings,
    VideoSettings,
    bytes_of_item,
    listed_items,
    section,
    settings_of,
)
from megatron_hdp.data.spec import MediaSpec
from megatron_hdp.data.tokenizers import Tokenizer

_VERSION = 3  # of what this module makes of a row: another result is another version
_CAPTIONS = ("caption", "text", "txt")
_CONTENTS = ("content", "value")
_INPUT = "input_audio"
_PARTS = {f"{kind}{behind}" for kind in ("image", "video", "audio") for behind in ("", "_url")}
_PARTS.add(_INPUT)
_RATES = "sample_fps", "fps"  # of a list of frames
_CHOOSING = frozenset(
    {"fps", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"}
    | {"video_start", "video_end", "resized_height", "resized_width", "sample_fps", "raw_fps"}
)
"""Keys of a part by which Qwen's tools choose frames and pixels of one video."""
_Find = Callable[[Any, "int | None"], list[ItemPlace]]
"""The items of what is named, which has this number among those that are listed."""


@dataclass(frozen=True)
class _Frames:
    named: list[Any]
    rate: float | None
    """Frames a second, where the row says it."""


class MediaConversations:
    """Makes tokens of rows with pictures, as `Conversations` does of others."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        media: MediaSpec,
        folder: str,
        template: str | None = None,
        train_on: str = "assistant",
        append_eod: bool = True,
    ) -> None:
        """Prepare tokenizer and template.

        Args:
            tokenizer: of the model.
            media: what the source says of its pictures.
            folder: where their relative paths begin.
            template: as of `Conversations`, which may not be a ``megatron:`` format.
            train_on: likewise.
            append_eod: whether a document that is no conversation ends with the tokenizer's end.

        Raises:
            ValueError: as of `Conversations`, or the placeholder is no token of the tokenizer's.
        """
        if (template or "").startswith(PREFIX):
            raise ValueError(
                f"template {template} with pictures: expected a Jinja template or chatml, whose "
                "texts can hold them"
            )
        self._tokenizer, self._folder = tokenizer, folder
        self._settings = settings_of(media)
        self._append_eod = append_eod
        placeholder = self._settings.placeholder
        ids = tokenizer.tokenize_markup(placeholder)[0]
        if len(ids) != 1:
            raise ValueError(
                f"the placeholder {placeholder} becomes {len(ids)} tokens, expected one: give the "
                "model's tokenizer, or the token that stands for a picture (media: placeholder)"
            )
        self._placeholder = int(ids[0])
        self._conversations = Conversations(tokenizer, template, train_on)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits over all but the tokenizer that decides what rows become."""
        one = self._settings
        parts = (_VERSION, *one.preparing(), self._append_eod, self._conversations.fingerprint())
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    def render(self, row: Any, path: str, number: int) -> list[ChatTokens]:
        """Return the document of a row.

        Args:
            row: as it was read.
            path: the file in which it stands.
            number: its number there; of tables alone it must be that.

        Raises:
            BadConversationError: the row cannot be trained on; the message is a short reason.
            ValueError: none of the first rows could be masked: the template is at fault.
        """
        if not isinstance(row, dict):
            raise BadConversationError("the row is no object, expected one with `messages`")
        taken = _RowItems(row, self._settings, self._finder(path, number))
        if (text := taken.document()) is not None:
            found = self._document(text)
        else:
            (found,) = self._conversations.render(taken.conversation())
        taken.require_all_taken()
        places = np.flatnonzero(found.ids == self._placeholder)
        if len(places) != len(taken.items):
            raise BadConversationError(
                f"{len(places)} {self._settings.placeholder} among its tokens and "
                f"{taken.num_taken} {self._settings.noun}s, expected {len(taken.items)} for them: "
                "the template leaves them out, or a text holds the token itself"
            )
        return [
            replace(
                found,
                spans=_without(found.spans, places),
                items=tuple(taken.items),
                item_tokens=tuple(places.tolist()),
            )
        ]

    def _document(self, text: str) -> ChatTokens:
        require_whole_characters(text)
        ids = self._tokenizer.tokenize_markup(text)[0]
        if self._append_eod:
            ids = np.append(ids, self._tokenizer.eod)
        if len(ids) < 2:
            raise BadConversationError("no text beside its pictures")
        return ChatTokens(ids.astype(np.int64), np.array([[1, len(ids)]]))

    def _finder(self, path: str, number: int) -> _Find:
        """What finds the items of a row's picture, video or sound."""

        def find(reference: Any, place: int | None) -> list[ItemPlace]:
            try:
                return self._found(reference, path, number, place)
            except MediaError as error:
                raise BadConversationError(str(error)) from error
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                raise BadConversationError(
                    f"no {self._settings.noun} {error.filename}, expected it there: copy it, or "
                    "say where its path begins (media: folder)"
                ) from error

        return find

    def _found(self, reference: Any, path: str, number: int, place: int | None) -> list[ItemPlace]:
        """Where a picture, video or sound lies, and how large its items are by its header."""
        if isinstance(reference, _Frames | list):
            return self._listed(reference)
        if (raw := bytes_of_item(reference)) is not None:
            if place is None:
                raise MediaError(
                    f"a part with bytes, expected them under `{self._settings.lists[1]}`"
                )
            at = os.path.relpath(path, self._folder), number, place
            return self._sized(io.BytesIO(raw), f"{self._settings.noun} {place}", *at)
        if isinstance(reference, dict) and "offset" in reference:
            offset, size = int(reference["offset"]), int(reference["size"])
            with section(path, offset, size) as stream:
                at = os.path.relpath(path, self._folder), offset, size
                return self._sized(stream, str(reference.get("path")), *at)
        if (raw := _inline_bytes(reference, self._settings)) is not None:
            found = self._sized(io.BytesIO(raw), f"its {self._settings.noun}", INLINE, 0, len(raw))
            return [replace(one, raw=raw) for one in found]
        name = _path_of(reference, self._settings)
        with open(os.path.join(self._folder, name), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            return self._sized(stream, name, self._relative(name), 0, size)

    def _listed(self, reference: _Frames | list[Any]) -> list[ItemPlace]:
        """A video whose frames are files; all of them are seen."""
        frames = reference if isinstance(reference, _Frames) else _Frames(reference, None)
        if not isinstance(self._settings, VideoSettings) or not frames.named:
            raise MediaError(
                f"found {frames.named!r:.60} as a {self._settings.noun}, expected its path"
            )
        names = [_path_of(one, self._settings) for one in frames.named]
        label = f"{len(names):,} frames from {names[0]} on"
        sizes = self._settings.sizes_of_frames(self._streams(names), label, frames.rate)
        self._require(sizes[0], label)
        each, files = self._settings.resizing.frames_per_patch, list(map(self._relative, names))
        found = []
        for size in sizes:
            of_patch = files[each * size.part : each * (size.part + 1)]
            found.append(ItemPlace("".join(one + BETWEEN for one in of_patch), 0, 0, size))
        return found

    def _streams(self, names: Sequence[str]) -> Iterator[BinaryIO]:
        for name in names:
            with open(os.path.join(self._folder, name), "rb") as stream:
                yield stream

    def _relative(self, name: str) -> str:
        return os.path.relpath(os.path.join(self._folder, name), self._folder)

    def _sized(
        self, stream: BinaryIO, name: str, file: str, offset: int, size: int
    ) -> list[ItemPlace]:
        sizes = self._settings.sizes_of(stream, name)
        if size > MOST_BYTES:
            raise MediaError(f"{name}: found {size:,} bytes, expected at most 4 GiB: leave it out")
        self._require(sizes[0], name)
        return [ItemPlace(file, offset, size, one) for one in sizes]

    def _require(self, size: ItemSize, name: str) -> None:
        """Refuses an item that no encoder takes, or whose size cannot be stored."""
        if max(size.height, size.width) > MOST_SIDE:
            raise MediaError(
                f"{name}: found {size.height:,} x {size.width:,} pixels, expected at most "
                f"{MOST_SIDE:,} a side: make it smaller, or leave it out"
            )
        try:
            self._settings.rows(np.array([size.height]), np.array([size.width]), size.frames)
        except ValueError as error:
            raise MediaError(f"{name}: {error}") from error


class _RowItems:
    """The items of one row, in the order in which its texts have them."""

    def __init__(self, row: dict[str, Any], settings: MediaSettings, find: _Find) -> None:
        self._row, self._settings, self._find = dict(row), settings, find
        self.items: list[ItemPlace] = []
        self.num_taken = 0
        """Pictures, videos or sounds."""
        self._listed = list(enumerate(listed_items(row, settings.lists)))
        for key in settings.lists:
            self._row.pop(key, None)
        self._next = 0

    def document(self) -> str | None:
        """The text of an interleaved document; None: the row is none."""
        row = self._row
        if isinstance(texts := row.get("texts"), list):
            if len(texts) != len(self._listed):
                raise BadConversationError(
                    f"{len(texts)} `texts` and {len(self._listed)} "
                    f"`{self._settings.lists[1]}`, expected as many"
                )
            beside = [one for _, one in self._listed]
            self._listed = [(i, one) for i, one in self._listed if one]
            return "".join(
                _text(text) if text else self._taken(None) if one else ""
                for text, one in zip(texts, beside, strict=True)
            )
        if isinstance(texts := row.get("text_list"), list):
            infos = row.get("image_info") or []
            before: dict[int, list[Any]] = {}
            for one in infos:
                before.setdefault(int(one.get("matched_text_index", 0)), []).append(one)
            pieces = []
            for i, text in enumerate(texts):
                for one in before.get(i, ()):
                    pieces.append(self._taken(one.get("image_name") or one))
                pieces.append(_text(text))
            return " ".join(pieces)
        return None

    def conversation(self) -> dict[str, Any]:
        """The row with texts alone, in which pictures are written."""
        row = self._row
        key = next((key for key in CONVERSATION_KEYS if row.get(key) is not None), None)
        if key is not None:
            row = {**row, key: from_json(row[key], f"`{key}`")}
        if key is None or not isinstance(row[key], list):
            caption = next((row[one] for one in _CAPTIONS if isinstance(row.get(one), str)), None)
            if caption is None or not self._listed:
                return row
            marks = "".join(self._taken(None) for _ in self._listed)
            turns = [("user", marks), ("assistant", caption)]
            return {"messages": [{"role": role, "content": text} for role, text in turns]}
        return {**row, key: [self._message(one) for one in row[key]]}

    def require_all_taken(self) -> None:
        """Refuses a row that has other pictures than its texts say.

        Raises:
            BadConversationError: gives both numbers.
        """
        if self._next != len(self._listed):
            raise BadConversationError(
                f"{self._next} {self._settings.mark} in its texts and {len(self._listed)} "
                f"{self._settings.noun}s, expected as many"
            )

    def _message(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        key = next((key for key in _CONTENTS if message.get(key) is not None), None)
        if key is None:
            return message
        content = message[key]
        if isinstance(content, str):
            return {**message, key: self._marked(content)}
        if isinstance(content, list) and any(map(self._is_medium, content)):
            return {**message, key: "".join(map(self._part, content))}
        return message

    def _part(self, part: Any) -> str:
        if isinstance(part, str):
            return self._marked(part)
        if self._is_item(part):
            kinds = *self._kinds, "path", "url"
            named = next((part[key] for key in kinds if part.get(key) is not None), None)
            return self._taken(self._of_video(part, named), is_part=True)
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadConversationError(
                f"a part `{kind}`, expected text or a {self._settings.noun}: items of a source are "
                "of one kind (media: kind)"
            )
        return self._marked(text)

    @property
    def _kinds(self) -> tuple[str, ...]:
        """Of parts that are items."""
        kind = self._settings.lists[0]
        return kind, f"{kind}_url", *([_INPUT] if _INPUT.endswith(kind) else [])

    def _is_item(self, part: Any) -> bool:
        return isinstance(part, dict) and part.get("type") in self._kinds

    def _is_medium(self, part: Any) -> bool:
        """Whether a part is an item, or one of another kind, which is refused."""
        return isinstance(part, dict) and part.get("type") in _PARTS

    def _of_video(self, part: dict[str, Any], named: Any) -> Any:
        """What a part names; of a list of frames also how many it has a second."""
        if not isinstance(self._settings, VideoSettings):
            return named
        known = _RATES if isinstance(named, list) else ()
        if others := sorted(_CHOOSING.intersection(part).difference(known)):
            raise BadConversationError(
                f"found {', '.join(others)} beside a video, expected it of the whole source "
                "(media: frames-per-second, most-frames, most-pixels)"
            )
        if not isinstance(named, list):
            return named
        rate = next((part[key] for key in _RATES if key in part), None)
        if rate is not None and not (isinstance(rate, int | float) and rate > 0):
            raise BadConversationError(f"found {rate!r:.40} frames a second, expected a number")
        return _Frames(named, rate)

    def _marked(self, text: str) -> str:
        first, *others = text.split(self._settings.mark)
        return first + "".join(self._taken(None) + one for one in others)

    def _taken(self, named: Any, *, is_part: bool = False) -> str:
        """What stands for a picture, which is the next of those that are listed if it has no name.

        One mark too many is counted here, and refused once all are.
        """
        place = None
        if named is None:
            self._next += 1
            if self._next > len(self._listed):
                return self._settings.mark
            place, named = self._listed[self._next - 1]
        found = self._find(named, place)
        self.items += found
        self.num_taken += 1
        sizes = [one.of for one in found]
        return self._settings.written(sizes, self.num_taken if is_part else None)


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise BadConversationError(f"found {text!r:.40} among its texts, expected a text")
    return text


def _named(reference: Any, settings: MediaSettings) -> Any:
    """What an item is named by, without what lies around it."""
    named, keys = reference, ("path", "url", settings.lists[0], "data")
    while isinstance(named, dict):
        named = next((named[key] for key in keys if named.get(key)), None)
    return named


def _inline_bytes(reference: Any, settings: MediaSettings) -> bytes | None:
    """The bytes that stand in a row in base64; None where it has a path."""
    named = _named(reference, settings)
    is_url = isinstance(named, str) and named.startswith("data:")
    if not is_url and not (isinstance(reference, dict) and "data" in reference):
        return None
    head, _, text = named.partition(",") if is_url else ("base64", "", named)
    try:
        if not head.endswith("base64") or not isinstance(text, str):
            raise ValueError
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise MediaError(
            f"found {named!r:.40} as a {settings.noun}, expected its bytes in base64"
        ) from None


def _path_of(reference: Any, settings: MediaSettings) -> str:
    """The path that an item is named by."""
    named = _named(reference, settings)
    if not isinstance(named, str):
        raise BadConversationError(
            f"found {reference!r:.60} as a {settings.noun}, expected its path"
        )
    kind = named.partition(":")[0]
    if kind in ("http", "https", "data"):
        raise BadConversationError(
            f"a {settings.noun} that begins with {kind}:, expected the path of a file: save it as "
            "one"
        )
    return named.removeprefix("file://")


def _without(spans: Int64Array, places: Sequence[int] | Int64Array) -> Int64Array:
    """Spans that leave out some tokens, so that no picture is to be predicted."""
    found = []
    for start, stop in spans.tolist():
        inside = [int(place) for place in places if start <= place < stop]
        borders = [start, *(b for place in inside for b in (place, place + 1)), stop]
        found += [
            pair for pair in zip(borders[::2], borders[1::2], strict=True) if pair[0] < pair[1]
        ]
    if not found:
        raise BadConversationError("no token to train on but items")
    return np.array(found, dtype=np.int64)
