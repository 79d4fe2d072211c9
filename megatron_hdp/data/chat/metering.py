"""What a template may take: its work is counted, not timed, so that all ranks refuse the same rows.

A unit is about a node of the template that is run, or a character that is read or written: ten
million take seconds. Loops are charged by their bodies, calls by what they are given and return;
what may return far more than it is given is refused before it is called.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

from jinja2 import Environment, nodes, runtime, sandbox
from jinja2.visitor import NodeTransformer

from megatron_hdp.data.chat.rows import TooCostlyError

_UNITS, _UNITS_OF_INPUT, _UNITS_OF_PART, _UNITS_OF_CALL = 10**7, 1000, 8, 32
_MOST_TIMES = 10**8  # the two largest of what a call is given, one times the other
_MOST_BITS = 4096  # of a whole number
_WIDE = re.compile(r"%[^%a-zA-Z]*(\d{6}|\*)|\{[^{}]*:[^{}]*(\d{6}|\{)")  # fields of % and of format
_NO_CHAT_HAS = ("pprint", "random", "urlize", "wordwrap", "xmlattr")
# filters that hand on what they are given, or parts of it
_LIGHT = {
    *("attr", "count", "d", "default", "first", "items", "last", "length", "list", "map"),
    *("reject", "rejectattr", "reverse", "select", "selectattr"),
}
_CONTAINERS = (list, tuple, set, frozenset, dict)
_SIZED = (str, bytes, range, *_CONTAINERS)
_MACHINERY = (Environment, runtime.Context, nodes.EvalContext)


class _Meter(threading.local):
    """What the template that this thread renders may still take."""

    left = float(_UNITS)
    weight = 1
    """Of the template: its nodes and its text."""
    given: Any = None
    """What may still be asked how much more it allows."""

    def spend(self, units: float) -> None:
        self.left -= units
        if self.left < 0 and self.given is not None:
            given, self.given = self.given, None
            self.left += _UNITS_OF_INPUT * _size(given, float("inf"))
        if self.left < 0:
            raise TooCostlyError(
                f"it takes more than {_UNITS:,} steps, and {_UNITS_OF_INPUT:,} for each character "
                "that it is given: a template that comes to an end is needed"
            )


_METER = _Meter()


@contextmanager
def metered(weight: int, given: Any) -> Iterator[None]:
    """Let a template of a weight take what is due for what it is given, and no more.

    Raises:
        TooCostlyError: within, where it takes more.
    """
    _METER.left, _METER.weight, _METER.given = _UNITS, weight, given
    try:
        yield
    finally:
        _METER.left, _METER.weight, _METER.given = _UNITS, 1, None


class MeteredEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """A sandbox that charges for the work of templates."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **settings: Any) -> None:
        """Take more filters, which are charged as well, and what any environment takes."""
        super().__init__(finalize=_read, **settings)
        self.filters |= filters
        for name in _NO_CHAT_HAS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters = {name: _charged(name, one) for name, one in self.filters.items()}
        self.tests = {name: _charged_test(one) for name, one in self.tests.items()}
        self.filters |= {_counted.__name__: _counted, _read.__name__: _read}

    def prepared(self, source: str) -> tuple[nodes.Template, int]:
        """Return a template that charges for itself, and its weight."""
        tree = self.parse(source)
        weight = _weight(tree)
        _Charging().visit(tree)
        tree.set_environment(self)
        return tree, weight

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls."""
        _METER.spend(_UNITS_OF_CALL)
        if isinstance(called, runtime.Macro | runtime.LoopContext):
            _METER.spend(_METER.weight)
            if isinstance(called, runtime.LoopContext):  # a loop within itself
                args = _counted(args[0], _METER.weight), *args[1:]
        else:
            owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
            given = [*args, *kwargs.values(), *([owner] if isinstance(owner, _SIZED) else [])]
            _charge(given, has_fields=getattr(called, "__name__", "") in ("format", "format_map"))
        return _returned(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute what a template computes."""
        if operator == "+" or (operator == "%" and not isinstance(left, str)):
            return _returned(self.binop_table[operator](left, right))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            if (sum(bits) if operator == "*" else bits[0] * abs(right)) > _MOST_BITS:
                _refuse_size()
        elif operator in ("*", "%"):
            _charge([left, right], has_fields=operator == "%")
        return _returned(super().call_binop(context, operator, left, right))


class _Charging(NodeTransformer):
    """Puts filters that charge where no environment is asked."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        weight = sum(map(_weight, node.body))
        self.generic_visit(node)
        node.iter = nodes.Filter(
            node.iter, _counted.__name__, [nodes.Const(weight)], [], None, None
        )
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        known = isinstance(node.expr, nodes.Const)
        for one in node.ops:
            if one.op not in ("eq", "ne") or not (known or isinstance(one.expr, nodes.Const)):
                node.expr, one.expr = _reading(node.expr), _reading(one.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_reading(one) for one in node.nodes]
        return node

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _reading(node)

    visit_Tuple = visit_Dict = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _reading(node) if isinstance(node.arg, nodes.Slice) else node


def _reading(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, _read.__name__, [], [], None, None)


def _weight(node: nodes.Node) -> int:
    texts = node.find_all(nodes.TemplateData)
    return 1 + sum(1 for _ in node.find_all(nodes.Node)) + sum(len(one.data) for one in texts)


def _counted(items: Iterable[Any], weight: int) -> Iterable[Any]:
    """Return what a loop goes over, which is charged for."""
    if not isinstance(items, Sized):
        items = list(islice(items, int(_METER.left / weight) + 1))
    _METER.spend(len(items) * weight)
    return items


def _read(value: Any) -> Any:
    """Return a value that is written, compared or cut, which is charged for."""
    _METER.spend(len(value) if type(value) is str else _size(value))
    return value


def _returned(value: Any) -> Any:
    _METER.spend(len(value) if isinstance(value, _SIZED) else 1)
    return value


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that is charged for."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name in _LIGHT:
            _METER.spend(1)
        else:
            given = [one for one in (*args, *kwargs.values()) if not isinstance(one, _MACHINERY)]
            _charge(given, has_fields=name == "format")
        return _returned(function(*args, **kwargs))

    return call


def _charged_test(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for one in args:
            _read(one)
        return function(*args, **kwargs)

    return call


def _charge(given: list[Any], has_fields: bool) -> None:
    """Charge for what a call is given, and refuse one that may return far more."""
    if len(given) > 1:
        factors = sorted(abs(one) if isinstance(one, int) else _length(one) for one in given)
        if factors[-1] * factors[-2] > _MOST_TIMES:
            _refuse_size()
    if has_fields and any(isinstance(one, str) and _WIDE.search(one) for one in given):
        _refuse_size()
    for one in given:
        _read(one)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, _SIZED) else 1


def _size(value: Any, most: float | None = None) -> int:
    """Return what it takes to look at a value, as far as there is something left to pay."""
    most = _METER.left if most is None else most
    total, rest = 0, [value]
    while rest and total <= most:
        one = rest.pop()
        total += _UNITS_OF_PART + _length(one)
        if isinstance(one, dict):
            rest += one.keys()
            rest += one.values()
        elif isinstance(one, _CONTAINERS):
            rest += one
    return total


def _refuse_size() -> None:
    raise TooCostlyError("it makes something far larger than what it is given")
