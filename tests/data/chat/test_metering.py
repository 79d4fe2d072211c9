"""A template that does not end, or makes too much, is refused by what it does, not by a clock."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_hdp.data.chat import Conversations, metering
from megatron_hdp.data.chat.rows import TooCostlyError
from megatron_hdp.data.chat.templates import ChatTemplate
from megatron_hdp.data.tokenizers import ByteTokenizer
from tests.data.chat.test_conversations import said
from tests.data.chat.written import TOKENS, WRITTEN

CHAT = [said("user", "hello"), said("assistant", "x")]


def nested(use):
    """A hundred times a list of twice the list before: small to hold, endless to look at."""
    begin = "{% set ns = namespace(x=[1]) %}{% for i in range(100) %}"
    return begin + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}" + use


def loops(body, begin="{% set x = 'ab' * 50000 %}"):
    return f"{begin}{{% for i in range(100000) %}}{body}{{% endfor %}}"


TOO_MUCH = {
    "repeated": "{{ 'a' * 10**10 }}",
    "list": "{{ (10**10 * [0])|length }}",
    "power": "{{ (10 ** 1000) ** 1000 }}",
    "squares": loops("{% set n.x = n.x * n.x %}", "{% set n = namespace(x=9) %}"),
    "loops": loops(loops(loops(""))),
    "concatenated": loops("{% set n.x = n.x ~ n.x %}", "{% set n = namespace(x='a') %}"),
    "added": loops("{% set n.x = n.x + n.x %}", "{% set n = namespace(x='a') %}"),
    "output": loops("{{ x }}"),
    "text": loops("x" * 10000),
    "set": "{% set y %}" + loops("{{ x }}") + "{% endset %}",
    "cut": loops("{% set y = x[::-1] %}"),
    "compared": loops("{% if 'c' in x %}{% endif %}"),
    "tested": loops("{% if 'c' is in(x) %}{% endif %}"),
    "attributes": loops("{% set y = messages[0].role %}" * 300),
    "calls": loops("{% set y = c.next() %}", "{% set c = cycler(1, 2) %}") * 10,
    "nested": nested("{{ ns.x }}"),
    "nested-json": nested("{{ ns.x|tojson }}"),
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "recursive": "{% for x in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2, 3]) }}"
    "{% endif %}{% endfor %}",
    "filter": "{{ 'a'|center(10**10) }}",
    "method": "{{ 'a'.ljust(10**10) }}",
    "replaced": "{% set x = 'a' * 50000 %}{{ [x]|map('replace', 'a', x)|list }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "star": "{{ '%*d' % (9999999999, 1) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "width": "{{ '{:>{}}'.format(1, 9999999999) }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "block": "{% filter center(10**10) %}a{% endfilter %}",
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused(name, monkeypatch):
    monkeypatch.setattr(metering, "_UNITS", 10**5)  # of ten million, which take seconds
    with pytest.raises(TooCostlyError, match="too costly for it: it (takes|makes)"):
        ChatTemplate(TOO_MUCH[name], name, {}).render(CHAT)


def test_it_is_the_sources_fault(tmp_path):
    (tmp_path / "endless.jinja").write_text(TOO_MUCH["repeated"])
    with pytest.raises(ValueError, match="too costly"):
        Conversations(ByteTokenizer(), str(tmp_path / "endless.jinja"))
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{{ " + "(" * 9999 + ")" * 9999 + " }}", "deep", {})


def test_all_threads_refuse_the_same(tmp_path):
    """A template whose work grows with the square of the messages: where it ends is exact."""
    source = (
        "{% for m in messages %}{% for n in messages %}" + "x" * 3000 + "{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source, "square", {})

    def ends(number):
        try:
            return len(template.render([said("user", "")] * number)) == 3000 * number**2
        except TooCostlyError:
            return False

    numbers = list(range(20, 120, 5))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ends, numbers * 3))
    assert found[:20] == found[20:40] == found[40:]
    assert found[0] and not found[19]


@pytest.mark.parametrize("name", WRITTEN)
def test_long_conversations_are_none_of_it(name):
    """Half a megabyte, or a thousand short turns."""
    template = ChatTemplate(WRITTEN[name].source, name, TOKENS)
    for size, turns in ((250_000, 1), (3, 500)):
        chat = [said("user", "a" * size), said("assistant", "b" * size)] * turns
        assert len(template.render(chat)) > 2 * size * turns
