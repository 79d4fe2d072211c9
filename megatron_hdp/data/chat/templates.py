"""A chat template: Jinja in a sandbox, with the names that Hugging Face's templates expect."""

import datetime
import json
from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn

from megatron_hdp.data.chat.rows import BadConversationError, Message, TooCostlyError
from megatron_hdp.data.extras import import_extra

CHATML = r"""
{%- if tools -%}
    {{- raise_exception('ChatML has no form for tools: give a template that has') -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.tool_calls or message.reasoning_content -%}
        {{- raise_exception('ChatML has no form for calls and reasoning: give a template') -}}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""
"""Each turn between two marks; for tokenizers without a template of their own."""

TODAY = datetime.datetime(2024, 7, 26)
"""The day that templates write as today's: always the same, or tokens would change overnight."""

_NO_THINKING = "enable_thinking"
# What a template can stumble over in a row: its own refusals, and Python's over types and keys.
_PYTHON_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)


class ChatTemplate:
    """A compiled template.

    Attributes:
        source: its text.
        knows_thinking: whether it takes ``enable_thinking``, the usual switch of a prompt that asks
            for an answer without thoughts.
        eos_token: text of the token that ends texts, empty if it has no name.
    """

    def __init__(self, source: str, name: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template.

        Raises:
            ValueError: it is no Jinja template.
            ModuleNotFoundError: jinja2 is not installed.
        """
        self.source = source
        self.knows_thinking = _NO_THINKING in source
        self.eos_token = special_tokens.get("eos_token", "")
        self._special_tokens = dict(special_tokens)
        self._jinja = import_extra("jinja2", "a chat template")
        environment, self._metered = _environment()
        try:
            tree, self._weight = environment.prepared(source)
            with self._metered(self._weight, source):
                self._template = environment.from_string(tree)
        except RecursionError as error:
            raise ValueError(
                f"{name} does not compile ({error}), expected a Jinja template that writes "
                "`messages`"
            ) from error
        except self._jinja.TemplateSyntaxError as error:
            raise ValueError(
                f"{name} does not compile, line {error.lineno}: {error.message}; expected a Jinja "
                "template that writes `messages`"
            ) from error

    def render(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        *,
        prompt: bool = False,
        thinking: bool = True,
    ) -> str:
        """Return the text of messages.

        Args:
            messages: as in :class:`~megatron_hdp.data.chat.rows.Conversation`.
            tools: likewise.
            prompt: end with what asks the assistant for its turn.
            thinking: False: ask for an answer without thoughts.

        Raises:
            BadConversationError: the template refuses the messages or fails over them;
                TooCostlyError: it takes far more time or memory than they should.
        """
        switch = {} if thinking else {_NO_THINKING: False}
        try:
            with self._metered(self._weight, (messages, tools)):
                return str(
                    self._template.render(
                        **self._special_tokens,
                        **switch,
                        messages=messages,
                        tools=tools,
                        documents=None,
                        add_generation_prompt=prompt,
                    )
                )
        except TooCostlyError as error:
            raise TooCostlyError(f"the chat template is too costly for it: {error}") from None
        except (self._jinja.TemplateError, ValueError, *_PYTHON_ERRORS) as error:
            raise BadConversationError(f"the chat template refuses it: {error}") from error


@cache
def _environment() -> tuple[Any, Any]:
    """Make the environment that templates of Hugging Face tokenizers are written for.

    With it comes what limits them.
    """
    import_extra("jinja2", "a chat template")
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    from megatron_hdp.data.chat.metering import MeteredEnvironment, metered

    class Generation(Extension):
        """``{% generation %}`` marks what some templates take for the assistant's; only a scope."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = MeteredEnvironment(
        {"tojson": _tojson},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment, metered


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is; Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
