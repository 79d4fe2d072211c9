"""Headers of pictures read in a second, and pictures made into patches, by one core.

Sizes: ours (Pillow's lazy open) and those of the package imagesize, where it is installed, with how
many it gets wrong: it does not turn pictures as the EXIF of some formats says. Patches: ours, and a
DataLoader of torch in this process around the PIL processor of transformers, without any sending
between processes. Pictures are drawn: web photos of about 0.5 megapixels.
Run: ``python scripts/benchmarks/bench_pictures.py``.
"""

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "AVIF")
ORIENTATION, TURNED = 0x112, 6


def drawn(number: int, side: float, seed: int = 0) -> list[Any]:
    """Pictures of soft colours, lines and a little noise."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    pictures = []
    for _ in range(number):
        height, width = (int(one) for one in side * np.exp(rng.normal(0, 0.3, 2)))
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        pixels = np.array(coarse.resize((width, height), Image.Resampling.BICUBIC))
        pixels[::9] //= 2
        pixels ^= rng.integers(0, 8, pixels.shape, dtype=np.uint8)
        pictures.append(Image.fromarray(pixels))
    return pictures


def saved(picture: Any, form: str, *, turned: bool) -> bytes:
    """The bytes of a file."""
    from PIL import Image

    exif = Image.Exif()
    exif[ORIENTATION] = TURNED
    how = {"exif": exif if form == "TIFF" else exif.tobytes()} if turned and form != "GIF" else {}
    stream = io.BytesIO()
    picture.save(stream, form, **how)
    return stream.getvalue()


def a_second(do: Callable[[bytes], object], files: Sequence[bytes], least_s: float) -> float:
    """How many files are done in a second of CPU time, the median of three."""
    found = []
    for _ in range(3):
        begin, count = process_time(), 0
        while (passed := process_time() - begin) < least_s:
            for raw in files:
                do(raw)
            count += len(files)
        found.append(count / passed)
    return median(found)


def headers(pictures: Sequence[Any], least_s: float) -> None:
    """Print headers read in a second, by format."""
    from megatron_hdp.data.media import size_of_picture

    try:
        import imagesize
    except ImportError:
        imagesize = None

    def ours(raw: bytes) -> tuple[int, int]:
        size = size_of_picture(io.BytesIO(raw), "picture")
        return size.width, size.height

    def other(raw: bytes) -> tuple[int, int]:
        try:
            found: tuple[int, int] = imagesize.get(io.BytesIO(raw))
        except ValueError:
            return -1, -1
        return found

    print(f"{'headers/s of CPU':18}{'ours':>10}{'imagesize':>12}{'wrong':>8}")
    for form in FORMATS:
        for turned in (False, True):
            files = [saved(one, form, turned=turned) for one in pictures]
            sizes = [one.size[:: -1 if turned and form != "GIF" else 1] for one in pictures]
            assert [ours(raw) for raw in files] == sizes
            line = (
                f"{form + (', turned' if turned else ''):18}{a_second(ours, files, least_s):10,.0f}"
            )
            if imagesize is not None:
                pairs = zip(map(other, files), sizes, strict=True)
                wrong = sum(found != size for found, size in pairs)
                line += f"{a_second(other, files, least_s):12,.0f}{wrong:5} of {len(files)}"
            print(line)


def patches(pictures: Sequence[Any]) -> None:
    """Print what patches of all pictures take, ours and with transformers, taking turns."""
    import torch
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    from megatron_hdp.data.media import patches_of_picture
    from megatron_hdp.media import ENCODERS

    resizing = ENCODERS["qwen3-vl"].resizing
    limits = resizing.images
    processor = Qwen2VLImageProcessorPil(
        patch_size=resizing.patch,
        merge_size=resizing.merge,
        size={"shortest_edge": limits.least, "longest_edge": limits.most},
    )
    files = [saved(one, "JPEG", turned=False) for one in pictures]

    class Pictures(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, i: int) -> Any:
            picture = Image.open(io.BytesIO(files[i]))
            return processor(picture, return_tensors="pt")["pixel_values"]

    def ours() -> int:
        return sum(patches_of_picture(raw, "picture", resizing).values.nbytes for raw in files)

    def theirs() -> int:
        loader = torch.utils.data.DataLoader(Pictures(), batch_size=None)
        return sum(one.numel() * one.element_size() for one in loader)

    torch.set_num_threads(1)
    times: dict[str, list[float]] = {"ours": [], "transformers": []}
    sizes = {"ours": ours(), "transformers": theirs()}
    for _ in range(3):
        for name, do in (("ours", ours), ("transformers", theirs)):
            begin = perf_counter()
            do()
            times[name].append(perf_counter() - begin)
    pixels = sum(one.width * one.height for one in pictures) / 1e6
    print(f"\n{'patches of JPEG':18}{'pictures/s':>12}{'megapixels/s':>14}{'MB':>8}")
    for name, taken in times.items():
        seconds = median(taken)
        rates = f"{len(files) / seconds:12,.1f}{pixels / seconds:14,.1f}"
        print(f"{name:18}{rates}{sizes[name] / 1e6:8,.1f}")
    ratio = median(times["transformers"]) / median(times["ours"])
    print(f"{ratio:.2f} times as fast, {sizes['ours'] / sizes['transformers']:.3f} of the bytes")


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--side", type=float, default=700.0, help="pixels, the median")
    parser.add_argument("--seconds", type=float, default=0.5, help="a figure of headers, at least")
    arguments = parser.parse_args()
    pictures = drawn(arguments.pictures, arguments.side)
    headers(pictures, arguments.seconds)
    patches(pictures)


if __name__ == "__main__":
    main()
