"""What each source holds: documents, tokens, lengths, counted along its table, or estimated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hdp.arrays import Int64Array
from megatron_hdp.cli.data_commands.histogram import QUANTILES, Histogram
from megatron_hdp.data.mixture import (
    SPLITS,
    BlendFlags,
    MediaSource,
    MixtureSpec,
    Opening,
    Schedule,
    TableSource,
    TextSource,
    open_corpus,
    open_text,
    prepared,
    read_data_file,
    specs_of_flags,
)
from megatron_hdp.data.spec import SourceSpec
from megatron_hdp.data.tables import count_documents, split_documents
from megatron_hdp.media import ENCODERS

_PIXEL_QUANTILES = (0.1, 0.5, 0.9, 1.0)
_PIECE = 1 << 20  # rows counted at once
_NUM_RUNS, _RUN = 128, 32  # of neighbouring records that are sampled
_FILE_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class MediaItems:
    """Those of a source by their sizes: nothing is decoded."""

    names: str
    """What they are called."""
    num_items: int
    num_rows: int
    """Tokens that they are."""
    sizes: dict[str, int]
    """Of a picture or frame as its file has it in pixels, or of a sound in frames of 10 ms, by
    quantile."""
    unit: str
    """``pixels`` or ``frames``."""
    encoder_flop: float
    """Of a forward over all of them."""

    @classmethod
    def of(cls, source: MediaSource) -> MediaItems:
        """Count those that are drawn."""
        assert source.spec.media is not None
        encoder = ENCODERS[source.spec.media.encoder]
        is_kept = source.kept()
        rows = source.media.rows[is_kept]
        records = source.media.items.records[is_kept]
        sizes = np.sort(records["height"].astype(np.int64) * records["width"])
        patches = rows.astype(np.float64) * encoder.patches_per_row
        linear, quadratic = encoder.flop()
        shown = {f"{share:.0%}": int((len(sizes) - 1) * share) for share in _PIXEL_QUANTILES}
        return cls(
            names=source.item_names,
            num_items=len(rows),
            num_rows=int(rows.sum()),
            sizes={name: int(sizes[at]) if len(sizes) else 0 for name, at in shown.items()},
            unit=source.media.files.settings.unit,
            encoder_flop=float((linear * patches + quadratic * patches**2).sum()),
        )

    def encoder_share(self, tokens: int, parameters: float = 8e9) -> float:
        """Return the encoder's share of the FLOP beside a language model of so many parameters."""
        return self.encoder_flop / max(self.encoder_flop + 2 * parameters * tokens, 1.0)


@dataclass(frozen=True)
class Description:
    """One source, or what a split takes of it."""

    name: str
    part: str | None
    """``train``, ``valid`` or ``test``; None: all of it."""
    documents: int
    """With at least one token."""
    empty: int
    """Without one; in a sample, which does not tell them apart, bad ones are among them."""
    bad: int
    """Left out when it was prepared."""
    cut: int
    """Longer than the context length."""
    loss_tokens: int
    """Whose prediction is trained."""
    is_masked: bool
    """Whether some tokens are not trained though they could be predicted."""
    histogram: Histogram
    """Of its sequences: the documents, cut to the context length."""
    media: MediaItems | None = None
    sampled: tuple[int, int] | None = None
    """Records that were looked at and those that there are, where the figures are estimates."""

    @property
    def title(self) -> str:
        """The source, and what of it."""
        return self.name if self.part is None else f"{self.name} {self.part}"

    def to_record(self) -> dict[str, object]:
        """Return it as plain values."""
        lengths = self.histogram
        return {
            "documents": self.documents,
            "empty": self.empty,
            "bad": self.bad,
            "cut": self.cut,
            "sequences": lengths.num_sequences,
            "tokens": lengths.num_tokens,
            "loss_tokens": self.loss_tokens,
            "lengths": {
                "shortest": lengths.shortest,
                "mean": lengths.mean,
                **{f"p{share * 100:g}": lengths.quantile(share) for share in QUANTILES},
                "longest": lengths.longest,
            },
            "sampled": self.sampled,
            **({} if self.media is None else {"media": self._media_record()}),
            "token_shares": {str(most): part for most, part in lengths.token_shares().items()},
        }

    def _media_record(self) -> dict[str, object]:
        assert self.media is not None
        one, tokens = self.media, self.histogram.num_tokens
        return {
            "kind": one.names,
            "items": one.num_items,
            "rows": one.num_rows,
            one.unit: one.sizes,
            "encoder_flop": one.encoder_flop,
            "encoder_share_8b": one.encoder_share(tokens),
        }


def sources_of(words: Sequence[str]) -> MixtureSpec:
    """Return the sources that a data file, or prefixes and files, name.

    Raises:
        ValueError: a data file and something else, or a data file that cannot be used.
    """
    files = [word for word in words if word.endswith(_FILE_SUFFIXES)]
    if files and len(words) > 1:
        raise ValueError(
            f"found {files[0]} among {len(words)} names, expected one file of --hdp-data, or "
            "prefixes alone: describe them one after the other"
        )
    if files:
        spec = read_data_file(files[0]).training
    else:
        prefixes = [word.removesuffix(".idx").removesuffix(".bin") for word in words]
        spec = specs_of_flags(BlendFlags(data_path=prefixes, split="1"))["train"]
        sources = [replace(one, format="auto") for one in spec.sources]  # text is welcome, too
        spec = replace(spec, sources=tuple(sources))
    # the schedule and what is held out say nothing of what a source holds
    return replace(spec, schedule=Schedule(), held_out={})


def describe(spec: MixtureSpec, opening: Opening, split: str | None) -> list[Description]:
    """Describe each source, with a split each of its parts that has a document.

    Raises:
        ValueError: a source cannot be opened, or has no token.
    """
    found = []
    for source in spec.sources:
        if source.tokenise == "on-the-fly":
            if split is not None:
                raise ValueError(
                    f"found --split for source '{source.name}', which is tokenised on the fly, "
                    "expected tokens, whose documents it cuts: leave it out"
                )
            found.append(_estimated(open_text(source, spec, opening)))
            continue
        if source.long_sequence == "error":  # here it is told, and no error
            source = replace(source, long_sequence="truncate")
        alone = replace(spec, sources=(source,))
        if split is None:
            found.append(_described(alone, opening, None))
            continue
        parts = [replace(alone, split=split, part=part) for part in range(len(SPLITS))]
        found += [
            _described(part, opening, name)
            for name, part in zip(SPLITS, parts, strict=True)
            if _has_documents(source, part, opening)
        ]
    return found


def _has_documents(source: SourceSpec, spec: MixtureSpec, opening: Opening) -> bool:
    prefix, _ = prepared(source, spec, opening)
    return len(split_documents(count_documents(prefix), spec.split)[spec.part]) > 0


def _described(spec: MixtureSpec, opening: Opening, part: str | None) -> Description:
    (source,) = open_corpus(spec, opening).sources
    assert isinstance(source, TableSource)
    facts = source.table.facts
    histogram = Histogram.of(source.lengths(rows) for rows in _pieces(source))
    return Description(
        name=source.name,
        part=part,
        documents=facts.num_documents - facts.num_empty,
        empty=facts.num_empty,
        bad=source.bad,
        cut=facts.num_truncated + facts.num_split,
        loss_tokens=sum(_loss_tokens(source, rows) for rows in _pieces(source)),
        is_masked=source.spans is not None,
        histogram=histogram,
        media=MediaItems.of(source) if isinstance(source, MediaSource) else None,
    )


def _estimated(source: TextSource) -> Description:
    """Describe what is not tokenised by a sample of its records: all of them if they are few."""
    last = max(0, source.num_rows - _RUN)
    begins = [last * i // (_NUM_RUNS - 1) for i in range(_NUM_RUNS)]
    rows = np.unique(np.concatenate([np.arange(begin, begin + _RUN) for begin in begins]))
    rows = rows[rows < source.num_rows]
    found = [one for one in source.decoder.sample(rows) if len(one.tokens)]
    if not found:
        raise ValueError(
            f"source '{source.name}': none of {len(rows):,} records that were looked at has a "
            "token, expected text: change path, glob or key"
        )
    scale = source.num_rows / len(rows)
    counted = Histogram.of([np.array([len(one.tokens) for one in found])])
    ends = np.floor(np.cumsum(counted.counts) * scale + 0.5).astype(np.int64)  # no sum is off
    histogram = Histogram(counted.lengths, np.diff(ends, prepend=0))
    documents = histogram.num_sequences
    return Description(
        name=source.name,
        part=None,
        documents=documents,
        empty=source.num_rows - documents,
        bad=0,
        cut=0,
        loss_tokens=round(scale * sum(one.num_trained for one in found)),
        is_masked=any(one.is_trained is not None for one in found),
        histogram=histogram,
        sampled=None if len(rows) == source.num_rows else (len(rows), source.num_rows),
    )


def _pieces(source: TableSource) -> Iterator[Int64Array]:
    for first in range(0, source.num_rows, _PIECE):
        yield np.arange(first, min(first + _PIECE, source.num_rows))


def _loss_tokens(source: TableSource, rows: Int64Array) -> int:
    num_labels = source.num_labels(rows, source.lengths(rows))
    return int(source.num_trained(rows, np.zeros_like(rows), num_labels).sum())
