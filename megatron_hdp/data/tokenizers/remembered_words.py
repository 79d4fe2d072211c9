r"""Byte-level BPE of ASCII text by words, each of which the model is asked for once.

A byte-level tokenizer cuts text into words by a regular expression and merges the bytes of each by
itself. Text repeats its words, so most of the library's time goes into cutting them and into
offsets that nobody wants here. For ASCII text Python's ``re`` cuts the same words: there the
classes of the expression have no version of Unicode in them. What the expressions of the common
tokenizers become is a table; with another one nothing is remembered.

Other text is cut where one word always ends, whatever stands around: between something printed and
a space. None of the expressions has a word across it, none looks from one side to the other, and no
normal form composes across it. Parts that are not ASCII are the library's.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _GPT_4.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN_PATTERNS = (_GPT_2, _GPT_4, _QWEN_2, _GPT_4O)
"""Of GPT-2, GPT-4 and Llama 3, Qwen 2, GPT-4o; as their tokenizers spell them."""

_CLASSES = {  # what of ASCII is in them; "\s" of Python has four control characters more
    **{r"\p{L}": "A-Za-z", r"\p{N}": "0-9", r"\s": r"\t-\r ", r"\S": r"\x00-\x08\x0e-\x1f!-\x7f"},
    **{r"\p{Lu}": "A-Z", r"\p{Ll}": "a-z", r"\p{Lt}": "", r"\p{Lm}": "", r"\p{Lo}": ""},
    r"\p{M}": "",
}
_OTHER = re.compile(r"[^\x00-\x7f]")
_END = re.compile(r"(?<=[!-~]) ")  # of a word, always
_LEAST_OTHER = 256  # characters, so that text of another script is not asked for by the word
_PLAIN_BYTES = range(33, 127)  # stand for themselves in the alphabet of byte-level models
_MOST_WORDS, _LONGEST_WORD = 2**18, 64  # that are remembered: some 50 MB


class RememberedWords:
    """The ids of ASCII text; of each word they are asked for once, while not too many are known."""

    def __init__(
        self,
        pattern: re.Pattern[str],
        ids_of: Callable[[str], Sequence[int]],
        added: Iterable[str],
    ) -> None:
        """Set what cuts text into words, who knows their ids, and tokens to look for before."""
        self._words_of = pattern.findall
        self._ids = _Ids(ids_of)
        tokens = "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))
        self._finds_added = re.compile(tokens).search if tokens else lambda text: None

    def parts_of(self, text: str) -> list[list[int] | str]:
        """Return a text as parts: ids, or text that only the library can tell those of."""
        parts: list[list[int] | str] = []
        begin = 0
        while (found := _OTHER.search(text, begin)) is not None:
            left = _last_end(text, begin, found.start())
            right = _END.search(text, found.end() + _LEAST_OTHER)
            end = len(text) if right is None else right.start()
            if begin < left:
                parts.append(self._known(text[begin:left]))
            parts.append(text[left:end])
            begin = end
        if begin < len(text):
            parts.append(self._known(text[begin:]))
        return parts

    def _known(self, text: str) -> list[int] | str:
        if self._finds_added(text):
            return text
        if len(self._ids) > _MOST_WORDS:
            self._ids.clear()
        return list(chain.from_iterable(map(self._ids.__getitem__, self._words_of(text))))


def _last_end(text: str, begin: int, end: int) -> int:
    """Return the last place of a piece where a word always ends; its beginning if there is none."""
    while (place := text.rfind(" ", begin + 1, end)) >= 0:
        if "!" <= text[place - 1] <= "~":
            return place
        end = place
    return begin


class _Ids(dict[str, tuple[int, ...]]):
    """Ids by word; those of a word that is missing are asked for."""

    def __init__(self, ids_of: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._ids_of = ids_of

    def __missing__(self, word: str) -> tuple[int, ...]:
        found = tuple(self._ids_of(word.translate(_ALPHABET)))
        if len(word) <= _LONGEST_WORD:
            self[word] = found
        return found


def heeds_surroundings(token: Any) -> bool:
    """Whether an added token may be found otherwise where the text around it is cut off.

    It may where it takes in spaces behind it, or is one only between other words.
    """
    return token.rstrip or token.single_word or _END.search(token.content) is not None


def ascii_pattern(
    normalizer: Mapping[str, Any] | None, pre_tokenizer: Mapping[str, Any] | None
) -> re.Pattern[str] | None:
    """Return what cuts ASCII text as a tokenizer does, or None if it is not known to.

    Normalizer and pre-tokenizer are those of its ``tokenizer.json``.
    """
    if normalizer is not None and normalizer.get("type") != "NFC":  # ASCII stays as it is
        return None
    parts = [pre_tokenizer or {}]
    if parts[0].get("type") == "Sequence":
        parts = list(parts[0]["pretokenizers"])
    last = parts[-1] if parts else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if last.get("use_regex", True):
        return compiled_for_ascii(_GPT_2) if len(parts) == 1 else None
    found = parts[0].get("pattern", {}).get("Regex")
    split = {"type": "Split", "pattern": {"Regex": found}, "behavior": "Isolated", "invert": False}
    if len(parts) != 2 or parts[0] != split or found not in KNOWN_PATTERNS:
        return None
    return compiled_for_ascii(found)


def compiled_for_ascii(pattern: str) -> re.Pattern[str]:
    """Return a known pattern with its classes spelled out as far as they are ASCII."""

    def spelled(found: re.Match[str]) -> str:
        name, in_brackets = found.group(), _is_in_brackets(pattern, found.start())
        return _CLASSES[name] if in_brackets else f"[{_CLASSES[name]}]"

    return re.compile(re.sub(r"\\p\{\w+\}|\\[sS]", spelled, pattern))


def _is_in_brackets(pattern: str, place: int) -> bool:
    return pattern.rfind("[", 0, place) > pattern.rfind("]", 0, place)


def _alphabet() -> dict[int, int]:
    """The letters that stand for bytes of ASCII; those that cannot be seen come after Latin-1."""
    hidden = [byte for byte in range(128) if byte not in _PLAIN_BYTES]
    return {byte: 256 + number for number, byte in enumerate(hidden)}


_ALPHABET = _alphabet()
