"""``--hdp-data FILE``: sources, weights over time and validation in one YAML file."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron_hdp.data.media import settings_of
from megatron_hdp.data.mixture.schedule import WEIGHT_UNITS, MixtureSpec, Phase, Schedule, amount_of
from megatron_hdp.data.spec import (
    BACKENDS,
    FORMATS,
    ITEM_KINDS,
    ON_FAILURE,
    TOKENISE,
    TRAIN_ON,
    LoadersSpec,
    MediaSpec,
    PrimitivesSpec,
    SourceSpec,
)
from megatron_hdp.media import ENCODERS
from megatron_hdp.nearest import nearest
from megatron_hdp.options.yaml_nodes import AsWritten, is_text, shown, switch_of

_KEYS = ("weight-unit", "sources", "schedule", "validation", "loaders", "primitives")
_PHASE_KEYS = ("from", "to", "shape", "weights", "max-length")
_SHAPES = ("step", "linear")
_MOST_NUMBER = 1e300
_CHOICES = {
    "format": FORMATS,
    "train_on": TRAIN_ON,
    "tokenise": TOKENISE,
    "on_failure": ON_FAILURE,
    "long_sequence": ("error", "truncate", "split"),
    "backend": BACKENDS,
    "encoder": tuple(ENCODERS),
    "kind": ITEM_KINDS,
}


class DataFileError(ValueError):
    """A file of ``--hdp-data`` that cannot be used: names file, line, found and expected."""


@dataclass(frozen=True)
class DataFile:
    """What such a file says."""

    training: MixtureSpec
    validation: MixtureSpec | None
    """Held-out sequences of the sources; None where it names none."""
    loaders: LoadersSpec = LoadersSpec()


def read_data_file(path: str | Path, *, may_name_code: bool = True) -> DataFile:
    """Read and check a file of ``--hdp-data``; relative paths in it begin at its folder.

    Raises:
        DataFileError: no YAML, an unknown or repeated key, a value that cannot be used, or
            functions under ``primitives`` where it may name no code.
    """
    return _Reader(Path(path), may_name_code).data_file()


class _Reader:
    """Walks the nodes of one file."""

    def __init__(self, path: Path, may_name_code: bool) -> None:
        self._path = path
        self._may_name_code = may_name_code

    def data_file(self) -> DataFile:
        root = self._root()
        parts = dict(self._pairs(root, _KEYS, "key"))
        if "sources" not in parts:
            self._refuse(root, "found no 'sources', expected at least one source with a path")
        sources = tuple(
            self._source(name, node) for name, node in self._pairs(parts["sources"], None, "source")
        )
        if not sources:
            self._refuse(parts["sources"], "found no source, expected at least one with a path")
        names = [one.name for one in sources]
        held_out, unit, schedule = {}, "tokens", Schedule()
        loaders, primitives = LoadersSpec(), PrimitivesSpec()
        if node := parts.get("weight-unit"):
            unit = self._choice(node, "weight-unit", WEIGHT_UNITS)
        if node := parts.get("schedule"):
            schedule = self._schedule(node, names)
        if node := parts.get("validation"):
            for name, size in self._pairs(node, names, "source"):
                held_out[name] = self._whole(size, f"validation: {name}")
        if node := parts.get("loaders"):
            loaders = self._loaders(node)
        if node := parts.get("primitives"):
            primitives = self._primitives(node)
        training = MixtureSpec(
            sources=sources,
            origin=str(self._path),
            schedule=schedule,
            weight_unit=unit,
            held_out=held_out,
            primitives=primitives,
        )
        if not held_out:
            return DataFile(training, None, loaders)
        validation = replace(
            training,
            sources=tuple(replace(one, max_epochs=None) for one in sources if one.name in held_out),
            schedule=Schedule(),
            weight_unit="sequences",
            takes_held_out=True,
            primitives=replace(primitives, mix=None),
        )
        return DataFile(training, validation, loaders)

    def _root(self) -> yaml.MappingNode:
        try:
            node = yaml.compose(self._path.read_bytes(), Loader=AsWritten)
        except OSError as error:
            raise DataFileError(
                f"--hdp-data {self._path}: {error.strerror}: give the path of a YAML file"
            ) from None
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
            raise DataFileError(f"{self._path}: not valid YAML: {error}") from None
        if not isinstance(node, yaml.MappingNode):
            found = "nothing" if node is None else shown(node)
            raise DataFileError(
                f"{self._path}: found {found}, expected the keys {', '.join(_KEYS)}"
            )
        return node

    def _source(self, name: str, node: yaml.Node) -> SourceSpec:
        values = self._values(node, SourceSpec, f"source '{name}'") | {"name": name}
        if "path" not in values:
            self._refuse(node, f"source '{name}': found no 'path', expected the path of its data")
        if values.get("tokenise") == "on-the-fly" and values.get("long_sequence") == "split":
            self._refuse(
                node,
                f"source '{name}': found tokenise: on-the-fly with long-sequence: split, expected "
                "truncate or error, for how many pieces a text gives is known only once it is "
                "tokenised: change one of them",
            )
        values["path"] = str(self._path.parent / values["path"])
        template = self._path.parent / values.get("template", "")
        if template.is_file():  # others have names that are no file's
            values["template"] = str(template)
        kind, _, tokenizer = values.get("tokenizer", "").partition(":")
        if kind == "hf" and (self._path.parent / tokenizer).is_dir():
            values["tokenizer"] = f"hf:{self._path.parent / tokenizer}"
        return SourceSpec(**values)

    def _media(self, node: yaml.Node, what: str) -> MediaSpec:
        values = self._values(node, MediaSpec, what)
        if "encoder" not in values:
            self._refuse(node, f"{what}: found no 'encoder', expected {' or '.join(ENCODERS)}")
        if "folder" in values:
            values["folder"] = str(self._path.parent / values["folder"])
        found = MediaSpec(**values)
        try:
            settings_of(found)
        except ValueError as error:
            self._refuse(node, f"{what}: {error}")
        return found

    def _loaders(self, node: yaml.Node) -> LoadersSpec:
        found = LoadersSpec(**self._values(node, LoadersSpec, "loaders"))
        if found.min > found.max:
            self._refuse(
                node, f"loaders: found min {found.min} and max {found.max}, expected min <= max"
            )
        return found

    def _primitives(self, node: yaml.Node) -> PrimitivesSpec:
        known = {one.name.replace("_", "-"): one.name for one in fields(PrimitivesSpec)}
        values: dict[str, Any] = {}
        for key, value in self._pairs(node, known, "key of primitives"):
            what = f"primitives: {key}"
            if key == "losses-behind":
                values[known[key]] = self._whole(value, what, least=2)
                continue
            module, colon, function = self._text(value, what).rpartition(":")
            if not (module and colon and function.isidentifier()):
                self._refuse(
                    value,
                    f"{what}: found {shown(value)}, expected MODULE:FUNCTION or FILE.py:FUNCTION",
                )
            if module.endswith(".py"):
                module = str((self._path.parent / module).absolute())
            values[known[key]] = f"{module}:{function}"
            if not self._may_name_code:
                self._refuse(
                    value,
                    f"{what}: found {shown(value)} with --no-primitives, expected a file that "
                    "names no code: leave primitives out, or, if you trust it, the flag",
                )
        return PrimitivesSpec(**values)

    def _values(self, node: yaml.Node, spec: type, where: str) -> dict[str, Any]:
        """Read the keys of a declaration; its name, if it has one, is none of them."""
        kinds = typing.get_type_hints(spec)
        known = {name.replace("_", "-"): name for name in kinds if name != "name"}
        return {
            known[key]: self._value(value, f"{where}: {key}", known[key], kinds[known[key]])
            for key, value in self._pairs(node, known, f"key of {where}")
        }

    def _value(self, node: yaml.Node, what: str, name: str, kind: Any) -> Any:
        if name in _CHOICES:
            return self._choice(node, what, _CHOICES[name])
        if kind == MediaSpec | None:
            return self._media(node, what)
        if kind is bool:
            found = switch_of(node)
            if found is None:
                self._refuse(node, f"{what}: found {shown(node)}, expected true or false")
            return found
        if kind is float:
            most = 1.0 if name == "bad_limit" else _MOST_NUMBER
            return self._number(node, what, most=most)
        if kind in (int, int | None):
            return self._whole(node, what, least=0 if name == "shadows" else 1)
        return self._text(node, what)

    def _schedule(self, node: yaml.Node, names: Collection[str]) -> Schedule:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            self._refuse(node, f"schedule: found {shown(node)}, expected a list of phases")
        phases: list[Phase] = []
        units: list[str] = []
        for one in node.value:
            phase, unit = self._phase(one, names, is_first=not phases)
            if units and unit is not None and unit != units[0]:
                self._refuse(
                    one, f"schedule: found {unit}, expected {units[0]} as in the phases before"
                )
            if phases:
                self._check_order(one, phases[-1], phase)
            if unit is not None:
                units.append(unit)
            phases.append(phase)
        return Schedule(units[0] if units else "steps", tuple(phases))

    def _phase(
        self, node: yaml.Node, names: Collection[str], is_first: bool
    ) -> tuple[Phase, str | None]:
        """Return a phase and its unit, None for a beginning at 0, which is one in any unit."""
        parts = dict(self._pairs(node, _PHASE_KEYS, "key of a phase"))
        if "from" not in parts:
            self._refuse(node, "schedule: found a phase without 'from', expected where it begins")
        begin, unit = self._amount(parts["from"], "schedule: from")
        if is_first and begin != 0:
            self._refuse(parts["from"], f"schedule: found a first phase from {begin:,}, expected 0")
        end, shape, weights, length = begin, "step", None, None
        if part := parts.get("shape"):
            shape = self._choice(part, "schedule: shape", _SHAPES)
        if ("to" in parts) != (shape == "linear"):
            self._refuse(
                node,
                "schedule: found only one of 'to' and 'shape: linear', expected both for a linear "
                "change, or none",
            )
        if "to" in parts:
            end, end_unit = self._amount(parts["to"], "schedule: to")
            if is_first:
                self._refuse(
                    node, "schedule: found a first phase with 'to', expected one before it"
                )
            if end <= begin or (begin and end_unit != unit):
                self._refuse(
                    parts["to"],
                    f"schedule: found the range {begin:,} to {end:,}, expected one that rises, in "
                    "one unit",
                )
            unit = end_unit
        if part := parts.get("weights"):
            weights = self._weights(part, names)
        if part := parts.get("max-length"):
            length = self._whole(part, "schedule: max-length")
        phase = Phase(begin=begin, end=end, weights=weights, max_length=length)
        return phase, unit if begin or "to" in parts else None

    def _check_order(self, node: yaml.Node, before: Phase, phase: Phase) -> None:
        if phase.begin <= before.begin:
            self._refuse(
                node,
                f"schedule: found a phase from {phase.begin:,} after one from {before.begin:,}, "
                "expected phases in the order in which they begin",
            )
        if phase.begin < before.end:
            self._refuse(
                node,
                f"schedule: found a phase from {phase.begin:,} inside the range that ends at "
                f"{before.end:,}, expected ranges that do not overlap",
            )

    def _weights(self, node: yaml.Node, names: Collection[str]) -> dict[str, float]:
        weights = {
            name: self._number(value, f"weight of '{name}'")
            for name, value in self._pairs(node, names, "source")
        }
        if not any(weights.values()):
            self._refuse(node, "weights: found nothing above 0, expected at least one weight")
        return weights

    def _pairs(
        self, node: yaml.Node, known: Collection[str] | None, what: str
    ) -> Iterator[tuple[str, yaml.Node]]:
        """Yield keys and values; each key known (any, for None) and named once."""
        if not isinstance(node, yaml.MappingNode):
            self._refuse(node, f"found {shown(node)}, expected keys and values")
        seen = set()
        for key_node, value in node.value:
            if not is_text(key_node):
                self._refuse(key_node, f"found {shown(key_node)}, expected the name of a {what}")
            key = key_node.value
            if known is not None and key not in known:
                near = nearest(key, known, cutoff=0.5)
                remedy = f"did you mean '{near}'?" if near else f"expected {', '.join(known)}"
                self._refuse(key_node, f"unknown {what} '{key}': {remedy}")
            if key in seen:
                self._refuse(key_node, f"found the {what} '{key}' twice, expected it once")
            seen.add(key)
            yield key, value

    def _amount(self, node: yaml.Node, what: str) -> tuple[int, str]:
        text = self._text(node, what)
        try:
            return amount_of(text)
        except ValueError as error:
            self._refuse(node, f"{what}: {error}")

    def _text(self, node: yaml.Node, what: str) -> str:
        if not is_text(node):
            self._refuse(node, f"{what}: found {shown(node)}, expected a text")
        return str(node.value)

    def _choice(self, node: yaml.Node, what: str, choices: Collection[str]) -> str:
        if not is_text(node) or node.value not in choices:
            self._refuse(node, f"{what}: found {shown(node)}, expected {' or '.join(choices)}")
        return str(node.value)

    def _whole(self, node: yaml.Node, what: str, least: int = 1) -> int:
        return int(self._read(node, what, int, f"a whole number from {least} on", least, 2**40))

    def _number(self, node: yaml.Node, what: str, most: float = _MOST_NUMBER) -> float:
        expected = "a number from 0 on" if most > 1 else f"a number from 0 to {most:g}"
        return float(self._read(node, what, float, expected, 0, most))

    def _read(
        self,
        node: yaml.Node,
        what: str,
        convert: Callable[[str], float],
        expected: str,
        least: float,
        most: float,
    ) -> float:
        text = self._text(node, what)
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            self._refuse(node, f"{what}: found {shown(node)}, expected {expected}")
        return value

    def _refuse(self, node: yaml.Node, message: str) -> NoReturn:
        raise DataFileError(f"{self._path}, line {node.start_mark.line + 1}: {message}")
