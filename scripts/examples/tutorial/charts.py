"""``python scripts/examples/tutorial/charts.py FOLDER`` draws bar charts, each with its answer.

Two of three are small, the others posters with some forty times the pixels.
"""

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

QUESTION = "Which bar is the highest?"
_COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 119, 180)}
_CHARTS, _POSTERS = 400, 0.3
_SMALL, _LARGE = 40, 256  # pixels of a side, about


def chart(number: int) -> tuple[Image.Image, str]:
    """Returns a chart, and the colour of its highest bar."""
    rng = np.random.default_rng(number)
    middle = _LARGE if rng.random() < _POSTERS else _SMALL
    width, height = (int(middle * np.exp(rng.normal(0.4, 0.25))) for _ in range(2))
    picture = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(picture)
    names = list(_COLOURS)
    shares = rng.permutation([0.3, 0.5, 0.9])
    wide = width / (2 * len(names) + 1)
    for i, (name, share) in enumerate(zip(names, shares, strict=True)):
        left = (2 * i + 1) * wide
        pen.rectangle((left, height * (1 - share), left + wide, height), fill=_COLOURS[name])
    return picture, names[int(np.argmax(shares))]


def main(folder: Path) -> None:
    """Writes the charts, and a row of a conversation for each."""
    (folder / "charts").mkdir(parents=True)
    rows = []
    for number in range(_CHARTS):
        picture, answer = chart(number)
        name = f"charts/{number}.png"
        picture.save(folder / name)
        turns = [("human", f"<image>{QUESTION}"), ("gpt", answer)]
        said = [{"from": who, "value": what} for who, what in turns]
        rows.append({"image": name, "conversations": said})
    (folder / "charts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{folder}: {len(rows)} charts")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
