"""Chat templates with the traits of well-known ones, and what each writes, piece by piece.

A template is Jinja; beside it stands a function that writes the same text in plain Python and says
of every piece whether the model must write it: small enough to be believed.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_hdp.data.chat.templates import CHATML

Piece = tuple[str, bool]
TOKENS = {"bos_token": "<bos>", "eos_token": "</s>"}


@dataclass(frozen=True)
class Written:
    """A template and its twin."""

    source: str
    pieces: Callable[[list[dict], list | None], Iterator[Piece]]
    takes_tools: bool = False
    """Whether it writes calls and reasoning."""
    takes_calls: bool = True
    """If not, it writes reasoning alone."""
    text_arguments: bool = False
    """Whether it wants the arguments of calls as JSON text."""


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(call: dict) -> str:
    return _json(call["function"])


def chatml(messages, tools):
    """Turns between marks, nothing else."""
    for message in messages:
        is_turn = message["role"] == "assistant"
        yield f"<|im_start|>{message['role']}\n", False
        yield f"{message['content']}<|im_end|>", is_turn
        yield "\n", False


LLAMA = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|head|>system<|/head|>\n\nToday: ' + strftime_now('%d %b %Y') + '\n\n' }}
{%- for tool in tools or [] %}
    {{- tool | tojson }}
{%- endfor %}
{{- (system or '') + '<|eot|>' }}
{%- for message in messages %}
    {{- '<|head|>' + message.role + '<|/head|>\n\n' }}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {{- message.tool_calls[0].function | tojson }}
    {%- else %}
        {%- generation %}{{- message.content | trim }}{% endgeneration %}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\n\n' }}
{%- endif %}
"""


def llama(messages, tools):
    """BOS, a date line in a system turn that is always there, one call a turn, trimmed contents."""
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"].strip(), messages[1:]
    head = "<bos><|head|>system<|/head|>\n\nToday: 26 Jul 2024\n\n"
    yield head + "".join(map(_json, tools or [])) + system + "<|eot|>", False
    for message in messages:
        yield f"<|head|>{message['role']}<|/head|>\n\n", False
        calls = "".join(map(_call, message.get("tool_calls", [])))
        yield (calls or message["content"].strip()) + "<|eot|>", message["role"] == "assistant"


QWEN = r"""
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n' + tools | tojson + '<|im_end|>\n' }}
{%- endif %}
{%- set query = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set query.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<result>\n' + message.content + '\n</result>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
        {%- continue %}
    {%- endif %}
    {%- set content = message.content or '' %}
    {%- set thoughts = message.reasoning_content or '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > query.last and (loop.last or thoughts) %}
        {{- '<think>\n' + thoughts + '\n</think>\n\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n' if content or not loop.first else '' }}
        {{- '<call>\n' + call.function | tojson + '\n</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""


def qwen(messages, tools):
    """Thoughts of earlier turns dropped, an empty block of them in the last, results as users'."""
    if tools:
        yield f"<|im_start|>system\n# Tools\n{_json(tools)}<|im_end|>\n", False
    last_query = max(i for i, message in enumerate(messages) if message["role"] == "user")
    roles = ["", *(message["role"] for message in messages), ""]
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content", "")
        if role == "tool":
            yield "<|im_start|>user" if roles[i] != "tool" else "", False
            yield f"\n<result>\n{content}\n</result>", False
            yield "<|im_end|>\n" if roles[i + 2] != "tool" else "", False
            continue
        yield f"<|im_start|>{role}\n", False
        thoughts = message.get("reasoning_content", "")
        if role == "assistant" and "</think>" in content:
            thoughts, content = content.split("</think>")
            thoughts, content = thoughts.split("<think>")[-1].strip("\n"), content.lstrip("\n")
        if role == "assistant" and i > last_query and (i == len(messages) - 1 or thoughts):
            yield f"<think>\n{thoughts}\n</think>\n\n", bool(thoughts)
        for call in message.get("tool_calls", []):
            content += "\n" if content else ""
            content += f"<call>\n{_call(call)}\n</call>"
        yield f"{content}<|im_end|>", role == "assistant"
        yield "\n", False


GEMMA = r"""
{{- bos_token }}
{%- set head = '' %}
{%- if messages[0].role == 'system' %}
    {%- set head = messages[0].content | trim + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {{- '<turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
    {{- head if loop.first else '' }}
    {{- message.content | trim + '</turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<turn>model\n' }}
{%- endif %}
"""


def gemma(messages, tools):
    """The system message in the first user's turn, strict alternation, trimmed contents."""
    yield "<bos>", False
    head = ""
    if messages[0]["role"] == "system":
        head, messages = messages[0]["content"].strip() + "\n\n", messages[1:]
    for message in messages:
        is_turn = message["role"] == "assistant"
        yield f"<turn>{'model' if is_turn else 'user'}\n{head}", False
        yield f"{message['content'].strip()}</turn>", is_turn
        yield "\n", False
        head = ""


CHANNELS = r"""
{{- '<|start|>system<|message|>Date: ' + strftime_now('%Y-%m-%d') }}
{%- for tool in tools or [] %}
    {{- '\n' + tool.function.name }}
{%- endfor %}
{{- '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>tool<|message|>' + message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}
        {%- set later = later | rejectattr('tool_calls', 'defined') | list %}
        {%- if message.thinking and not later %}
            {{- '<|start|>assistant<|channel|>thoughts<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=' + call.name + '<|message|>' + call.arguments | tojson }}
        {{- '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.thinking and loop.last %}
            {{- '<|start|>assistant<|channel|>thoughts<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
{%- endif %}
"""


def channels(messages, tools):
    """Channels for thoughts, a last turn that ends unlike the others, results as JSON."""
    names = "".join("\n" + tool["function"]["name"] for tool in tools or [])
    yield f"<|start|>system<|message|>Date: 2024-07-26{names}<|end|>", False
    answers = [
        i for i, one in enumerate(messages) if one["role"] == "assistant" and "content" in one
    ]
    for i, message in enumerate(messages):
        role, thoughts = message["role"], message.get("thinking")
        if role == "tool":
            yield f"<|start|>tool<|message|>{_json(message['content'])}<|end|>", False
        elif role != "assistant":
            yield f"<|start|>{role}<|message|>{message['content']}<|end|>", False
        else:
            is_last, is_call = i == len(messages) - 1, "tool_calls" in message
            yield "<|start|>assistant", False
            if thoughts and (i > max(answers, default=-1) if is_call else is_last):
                yield f"<|channel|>thoughts<|message|>{thoughts}<|end|><|start|>assistant", True
            if is_call:
                call = message["tool_calls"][0]["function"]
                arguments = _json(call["arguments"])
                yield f" to={call['name']}<|message|>{arguments}<|call|>", True
            else:
                yield f"<|channel|>final<|message|>{message['content']}", True
                yield "<|return|>" if is_last else "<|end|>", True


MISTRAL = r"""
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- set users = messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}
        {{- '[INST] ' + (system if not users else '') + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""


def mistral(messages, tools):
    """No prompt for a turn, and the system message moves on to the last user's."""
    yield "<bos>", False
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n\n", messages[1:]
    last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for i, message in enumerate(messages):
        if message["role"] == "user":
            yield f"[INST] {system if i == last_user else ''}{message['content']} [/INST]", False
        else:
            yield f" {message['content'].strip()}</s>", True


THINKER = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<A>' + message.content.split('</think>')[-1] + eos_token }}
    {%- else %}
        {{- ('<U>' if message.role == 'user' else '') + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<A><think>\n' }}
{%- endif %}
"""


def thinker(messages, tools):
    """A prompt that asks for thoughts, although turns are written without."""
    yield "<bos>", False
    for message in messages:
        if message["role"] == "assistant":
            yield "<A>", False
            yield message["content"].split("</think>")[-1] + "</s>", True
        else:
            yield ("<U>" if message["role"] == "user" else "") + message["content"], False


PLAIN = r"""
{%- for message in messages %}
    {{- message.role | capitalize + ':' }}
    {{- ' ' + message.content + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}
"""


def plain(messages, tools):
    """A line a turn: the end of the line is what ends it."""
    for message in messages:
        yield f"{message['role'].capitalize()}:", False
        yield f" {message['content']}\n", message["role"] == "assistant"


CLOSED = r"""
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{%- endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}
"""


def closed(messages, tools):
    """Whole texts end with a token that no turn ends with."""
    for message in messages:
        yield f"<|{message['role']}|>\n", False
        yield f"{message['content']}<|end|>", message["role"] == "assistant"
        yield "\n", False
    yield "</s>", False


SWITCHED = r"""
{%- set quiet = enable_thinking is defined and not enable_thinking %}
{%- set query = namespace(last=-1) %}
{%- for message in messages if message.role == 'user' %}
    {%- set query.last = loop.index %}
{%- endfor %}
{%- set seen = namespace(users=0) %}
{%- for message in messages %}
    {%- set seen.users = seen.users + (1 if message.role == 'user' else 0) %}
    {{- '<|' + message.role + '|>\n' }}
    {%- if message.role == 'assistant' %}
        {%- set thoughts = message.reasoning_content if seen.users == query.last else '' %}
        {{- '<think>' + (thoughts or '') + '</think>\n' }}
    {%- endif %}
    {{- message.content }}
    {{- '/quiet' if quiet and message.role == 'user' else '' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' + ('<think></think>\n' if quiet else '') }}
{%- endif %}
"""


def switched(messages, tools):
    """No text ends turns, and the switch that asks for no thoughts writes into users' turns."""
    num_users = sum(message["role"] == "user" for message in messages)
    seen = 0
    for message in messages:
        role = message["role"]
        seen += role == "user"
        yield f"<|{role}|>\n", False
        if role == "assistant":
            thoughts = message.get("reasoning_content", "") if seen == num_users else ""
            yield f"<think>{thoughts}</think>\n", bool(thoughts)
        yield message["content"], role == "assistant"


ASKING = r"""
{%- set query = namespace(last=0) %}
{%- for message in messages if message.role == 'user' %}
    {%- set query.last = loop.index %}
{%- endfor %}
{%- set seen = namespace(users=0) %}
{%- for message in messages %}
    {%- set seen.users = seen.users + (1 if message.role == 'user' else 0) %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and seen.users == query.last %}
        {{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<call>' + call.function.name + ' ' + call.function.arguments + '</call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
{%- endif %}
"""


def asking(messages, tools):
    """A prompt that begins thoughts, which earlier turns lack; arguments of calls as text."""
    num_users = sum(message["role"] == "user" for message in messages)
    seen = 0
    for message in messages:
        role = message["role"]
        seen += role == "user"
        yield f"<|im_start|>{role}\n", False
        if role == "assistant" and seen == num_users:
            yield "<think>\n", False
            yield f"{message.get('reasoning_content', '')}\n</think>\n\n", True
        calls = (one["function"] for one in message.get("tool_calls", []))
        text = "".join(f"<call>{one['name']} {_json(one['arguments'])}</call>" for one in calls)
        yield message.get("content", "") + text + "<|im_end|>", role == "assistant"
        yield "\n", False


WRITTEN = {
    "closed": Written(CLOSED, closed),
    "switched": Written(SWITCHED, switched, takes_tools=True, takes_calls=False),
    "asking": Written(ASKING, asking, takes_tools=True, text_arguments=True),
    "chatml": Written(CHATML, chatml),
    "llama": Written(LLAMA, llama, takes_tools=True),
    "qwen": Written(QWEN, qwen, takes_tools=True),
    "gemma": Written(GEMMA, gemma),
    "channels": Written(CHANNELS, channels, takes_tools=True),
    "mistral": Written(MISTRAL, mistral),
    "thinker": Written(THINKER, thinker),
    "plain": Written(PLAIN, plain),
}
