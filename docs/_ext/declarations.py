"""Tables of the Reference, written from the declarations in the code.

``python docs/_ext/declarations.py NAME`` prints one of them. On a page of the site the comment
``<!-- declared: NAME -->`` stands for it.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

Row = tuple[str, ...]


class UndeclaredError(Exception):
    """A declaration lacks its meaning, or a page asks for a table that there is not."""


def table(header: Row, rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def code(text: object) -> str:
    """The text as code."""
    return f"`{text}`"


def meanings(cls: type) -> dict[str, str]:
    """The docstring under each field of a class, or member of an enumeration, its bases' too.

    Raises:
        UndeclaredError: one has none.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base) or issubclass(base, IntEnum) and base is not IntEnum:
            found |= _own_meanings(base)
    names = list(cls.__members__) if issubclass(cls, IntEnum) else _field_names(cls)
    for name in names:
        if not found.get(name):
            raise UndeclaredError(
                f"{cls.__module__}.{cls.__name__}.{name} has no docstring below it"
            )
    return {name: found[name] for name in names}


def _field_names(cls: type) -> list[str]:
    return [item.name for item in dataclasses.fields(cls)]


def _own_meanings(cls: type) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for declared, below in zip(tree.body, tree.body[1:], strict=False):
        target = declared.targets[0] if isinstance(declared, ast.Assign) else None
        target = declared.target if isinstance(declared, ast.AnnAssign) else target
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(target, ast.Name) and is_text:
            found[target.id] = _markdown(str(below.value.value))
    return found


def _markdown(text: str) -> str:
    """The text of a docstring with code as Markdown has it."""
    return re.sub(r"``?([^`]+)``?", r"`\1`", inspect.cleandoc(text))


def flags() -> str:
    """Flags of training, one section a group."""
    from megatron_hdp.megatron.options import markdown_tables

    return markdown_tables()


def subcommands() -> str:
    """Arguments of each ``megatron-hdp`` command, one section a command."""
    from megatron_hdp.cli.main import build_parser

    return "\n".join(
        f"### {one.prog}\n\nTo {words}:\n\n{_table_of_parser(one)}"
        for words, one in _lowest(build_parser())
    )


def _lowest(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Parsers with none below them, and what each is for."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {one.dest: one.help or "" for one in action._choices_actions}
        for name, one in action.choices.items():
            yield from list(_lowest(one)) or [(helps[name], one)]


def _table_of_parser(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        if not action.help:
            raise UndeclaredError(f"{parser.prog}: {action.dest} has no help")
        name = action.option_strings[0] if action.option_strings else action.dest
        value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
        usage = code(f"{name} {value}".strip() if action.option_strings else name)
        if action.choices:
            usage = " ".join(map(code, (name, *action.choices)))
        required = action.required and action.nargs != argparse.REMAINDER
        meaning = f"{action.help}; required" if required else action.help
        rows.append((usage, meaning))
    return table(("argument", "meaning"), rows)


def plugin_flags() -> str:
    """The flags that a Megatron-LM checkout gets."""
    from megatron_hdp.megatron.lm.options import add_flags

    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    names = [code(one.option_strings[0]) for one in parser._actions if one.help != "==SUPPRESS=="]
    return ", ".join(names) + ".\n"


def refused() -> str:
    """What HDP refuses of Megatron-LM's flags."""
    from megatron_hdp.megatron.lm.options import REFUSED
    from megatron_hdp.options import flag_of

    rows = [
        (code(flag_of(name)), " or ".join(map(code, _several(only))) if only else "not given", why)
        for name, (only, why) in REFUSED.items()
    ]
    return table(("flag", "HDP needs", "because"), rows)


def _several(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def metrics() -> str:
    """Keys of a step's metrics, and how the log line names them."""
    from megatron_hdp.training.metrics import StepMetrics

    labels = {item.name: item.metadata.get("log") for item in dataclasses.fields(StepMetrics)}
    rows = [
        (code(key), meaning, code(label.text) if (label := labels[key]) else "")
        for key, meaning in meanings(StepMetrics).items()
    ]
    return table(("key", "meaning", "in the log line"), rows)


def _key_table(keys: Mapping[str, str]) -> str:
    return table(("key", "meaning"), [(code(key), meaning) for key, meaning in keys.items()])


def plan_keys() -> str:
    """Keys of ``plan.json``."""
    from megatron_hdp.planner import serialisation as of

    parts = [
        ("", of.PLAN_KEYS),
        ("A micro-batch:\n\n", of.MICRO_BATCH_KEYS),
        ("The summary:\n\n", of.SUMMARY_KEYS),
        ("The summary where HDP ranks share experts, besides:\n\n", of.LOCKSTEP_KEYS),
    ]
    return "\n".join(f"{before}{_key_table(keys)}" for before, keys in parts)


def cost_model() -> str:
    """Coefficients of a cost model."""
    from megatron_hdp.planner import CostModel

    defaults = {item.name: item.default for item in dataclasses.fields(CostModel)}
    rows = []
    for name, meaning in meanings(CostModel).items():
        default = defaults[name]
        is_required = default is dataclasses.MISSING
        shown = "Required." if is_required else f"Default: {code(_shown(default))}."
        rows.append((code(name), f"{meaning} {shown}"))
    return table(("key", "meaning"), rows)


def report_keys() -> str:
    """Keys of a strategy in ``report.json``."""
    from megatron_hdp.simulator.execution import REPORT_KEYS

    return _key_table(REPORT_KEYS)


def failure_keys() -> str:
    """Keys of ``failures`` in ``report.json``."""
    from megatron_hdp.simulator.execution import FAILURE_KEYS

    return _key_table(FAILURE_KEYS)


def step_record() -> str:
    """Keys of a step in ``report.json``."""
    from megatron_hdp.simulator.execution import StepRecord

    return _key_table(meanings(StepRecord))


def machine() -> str:
    """What a step takes besides the cost model."""
    from megatron_hdp.simulator.execution import Machine

    return _key_table(meanings(Machine))


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(list(value) if value == () else value)


def sources() -> str:
    """Keys of a source in a file of ``--hdp-data``."""
    from megatron_hdp.data.spec import SourceSpec

    return _spec_table(SourceSpec, without=("name",))


def media() -> str:
    """Keys of ``media`` in a source."""
    from megatron_hdp.data.spec import MediaSpec

    return _spec_table(MediaSpec)


def loaders() -> str:
    """Keys of ``loaders`` in a file of ``--hdp-data``."""
    from megatron_hdp.data.spec import LoadersSpec

    return _spec_table(LoadersSpec)


def primitives() -> str:
    """Keys of ``primitives`` in a file of ``--hdp-data``."""
    from megatron_hdp.data.spec import PrimitivesSpec

    return _spec_table(PrimitivesSpec, if_none="built in")


def _spec_table(spec: type, without: Iterable[str] = (), if_none: str = "") -> str:
    defaults = {item.name: item.default for item in dataclasses.fields(spec)}
    rows = []
    for name, meaning in meanings(spec).items():
        default = defaults[name]
        unless = if_none if default is None else code(str(default).lower())
        unless = "required" if default is dataclasses.MISSING else unless
        rows.append((code(name.replace("_", "-")), meaning, unless))
    hidden = [code(name) for name in without]
    return table(("key", "meaning", "unless given"), [row for row in rows if row[0] not in hidden])


def exit_codes() -> str:
    """Exit codes of the commands."""
    from megatron_hdp.exit_codes import ExitCode

    rows = [(code(ExitCode[name].value), text) for name, text in meanings(ExitCode).items()]
    return table(("exit code", "meaning"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "flags": flags,
    "subcommands": subcommands,
    "plugin-flags": plugin_flags,
    "refused": refused,
    "metrics": metrics,
    "plan": plan_keys,
    "report": report_keys,
    "failures": failure_keys,
    "step-record": step_record,
    "machine": machine,
    "cost-model": cost_model,
    "sources": sources,
    "media": media,
    "loaders": loaders,
    "primitives": primitives,
    "exit-codes": exit_codes,
}

_MARK = re.compile(r"^<!-- declared: (\S+) -->$", re.MULTILINE)


def filled_in(page: str) -> str:
    """The page with each table in the place of its comment.

    Raises:
        UndeclaredError: there is no such table.
    """

    def made(mark: re.Match[str]) -> str:
        if mark[1] not in TABLES:
            raise UndeclaredError(f"found {mark[0]}, expected one of {', '.join(TABLES)}")
        return _flags_as_code(TABLES[mark[1]]())

    return _MARK.sub(made, page)


def _flags_as_code(text: str) -> str:
    """The text with each flag that is not code yet as code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![\w-])--\w[\w-]*", r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if sys.argv[1:2] and sys.argv[1] in TABLES:
        print(TABLES[sys.argv[1]](), end="")
    else:
        sys.exit(f"usage: declarations.py {'|'.join(TABLES)}")
