"""Sources of pictures in tables, of which whoever decodes one holds a whole part."""

import hashlib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from megatron_hdp.data.media import Decoded
from megatron_hdp.data.mixture import Corpus, MediaSource
from megatron_hdp.data.steps import RankStep, WantedItem
from megatron_hdp.data_plane.setup import SplitSetup

sys.path.insert(0, str(Path(__file__).parents[3]))

_SIDES = 480, 640


def write_pictures(folder: Path, num_sources: int, num_rows: int, part_mb: float) -> Path:
    """Write tables of one part each, of a picture with its caption a row; return the data's file.

    Args:
        folder: of all files.
        num_sources: tables.
        num_rows: of each.
        part_mb: of each.
    """
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    from tests.data.media import sources

    tokenizer = sources.tokenizer(folder)
    noise = np.random.default_rng(0).integers(0, 256, (*_SIDES, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, "JPEG", quality=20)
    behind = int(part_mb * 2**20 / num_rows) - stream.tell()
    if behind < 0:
        raise ValueError(
            f"found rows {-behind:,} bytes too small for a picture, expected fewer --documents or "
            "more --state-mb"
        )
    lines = ["sources:"]
    for number in range(num_sources):
        rng = np.random.default_rng(number + 1)
        rows = [
            {
                "image": {
                    "bytes": stream.getvalue() + rng.bytes(behind),
                    "path": None,
                },
                "caption": f"picture {row} of {number}",
            }
            for row in range(num_rows)
        ]
        table = pyarrow.Table.from_pylist(rows)
        path = folder / f"source-{number}.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=num_rows, use_dictionary=False)
        lines.append(
            f"  s{number}: {{path: {path}, format: chat, template: chatml, tokenizer: {tokenizer},"
            " media: {encoder: qwen3-vl, most-pixels: 100000}}"
        )
    file = folder / "data.yaml"
    file.write_text("\n".join([*lines, ""]))
    return file


@dataclass(frozen=True)
class Pictures:
    """Those of steps, as ranks find them in the plan."""

    corpus: Corpus

    @classmethod
    def of_split(cls, setup: SplitSetup) -> Self | None:
        """Those of a split; None: it is text."""
        if all(one.media is None for one in setup.spec.sources):
            return None
        return cls(setup.planner(lambda text: None, lambda source: source).corpus)

    def of(self, step: RankStep) -> list[WantedItem]:
        """All of a step."""
        assert step.planned is not None, "the source has pictures"
        drawn, found = step.planned.step, []
        for number, row in zip(drawn.sources.tolist(), drawn.rows.tolist(), strict=True):
            source = self.corpus.sources[number]
            if isinstance(source, MediaSource):
                items = source.items(row, drawn.max_length)
                found += [WantedItem(number, row, i, one) for i, (_, one) in enumerate(items)]
        return found


def digest_of_pictures(pictures: Sequence[Decoded]) -> str:
    """Return a fingerprint of pixels.

    Raises:
        ValueError: a picture is damaged.
    """
    found = hashlib.blake2b(digest_size=8)
    for one in pictures:
        if isinstance(one, str):
            raise ValueError(one)
        found.update(one.tobytes())
    return found.hexdigest()
