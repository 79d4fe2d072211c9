"""A source that is not tokenised becomes a pair in a cache, once for the same files and tokenizer.

``FOLDER/NAME-KEY.bin/.idx`` (of conversations ``.spans``, too) beside ``NAME-KEY.json``, the
manifest, which is written last: without it the others are not there. What is under way lies in
``NAME-KEY.work``, a pair and a mark for each finished shard.
"""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megatron_hdp.data.formats import files_of, kind_of
from megatron_hdp.data.prepare.cache_key import (
    Content,
    contents_of,
    key_of,
    recipe_of,
    require_unchanged,
)
from megatron_hdp.data.prepare.decoding import Decoding, decoding_of, text_key
from megatron_hdp.data.prepare.prepared_files import (
    LOCK,
    MANIFEST,
    SUFFIXES,
    PreparedFiles,
    known_contents,
    prepared_by_others,
    suffixes_of,
)
from megatron_hdp.data.prepare.shards import Counts, Shard, cut, shard_bytes_for
from megatron_hdp.data.prepare.tokenising import join, progress_bar, run_tasks
from megatron_hdp.data.spec import SourceSpec
from megatron_hdp.files import Say, locked

_DAY_S = 86_400.0
_MOST_NAME_BYTES = 200  # of a source in a file's name, which has at most 255 with all that follows


@dataclass(frozen=True)
class Prepared:
    """A source as tokens."""

    prefix: str
    """Of the ``.bin/.idx`` pair, of conversations also of the ``.spans``."""
    manifest: str
    """File that says what it was made of."""
    documents: int
    tokens: int
    bad: int
    """Documents that were left out because they are none."""


def prepare(
    spec: SourceSpec,
    *,
    tokenizer: str,
    folder: Path,
    workers: int,
    say: Say | None = None,
    patience_s: float = _DAY_S,
    shard_bytes: int | None = None,
) -> Prepared:
    """Tokenise a source into a cache, or find it there.

    The pair is the same whatever the number of workers (0: this process does it), and wherever
    earlier calls were interrupted: what they had finished is not done again. What happens is told
    a line at a time, on standard error unless `say` is given. Another process that prepares the
    same is waited for; the size of a piece of work follows from the files' unless it is given.

    Sources of other names share what is made of the same files in the same way.

    Raises:
        ValueError: a file is no such thing, too many documents are bad, or none has a token.
        OSError: the disk is full, the folder cannot be written, another process takes too long.
        ImportError: a package is missing.
    """
    say = say or _print
    kind = kind_of(spec)
    if kind not in SUFFIXES:
        raise ValueError(
            f"source {spec.name} ({spec.path}) is a .bin/.idx pair, expected text or "
            "conversations: use it as it is"
        )
    if spec.media is not None and kind != "chat":
        raise ValueError(
            f"source {spec.name}: found media and the format {kind}, expected format: chat, whose "
            "rows can have pictures"
        )
    files = files_of(spec.path, spec.glob)
    suffixes = suffixes_of(kind, has_media=spec.media is not None)
    tokenizer = spec.tokenizer or tokenizer
    os.makedirs(folder, exist_ok=True)
    name = re.sub(r"[^\w.-]", "_", spec.name).encode()[:_MOST_NAME_BYTES].decode(errors="ignore")
    recipe = recipe_of(spec, kind, tokenizer)
    size = sum(map(os.path.getsize, files))
    with progress_bar(f"{spec.name}: hashes", size, delay_s=1.0) as tell:
        contents = contents_of(files, known_contents(folder, name), tell)
    key = key_of(recipe, contents, text_key(spec, kind))
    target = PreparedFiles(folder, f"{name}-{key}", suffixes)
    about = {"source": spec.name, "tokenizer_name": tokenizer, **recipe}
    for other in (target, *prepared_by_others(folder, key, suffixes)):
        if (counts := other.counts()) is not None:
            target = other
            break
    else:
        with locked(target.path(LOCK), f"source {spec.name}", say, patience_s=patience_s):
            counts = target.counts()
            if counts is None:
                decoding = decoding_of(spec, kind, tokenizer)
                counts = _make(spec, target, decoding, contents, workers, shard_bytes, say)
                target.finish(about, counts, contents)
    require_few_bad(spec, counts)
    return Prepared(
        target.prefix, str(target.path(MANIFEST)), counts.documents, counts.tokens, counts.bad
    )


def require_few_bad(spec: SourceSpec, counts: Counts) -> None:
    """Refuse a source of which more is bad than it may be.

    Raises:
        ValueError: names the first of its bad documents.
    """
    total = counts.documents + counts.empty + counts.bad
    if counts.bad > spec.bad_limit * total:
        raise ValueError(
            f"source {spec.name}: {counts.bad:,} of {total:,} documents are bad "
            f"({counts.bad / total:.3%}), expected at most {spec.bad_limit:.3%}: mend them or "
            f"raise its bad-limit; the first: {'; '.join(counts.named)}"
        )


def _make(
    spec: SourceSpec,
    target: PreparedFiles,
    decoding: Decoding,
    contents: Sequence[Content],
    workers: int,
    shard_bytes: int | None,
    say: Say,
) -> Counts:
    """Run the shards that are not finished, and put all of them together."""
    target.begin(contents)
    total = sum(one.size for one in contents)
    files = [one.path for one in contents]
    shards = cut(
        files, decoding.key, lines=False, shard_bytes=shard_bytes or shard_bytes_for(total)
    )
    finished = _run(spec, target, decoding, shards, workers, say)
    require_unchanged(contents)
    result = Counts()
    for shard in shards:
        result.add(finished[shard.index])
    try:
        require_few_bad(spec, result)
    except ValueError:
        if spec.media is not None:  # of other files, which may be mended
            target.forget()
        raise
    if result.documents == 0:
        raise ValueError(
            f"source {spec.name} ({spec.path}): none of {len(files):,} files has a token "
            f"({result.empty:,} empty documents), expected text: change path, glob or key"
        )
    join(decoding, [target.shard_prefix(shard) for shard in shards], target.prefix)
    say(_summary(spec, result, target.prefix))
    return result


def _run(
    spec: SourceSpec,
    target: PreparedFiles,
    decoding: Decoding,
    shards: Sequence[Shard],
    workers: int,
    say: Say,
) -> dict[int, Counts]:
    """Return what became of each shard, by index; those that are not finished are run."""
    finished = {shard.index: counts for shard in shards if (counts := target.finished(shard))}
    missing = [shard for shard in shards if shard.index not in finished]
    total, left = (sum(shard.num_bytes for shard in some) for some in (shards, missing))
    how = f"{len(shards):,} shards"
    if finished:
        how = f"{len(missing):,} of {how}, the others were finished before"
    say(f"source {spec.name}: prepares {total:,} bytes with {workers} workers, {how}")
    with progress_bar(spec.name, total, done=total - left) as tell:
        tasks = [(shard, target.shard_prefix(shard)) for shard in missing]
        try:
            with closing(run_tasks(decoding, tasks, workers, tell)) as results:
                for shard, counts in results:
                    target.note(shard, counts)
                    finished[shard.index] = counts
        finally:
            target.clear()  # of workers that were ended
    return finished


def _summary(spec: SourceSpec, counts: Counts, prefix: str) -> str:
    left_out = [f"{counts.empty:,} empty ones left out"] if counts.empty else []
    if counts.bad:
        left_out.append(f"{counts.bad:,} bad ones left out, the first: {counts.named[0]}")
    more = f" ({'; '.join(left_out)})" if left_out else ""
    return (
        f"source {spec.name}: {counts.documents:,} documents, {counts.tokens:,} tokens in "
        f"{prefix}.bin{more}"
    )


def _print(text: str) -> None:
    print(f"megatron_hdp: {text}", file=sys.stderr, flush=True)
