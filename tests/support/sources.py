"""Three small sources on disk, one of them with masked conversations, and files that name them."""

from pathlib import Path

import numpy as np

from megatron_hdp.data.spans import SpansWriter
from tests.support.gradients import tiny_arguments, write_corpus

LENGTHS = {
    "web": [30, 3, 64, 20, 9, 41, 7, 7],
    "chat": [12, 40, 8, 25, 33],
    "code": [100, 5, 90, 31],
}
WEIGHTS = "schedule: [{from: 0, weights: {web: 0.5, chat: 0.2, code: 0.3}}]"


def write_sources(folder, names=tuple(LENGTHS)):
    """A pair for each; of conversations every other piece of four tokens is trained."""
    for seed, (name, lengths) in enumerate(LENGTHS.items()):
        if name not in names:
            continue
        (folder / name).mkdir()
        write_corpus(folder / name, lengths, seed)
        if name == "chat":
            with SpansWriter(folder / name / "corpus.spans") as writer:
                for length in lengths:
                    starts = np.arange(4, length, 8)
                    writer.add(np.stack([starts, np.minimum(starts + 4, length)], axis=1))
    return folder


def data_file(folder, more=WEIGHTS, names=tuple(LENGTHS), name="data.yaml", **keys):
    """A file of --hdp-data; `keys` are what a source has besides its path, as YAML."""
    lines = [
        f"  {one}: {{path: {one}/corpus{', ' + keys[one] if one in keys else ''}}}" for one in names
    ]
    path = Path(folder) / name
    path.write_text("\n".join(["sources:", *lines, more, ""]))
    return path


def mixed_arguments(folder, path, **overrides):
    """A tiny run over a file of --hdp-data."""
    settings = {"data_path": (), "hdp_data": path, "global_batch_size": 12}
    return tiny_arguments(str(folder / "web" / "corpus"), **(settings | overrides))
