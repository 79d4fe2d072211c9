"""Where the assistant's turns lie in the text of a conversation, by rendering its beginnings.

The text of the messages before a turn, with the prompt that asks for it, is what a model is given;
what the whole conversation has behind it is what the model must write. So a turn goes from the end
of ``messages[:i]`` with prompt to the end of ``messages[:i + 1]``, if both begin the whole text.

Many templates write a turn otherwise once others follow: they drop its thoughts, or end the last
turn with another token, or move the system message. Then the turn is found by its content: the
conversation is written once more with a mark in the content's place, and what stands before and
behind the mark stands before and behind the content. From there the turn reaches back to the
prompt, and on to the text by which this template ends turns. Each step is compared with the whole
text; where one does not hold, the conversation is refused, never masked by guess.

What ends a turn belongs to it; white space that the template puts after that does not.
"""

import os
from typing import Any

from megatron_hdp.data.chat.rows import LEADING, BadConversationError, Conversation, Message
from megatron_hdp.data.chat.templates import ChatTemplate

Range = tuple[int, int]

_USER: Message = {"role": "user", "content": "zero"}


class UnmaskableError(BadConversationError):
    """The template writes this conversation so that its turns cannot be told apart."""


class TurnFinder:
    """Finds turns in what one template writes."""

    def __init__(self, template: ChatTemplate) -> None:
        """Learn from made-up conversations how the template ends turns.

        Raises:
            ValueError: it can write a conversation, but its turns cannot be found.
        """
        self._template = template
        self._ends = _ends_of_turns(template)
        probe: list[Message] = [_USER, {"role": "assistant", "content": "one"}]
        conversation = Conversation(probe, None, [False, True])
        try:
            text = template.render(probe)
        except BadConversationError:
            return  # it wants more than that; the rows will tell
        try:
            (turn,) = self.find(conversation, text, [1])
        except UnmaskableError as error:
            raise ValueError(f"this template cannot be masked: {error}") from error
        if "one" not in text[slice(*turn)]:
            raise ValueError(
                "this template cannot be masked: it leaves out what the assistant says"
            )

    def find(self, conversation: Conversation, text: str, turns: list[int]) -> list[Range]:
        """Return where turns lie in the text of the whole conversation.

        Args:
            conversation: in an order that has been checked.
            text: what the template makes of it.
            turns: indices of assistant messages, rising.

        Returns:
            The first character and the one behind the last of each turn, in the order of ``turns``.

        Raises:
            UnmaskableError: a turn cannot be placed exactly.
        """
        view = _View(self._template, conversation, text, self._ends)
        found = [view.turn(number) for number in turns]
        for number, (start, stop), (_, before) in zip(
            turns, found, [(0, 0), *found[:-1]], strict=True
        ):
            if not before <= start < stop:
                raise UnmaskableError(f"message {number} cannot be told from the turn before it")
        return found


class _View:
    """One conversation, its text, and what has been found out about it."""

    def __init__(
        self, template: ChatTemplate, conversation: Conversation, text: str, ends: list[str]
    ) -> None:
        self._template = template
        self._messages, self._tools = conversation.messages, conversation.tools
        self._text = text
        self._ends = ends
        self._contents: dict[int, Range | None] = {}

    def turn(self, number: int) -> Range:
        """Return where the turn of message ``number`` lies."""
        start = self._start(number)
        stop = self._stop(number, start)
        written = self._text[start:stop]
        kept = len(written.rstrip())
        if any(written.endswith(end, 0, kept) for end in self._ends):
            stop = start + kept
        return start, stop

    def _start(self, number: int) -> int:
        """Return the character behind the prompt for a turn."""
        prompts = _prompts(self._template, self._messages[:number], self._tools)
        fitting = [len(prompt) for prompt in prompts if self._text.startswith(prompt)]
        if fitting:  # a turn without thoughts is one that was asked without
            return max(fitting)
        content, before = self._content(number), self._content(number - 1)
        if before is not None:
            begin = before[1]
            limit = content[0] if content else self._limit(number, begin)
            begin = max([begin, *(stop for _, stop in self._leading() if stop <= limit)])
            for question in _questions(self._template, self._messages[:number], self._tools):
                place = self._text.find(question, begin, limit)
                if place >= 0:
                    return place + len(question)
        if content is None:
            raise UnmaskableError(f"this template cannot be masked where message {number} begins")
        return len(self._text[: content[0]].rstrip(" "))  # spaces are of the first word's token

    def _stop(self, number: int, start: int) -> int:
        """Return the character behind a turn, white space after it included where there is any."""
        if number == len(self._messages) - 1:
            return len(self._text)
        upto = _render(self._template, self._messages[: number + 1], self._tools)
        if upto is not None and len(upto) > start and self._text.startswith(upto):
            return len(upto)
        content = self._content(number)
        if content and not self._messages[number].get("tool_calls"):
            places = [
                content[1] if self._text.startswith(end, content[1]) else -1 for end in self._ends
            ]
        else:  # arguments may hold what ends turns: the last one is the template's
            begin = content[1] if content else start
            limit = self._limit(number, begin)
            places = [self._text.rfind(end, begin, limit) for end in self._ends]
        found = [
            place + len(end) for place, end in zip(places, self._ends, strict=True) if place >= 0
        ]
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
        if number not in self._contents:
            self._contents[number] = self._placed_content(number)
        return self._contents[number]

    def _placed_content(self, number: int) -> Range | None:
        content = self._messages[number].get("content", "").strip() if number >= 0 else ""
        if not content:
            return None
        mark = "qzx"
        while mark in self._text:
            mark += "qzx"
        other = [dict(message) for message in self._messages]
        other[number]["content"] = mark
        written = _render(self._template, other, self._tools)
        if written is None or written.count(mark) != 1:
            return None
        before, behind = written.split(mark)
        start, stop = len(before), len(self._text) - len(behind)
        if not self._text.startswith(before) or not self._text.endswith(behind) or start >= stop:
            return None
        is_turn = self._messages[number]["role"] == "assistant"
        return None if is_turn and self._text[start:stop].strip() not in content else (start, stop)


def _ends_of_turns(template: ChatTemplate) -> list[str]:
    """Return the texts that end turns: the last one, one before others, one that calls a tool.

    None where white space alone ends them: it cannot be told from the template's other white space.
    """
    mark = "qzx"
    answers = _whole_turns(template, {"role": "assistant", "content": mark})
    ends = {text.rpartition(mark)[2].rstrip() for text in answers if mark in text} - {""}
    if not ends:
        return []
    calls = [
        _whole_turns(template, {"role": "assistant", "content": "", "tool_calls": [call]})
        for call in (
            {"type": "function", "function": {"name": "one", "arguments": {"one": "two"}}},
            {"type": "function", "function": {"name": "two", "arguments": {"three": 4}}},
        )
    ]
    for first, second in zip(*calls, strict=False):
        if first != second:  # else it does not write calls
            ends.add(os.path.commonprefix([first[::-1], second[::-1]])[::-1].rstrip())
    return sorted(ends - {""})


def _whole_turns(template: ChatTemplate, turn: Message) -> list[str]:
    """Return a conversation that ends with a turn, as it stands alone and before other turns."""
    alone = _render(template, [_USER, turn], None)
    followed = _render(template, [_USER, turn], None, prompt=True)
    found = [alone] if alone is not None else []
    for question in _questions(template, [_USER], None):
        if followed is not None and followed.endswith(question):
            return [*found, followed.removesuffix(question)]
    return found


def _prompts(template: ChatTemplate, messages: list[Message], tools: list[Any] | None) -> list[str]:
    """Return each text that can ask for the next turn."""
    switches = (True, False) if template.knows_thinking else (True,)
    texts = (_render(template, messages, tools, prompt=True, thinking=one) for one in switches)
    return [text for text in texts if text is not None]


def _questions(
    template: ChatTemplate, messages: list[Message], tools: list[Any] | None
) -> list[str]:
    """Return what the prompts add to the messages, the longest first."""
    plain = _render(template, messages, tools)
    if plain is None:
        return []
    prompts = _prompts(template, messages, tools)
    added = {prompt[len(plain) :] for prompt in prompts if prompt.startswith(plain)}
    return sorted(added - {""}, key=len, reverse=True)


def _render(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[Any] | None,
    *,
    prompt: bool = False,
    thinking: bool = True,
) -> str | None:
    """Return the text of a part of a conversation, None where the template refuses the part."""
    try:
        return template.render(messages, tools, prompt=prompt, thinking=thinking)
    except BadConversationError:
        return None
