"""Pairs of answers for the tutorial of tuning, made of its conversations.

``python scripts/examples/tutorial/pairs.py FOLDER`` reads ``chat.jsonl`` and writes
``pairs.jsonl``: a question, its answer, and the same answer shouted, which nobody likes.
"""

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Writes the file."""
    lines = (folder / "chat.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    rows = [
        {"prompt": [question], "chosen": [answer], "rejected": [shouted]}
        for question, answer in chats
        if (shouted := answer | {"content": answer["content"].upper()}) != answer
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{folder / 'pairs.jsonl'}: {len(rows):,} pairs")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
