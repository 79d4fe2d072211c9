"""What a frozen model says of answers: one sum of log-probabilities each, kept by document.

The file is an ``.npz``: an array of float64 for each token file, by the fingerprint of what stands
in it, NaN where nothing is known yet, and under ``about`` (JSON) the fingerprint of the model. So
it serves every run over these answers, however it draws and splits them. Of answers behind prompts
of others it has two arrays, fingerprints of what they are and their sums.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hdp.arrays import BoolArray, Float64Array, Int64Array
from megatron_hdp.files import write_atomically

_VERSION = 1
_ABOUT = "about"
_UNRELATED, _OF_UNRELATED = "unrelated answers", "sums of unrelated answers"


class ReferenceSums:
    """Sums of some token files' answers, nats.

    Attributes:
        model: fingerprint of the model that they are of.
    """

    def __init__(
        self,
        model: str,
        sums: Mapping[str, Float64Array] | None = None,
        unrelated: Mapping[int, float] | None = None,
    ) -> None:
        self.model = model
        self._sums = dict(sums or {})
        self._unrelated = dict(unrelated or {})

    def hold(self, data: int, num_documents: int) -> None:
        """Makes room for a token file, by the fingerprint of what stands in it.

        Raises:
            ValueError: there are sums of another number of documents.
        """
        found = self._sums.setdefault(_key(data), np.full(num_documents, np.nan))
        if len(found) != num_documents:
            raise ValueError(
                f"found reference log-probabilities of {len(found):,} documents, expected "
                f"{num_documents:,}: the file is damaged; remove it"
            )

    def of(self, data: int, documents: Int64Array) -> Float64Array:
        """Sums of documents, NaN where they are not known."""
        found: Float64Array = self._sums[_key(data)][documents]
        return found

    def are_known(self, data: int, documents: Int64Array) -> BoolArray:
        """Whether each of some documents has a sum."""
        found: BoolArray = ~np.isnan(self.of(data, documents))
        return found

    def put(self, data: int, documents: Int64Array, sums: Float64Array) -> None:
        """Notes sums of documents."""
        self._sums[_key(data)][documents] = sums

    def of_unrelated(self, keys: Int64Array) -> Float64Array:
        """Sums of answers behind prompts of others, by fingerprints; NaN where not known."""
        return np.array([self._unrelated.get(key, np.nan) for key in keys.tolist()])

    def put_unrelated(self, keys: Int64Array, sums: Float64Array) -> None:
        """Notes sums of answers behind prompts of others."""
        self._unrelated.update(zip(keys.tolist(), sums.tolist(), strict=True))

    def write(self, path: Path) -> None:
        """Writes the file: all of it or nothing.

        Raises:
            OSError: the disk is full, for one.
        """
        about = json.dumps({"version": _VERSION, "model": self.model}).encode()
        raw = io.BytesIO()
        arrays: dict[str, Any] = {**self._sums, _ABOUT: np.frombuffer(about, np.uint8)}
        if self._unrelated:
            arrays[_UNRELATED] = np.array(list(self._unrelated), dtype=np.int64)
            arrays[_OF_UNRELATED] = np.array(list(self._unrelated.values()))
        np.savez(raw, **arrays)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, raw.getvalue(), durable=True)

    @classmethod
    def read(cls, path: Path) -> ReferenceSums:
        """Reads the file.

        Raises:
            ValueError: it is no such file.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                about: Any = json.loads(arrays[_ABOUT].tobytes())
                if about["version"] != _VERSION:
                    raise ValueError(f"version {about['version']}, expected {_VERSION}")
                sums = {name: arrays[name] for name in arrays.files if name != _ABOUT}
                keys, of_keys = (sums.pop(one, np.zeros(0)) for one in (_UNRELATED, _OF_UNRELATED))
                unrelated = dict(zip(keys.tolist(), of_keys.tolist(), strict=True))
                return cls(str(about["model"]), sums, unrelated)
        except (ValueError, KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"--hdp-reference-log-probs {path}: found no file of reference log-probabilities "
                f"({error}): remove it, and give --hdp-reference-checkpoint to make it again"
            ) from error


def _key(data: int) -> str:
    return f"{data:016x}"
