"""Where the assistant's turns lie in the text of a conversation, by rendering its beginnings.

The text of the messages before a turn, with the prompt that asks for it, is what a model is given;
what the whole conversation has behind it is what the model must write. So a turn goes from the end
of ``messages[:i]`` with prompt to the end of ``messages[:i + 1]``, if both begin the whole text.

Many templates write a turn otherwise once others follow: they drop its thoughts, or end the last
turn with another token, or move the system message. Then the turn is found by its content: the
conversation is written once more with a mark in the content's place, and what stands before and
behind the mark stands before and behind the content. From there the turn reaches back to the
prompt, and on to the text by which this template ends turns (``traits``). Each step is compared
with the whole text; where one does not hold, the conversation is refused, never masked by guess.

What ends a turn belongs to it; white space that the template puts after that does not.
"""

import re

from megatron_hdp.data.chat.rows import LEADING, BadConversationError, Conversation, Message
from megatron_hdp.data.chat.templates import ChatTemplate
from megatron_hdp.data.chat.traits import MARK, Traits, beginning, prompts, questions, traits_of

Range = tuple[int, int]

_PROBE: list[Message] = [
    {"role": "user", "content": "zero"},
    {"role": "assistant", "content": "one"},
]


class UnmaskableError(BadConversationError):
    """The template writes this conversation so that its turns cannot be told apart."""


class TurnFinder:
    """Finds turns in what one template writes."""

    def __init__(self, template: ChatTemplate) -> None:
        """Learn how the template writes turns, and try it.

        Raises:
            ValueError: it can write a conversation, but its turns cannot be found.
        """
        self._template = template
        self._traits = traits_of(template)
        text = beginning(template, _PROBE)
        if text is None:
            return  # it wants more than that; the rows will tell
        try:
            (turn,) = self.find(Conversation(_PROBE, None, [False, True]), text, [1])
        except UnmaskableError as error:
            raise ValueError(f"this template cannot be masked: {error}") from error
        if "one" not in text[slice(*turn)]:
            raise ValueError(
                "this template cannot be masked: it leaves out what the assistant says"
            )

    def find(self, conversation: Conversation, text: str, turns: list[int]) -> list[Range]:
        """Return where turns, rising indices of messages, lie in the text of the conversation.

        Returns:
            The first character and the one behind the last of each turn, in the order of ``turns``.

        Raises:
            UnmaskableError: a turn cannot be placed exactly.
            BadConversationError: the template leaves out what a turn calls.
        """
        view = _View(self._template, self._traits, conversation, text)
        found = [view.turn(number) for number in turns]
        before = 0
        for number, (start, stop) in zip(turns, found, strict=True):
            if not before <= start < stop:
                raise UnmaskableError(f"message {number} cannot be told from the turn before it")
            before = stop
            for call in conversation.messages[number].get("tool_calls", []):
                if call["function"]["name"] not in text[start:stop]:
                    raise BadConversationError(
                        f"the chat template leaves out the tool calls of message {number}"
                    )
        return found


class _View:
    """One conversation, its text, and what has been found out about it."""

    def __init__(
        self, template: ChatTemplate, traits: Traits, conversation: Conversation, text: str
    ) -> None:
        self._template, self._traits = template, traits
        self._messages, self._tools = conversation.messages, conversation.tools
        self._text = text
        self._contents: dict[int, Range | None] = {}

    def turn(self, number: int) -> Range:
        """Return where the turn of message ``number`` lies."""
        start = self._start(number)
        stop = self._stop(number, start)
        written = self._text[start:stop]
        kept = len(written.rstrip())
        if any(written.endswith(end, 0, kept) for end in self._traits.ends):
            stop = start + kept
        return start, stop

    def _start(self, number: int) -> int:
        """Return the character behind the prompt for a turn."""
        given, quiet = self._messages[:number], self._traits.quiet
        asked = prompts(self._template, given, self._tools, thinking_only=bool(quiet))
        fitting = [len(prompt) for prompt in asked if self._text.startswith(prompt)]
        if fitting:  # a turn without thoughts is one that was asked without
            start = max(fitting)
            return start + (len(quiet) if self._text.startswith(quiet, start) else 0)
        content, before = self._content(number), self._content(number - 1)
        if before is not None:
            begin = before[1]
            limit = content[0] if content else self._limit(number, begin)
            begin = max([begin, *(stop for _, stop in self._leading() if stop <= limit)])
            for question in (*self._questions(given), *self._traits.headers):
                place = self._text.find(question, begin, limit)
                if place >= 0:
                    return place + len(question)
        if content is None:
            raise UnmaskableError(f"this template cannot be masked where message {number} begins")
        return len(self._text[: content[0]].rstrip(" "))  # spaces are of the first word's token

    def _questions(self, given: list[Message]) -> list[str]:
        return questions(self._template, given, self._tools, self._traits.closing)

    def _stop(self, number: int, start: int) -> int:
        """Return the character behind a turn, white space after it included where there is any."""
        if number == len(self._messages) - 1:
            return len(self._text.removesuffix(self._traits.closing))
        given = self._messages[: number + 1]
        upto = beginning(self._template, given, self._tools, self._traits.closing)
        if upto is not None and len(upto) > start and self._text.startswith(upto):
            return len(upto)
        content = self._content(number)
        if content and not self._messages[number].get("tool_calls"):
            ends = self._traits.ends or self._traits.bare_ends
            found = [
                content[1] + len(end) for end in ends if self._text.startswith(end, content[1])
            ]
        else:  # arguments may hold what ends turns: the last one is the template's
            begin = content[1] if content else start
            limit = self._limit(number, begin)
            places = ((self._text.rfind(end, begin, limit), end) for end in self._traits.ends)
            found = [place + len(end) for place, end in places if place >= 0]
        if not found:
            raise UnmaskableError(f"this template cannot be masked where message {number} ends")
        return max(found)

    def _limit(self, number: int, begin: int) -> int:
        """Return a character behind ``begin`` that a turn ends before: the next content's first."""
        if number == len(self._messages) - 1:
            return len(self._text)
        behind = [start for start, _ in self._leading() if start >= begin]
        limit = min(behind, default=len(self._text))
        following = self._content(number + 1)
        if following is not None:
            return min(limit, following[0])
        if self._messages[number + 1]["role"] == "assistant":
            return min(limit, self._start(number + 1))
        raise UnmaskableError(f"this template cannot be masked where message {number} ends")

    def _leading(self) -> list[Range]:
        """Return where the system message lies, which templates move into other turns."""
        numbers = [i for i in (0, 1) if self._messages[i]["role"] in LEADING]
        return [place for place in map(self._content, numbers) if place is not None]

    def _content(self, number: int) -> Range | None:
        """Return where the content of a message lies, None if it has none or cannot be placed."""
        if not self._contents:
            self._contents |= self._all_contents()
        if number not in self._contents:
            self._contents[number] = self._placed_content(number)
        return self._contents[number]

    def _all_contents(self) -> dict[int, Range | None]:
        """Return where contents lie if all are written as they are, or but for white space."""
        mark = self._mark()
        texts = [message.get("content", "") for message in self._messages]
        numbers = [number for number, text in enumerate(texts) if text.strip()]
        other = [dict(message) for message in self._messages]
        for number in numbers:
            other[number]["content"] = f"{mark}{number}z"
        written = beginning(self._template, other, self._tools) or ""
        pieces = re.split(rf"{mark}(\d+)z", written)
        order, pieces = pieces[1::2], pieces[::2]
        if order != [str(number) for number in numbers]:
            return {}
        found: dict[int, Range | None] = {}
        place = 0
        for number, piece in zip(numbers, pieces[:-1], strict=True):
            start = place + len(piece)
            is_whole = self._text.startswith(texts[number], start)
            content = texts[number] if is_whole else texts[number].strip()
            place = start + len(content)
            held = self._text.startswith(piece, start - len(piece))
            if not held or not self._text.startswith(content, start):
                return {}
            found[number] = (start, place)
        return found if self._text[place:] == pieces[-1] else {}

    def _placed_content(self, number: int) -> Range | None:
        content = self._messages[number].get("content", "").strip() if number >= 0 else ""
        if not content:
            return None
        mark = self._mark()
        other = [dict(message) for message in self._messages]
        other[number]["content"] = mark
        written = beginning(self._template, other, self._tools)
        if written is None or written.count(mark) != 1:
            return None
        before, behind = written.split(mark)
        start, stop = len(before), len(self._text) - len(behind)
        if not self._text.startswith(before) or not self._text.endswith(behind) or start >= stop:
            return None
        is_turn = self._messages[number]["role"] == "assistant"
        return None if is_turn and self._text[start:stop].strip() not in content else (start, stop)

    def _mark(self) -> str:
        """Return a word that the text does not have."""
        mark = MARK
        while mark in self._text:
            mark += MARK
        return mark
