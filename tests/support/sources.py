"""Three small sources on disk, one of them with masked conversations, and files that name them."""

from tests.support.gradients import tiny_arguments
from tests.support.thread_plane import WEIGHTS, data_file, write_notes, write_pair

__all__ = ["LENGTHS", "WEIGHTS", "data_file", "mixed_arguments", "write_notes", "write_sources"]

LENGTHS = {
    "web": [30, 3, 64, 20, 9, 41, 7, 7],
    "chat": [12, 40, 8, 25, 33],
    "code": [100, 5, 90, 31],
}


def write_sources(folder, names=tuple(LENGTHS)):
    for seed, (name, lengths) in enumerate(LENGTHS.items()):
        if name in names:
            write_pair(folder, name, lengths, seed)
    return folder


def mixed_arguments(folder, path, **overrides):
    settings = {"data_path": (), "hdp_data": path, "global_batch_size": 12}
    return tiny_arguments(str(folder / "web" / "corpus"), **(settings | overrides))
