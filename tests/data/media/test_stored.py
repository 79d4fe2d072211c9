"""A stored picture is to an encoder what its patches are, and is read once it encodes it."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_hdp.data.media import (
    ItemSize,
    MediaError,
    MediaFiles,
    PictureSettings,
    StoredPicture,
    patches_of_picture,
    section,
)
from megatron_hdp.data.spec import MediaSpec
from megatron_hdp.encoders import Qwen3VLEncoder
from tests.data.media import sources

SIDES = sources.SIDES[1]
CONFIG = {
    "text_config": {},
    "vision_config": {
        **{"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2},
        **{"patch_size": 16, "out_hidden_size": 16, "num_position_embeddings": 36},
        "deepstack_visual_indexes": [0],
    },
}


@pytest.fixture
def stored(tmp_path: Path) -> StoredPicture:
    media = MediaSpec(encoder="qwen3-vl", least_pixels=1, most_pixels=20_000)
    raw = sources.picture(1)
    (tmp_path / "x.bin").write_bytes(b"before" + raw + b"behind")
    files = MediaFiles(str(tmp_path), PictureSettings.of(media))
    return StoredPicture(files, ("x.bin", 6, len(raw)), ItemSize(*SIDES))


def test_an_encoder_sees_its_patches(stored: StoredPicture) -> None:
    torch.manual_seed(0)
    encoder = Qwen3VLEncoder(CONFIG)
    settings = stored._files.settings
    patches = patches_of_picture(sources.picture(1), "x", settings.resizing)
    assert encoder.patches(stored) == encoder.patches(patches) == np.prod(stored.grid)
    assert encoder.grid(stored) == encoder.grid(patches)
    assert "pixels" not in vars(stored)
    with torch.no_grad():
        assert torch.equal(encoder([stored]), encoder([patches]))
    assert np.array_equal(np.asarray(stored.values), patches.values)


def test_it_is_the_same_on_all_ranks_wherever_its_files_lie(
    stored: StoredPicture, tmp_path: Path
) -> None:
    files = MediaFiles(str(tmp_path / "elsewhere"), stored._files.settings)
    other = StoredPicture(files, stored._place, ItemSize(*SIDES))
    assert repr(other) == repr(stored)
    assert repr(StoredPicture(files, stored._place, ItemSize(SIDES[0], SIDES[1] * 2))) != repr(
        stored
    )


def test_a_file_that_has_changed_is_told(stored: StoredPicture, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"before" + sources.picture(0).ljust(stored._place[2], b"\0"))
    with pytest.raises(MediaError, match="found a grid of .* by the header: the file has changed"):
        _ = stored.array
    (tmp_path / "x.bin").write_bytes(b"before")
    with pytest.raises(MediaError, match=r"found 0 bytes from 6 on, expected .* has changed"):
        _ = stored.array


def test_a_section_is_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(256)) * 100)
    with section(str(tmp_path / "x"), 1000, 20_000) as part:
        expected = io.BytesIO((tmp_path / "x").read_bytes()[1000:21_000])
        for offset, whence, count in [(0, 0, 5), (-7, 2, 9), (3, 0, 15_000), (2, 1, -1), (0, 2, 4)]:
            assert part.seek(offset, whence) == expected.seek(offset, whence)
            assert part.read(count) == expected.read(count)
