"""What decides the order of the data; a resumed run must not repeat or skip a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from megatron_hdp.data.shuffles import LATEST_ORDER

UNNAMED = ""
"""A run's only source where it has no name: without HDP, and in releases before mixtures."""

_FLAGS = {
    "hybrid_data_parallel": "--hybrid-data-parallel",
    "seed": "--seed",
    "seq_length": "--seq-length",
    "weight_unit": "weight-unit",
}
_OF_A_SOURCE = {
    "long_sequence": "long-sequence (--hdp-long-sequence)",
    "num_sequences": "sequences to train on (--split, validation)",
    "corpus": "fingerprint of its lengths or files",
    "contents": "fingerprint of samples of its tokens or text",
}


@dataclass(frozen=True, kw_only=True)
class SourceOrder:
    """Everything but the consumed count that decides in which order a source is drawn."""

    num_sequences: int
    """Sequences of an epoch."""
    corpus: int
    """64-bit fingerprint of the sequences' lengths; of text that is tokenised on the fly, of names
    and sizes of its files, tokenizer and template."""
    contents: int | None = None
    """64-bit fingerprint of samples of the tokens or the text; None where it is not known, as in a
    checkpoint of an older release, and then not compared."""
    long_sequence: str
    """What happens to a document that is longer than ``seq_length``."""
    version: int = LATEST_ORDER
    """How an epoch's order is made (`data.shuffles`). Not compared: a source goes on in the
    version that it began with."""
    key: int = 0
    """What tells its orders from those of other sources. Not compared: it keeps its own."""


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    """Everything but the position that decides which sequences form a step.

    Never anything of a rank, so a run may continue on another number of ranks; nor weights and
    other lengths in the schedule, which may change from run to run.
    """

    hybrid_data_parallel: bool
    seed: int
    seq_length: int
    weight_unit: str = "tokens"
    sources: Mapping[str, SourceOrder]
    """By name, those that the run draws from."""
    absent: Mapping[str, SourceOrder] = field(default_factory=dict)
    """Those that it drew from before: one that comes back goes on in its order."""

    def to_record(self) -> dict[str, Any]:
        """Return it as plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DataOrder:
        """Return what `to_record`, of this or an older release, made a record of."""
        if "sources" not in record:
            return cls._from_before_mixtures(record)
        named = {
            key: {name: SourceOrder(**one) for name, one in record[key].items()}
            for key in ("sources", "absent")
        }
        return cls(**{**record, **named})

    @classmethod
    def _from_before_mixtures(cls, record: Mapping[str, Any]) -> DataOrder:
        one = {item.name: record[item.name] for item in fields(SourceOrder) if item.name in record}
        source = SourceOrder(**{"version": 1, **one})
        shared = {name: record[name] for name in ("hybrid_data_parallel", "seed", "seq_length")}
        return cls(**shared, sources={UNNAMED: source})

    def continuing(self, saved: DataOrder, place: str) -> Continuation:
        """Return this order as the run that had the order `saved`, of a checkpoint, goes on in it.

        Raises:
            ValueError: something differs that must not, no source is left, or this release does
                not know a version.
        """
        names = self._names_in(saved)
        self._require_same(saved, names, place)
        known = {**saved.absent, **saved.sources}
        sources = {}
        for name, mine in self.sources.items():
            if name in names:
                before = known[names[name]]
                _require_known_version(before.version, name, place)
                mine = replace(mine, version=before.version, key=before.key)
            sources[name] = mine
        gone = {name: one for name, one in known.items() if name not in names.values()}
        return Continuation(
            order=replace(self, sources=sources, absent=gone),
            names_before={name: old for name, old in names.items() if name != old},
            added=tuple(name for name in self.sources if name not in names),
            removed=tuple(name for name in saved.sources if name not in names.values()),
        )

    def _names_in(self, saved: DataOrder) -> dict[str, str]:
        """Return what each source that the saved run knew was called in it.

        A source is known by its name, or where that is new by what stands in it. One source alone
        is that of a run of one source, so that the message says in what it differs.
        """
        if len(self.sources) == len(saved.sources) == 1 and not saved.absent:
            return dict(zip(self.sources, saved.sources, strict=True))
        known = {**saved.absent, **saved.sources}
        names = {name: name for name in self.sources if name in known}
        for name, mine in self.sources.items():
            if name in names:
                continue
            for other, one in known.items():
                if other not in names.values() and other not in self.sources and _same(mine, one):
                    names[name] = other
                    break
        return names

    def _require_same(self, saved: DataOrder, names: Mapping[str, str], place: str) -> None:
        differences = list(_differences(_FLAGS, self, saved, ""))
        known = {**saved.absent, **saved.sources}
        for name, old in names.items():
            title = f"source '{name}', " if name else ""
            differences += _differences(_OF_A_SOURCE, self.sources[name], known[old], title)
        if not names:
            differences.append(
                f"sources: found {_list(self.sources)}, expected at least one of {_list(known)}"
            )
        if differences:
            raise ValueError(
                f"{place} was saved by a run with another order of the data, so sequences would "
                f"be repeated and skipped: {'; '.join(differences)}. Give the flags of that run, "
                "or add --finetune to start at step 0 from its weights alone"
            )


@dataclass(frozen=True)
class Continuation:
    """How a run goes on in the data of a run before it."""

    order: DataOrder
    names_before: Mapping[str, str]
    """By today's name, that of each source which was called otherwise."""
    added: tuple[str, ...]
    """Sources that the run did not draw from before."""
    removed: tuple[str, ...]
    """Sources that it drew from, and does no more."""

    def announcements(self) -> list[str]:
        """Return what the log says of it, nothing where all is as before."""
        words = []
        kept = [one.version for name, one in self.order.sources.items() if name not in self.added]
        if older := [version for version in kept if version < LATEST_ORDER]:
            words.append(
                f"the checkpoint's run began with version {older[0]} of the order of the data (now "
                f"{LATEST_ORDER}): it resumes in that one, so nothing is repeated or skipped"
            )
        if self.added:
            words.append(f"sources that are new to this run: {_list(self.added)}")
        if self.removed:
            words.append(
                f"sources that this run no longer draws from: {_list(self.removed)}; their "
                "positions are kept"
            )
        return words


def _differences(
    names: Mapping[str, str], found: object, expected: object, title: str
) -> Iterable[str]:
    for name, words in names.items():
        mine, theirs = getattr(found, name), getattr(expected, name)
        if mine != theirs and not (name == "contents" and None in (mine, theirs)):
            yield f"{title}{words}: found {mine}, expected {theirs}"


def _same(one: SourceOrder, other: SourceOrder) -> bool:
    """Return whether two sources hold the same sequences, by all that is known of them."""
    return not list(_differences(_OF_A_SOURCE, one, other, ""))


def _require_known_version(version: int, name: str, place: str) -> None:
    if not 1 <= version <= LATEST_ORDER:
        raise ValueError(
            f"{place} has version {version} of the order of the data of source '{name}', expected "
            f"1 to {LATEST_ORDER}: a newer release of megatron_hdp saved it. Install that one, or "
            "add --finetune to start at step 0 from its weights alone"
        )


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
