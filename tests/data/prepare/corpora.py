"""Made-up corpora, what is expected of them, and what the tests look at."""

import json
import random
from pathlib import Path

from megatron_hdp.data import TokenFile
from megatron_hdp.data.prepare import prepare
from megatron_hdp.data.spec import SourceSpec

EOD = 256


def texts_of(num, seed=0, longest=400):
    draw = random.Random(seed)
    return ["".join(draw.choices("abc ä\n", k=draw.randrange(1, longest))) for _ in range(num)]


def write_lines(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def conversation(number, *, rounds=1):
    turns = [("user", f"what is {number}?"), ("assistant", f"it is {number} " * (1 + number % 5))]
    return {"messages": [{"role": role, "content": text} for role, text in turns * rounds]}


def spec_of(path, **more):
    return SourceSpec(**{"name": "web", "path": str(path), **more})


def run(path, folder, *, workers=0, said=None, **more):
    """Prepare a source of bytes in small shards."""
    keys = ("patience_s", "shard_bytes", "tokenizer")
    options = {"tokenizer": "byte", "shard_bytes": 6000}
    options |= {key: more.pop(key) for key in keys if key in more}
    said = [] if said is None else said
    return prepare(
        spec_of(path, **more), folder=Path(folder), workers=workers, say=said.append, **options
    )


def documents(prefix):
    file = TokenFile(prefix)
    return [file.read(d, 0, int(n)).tolist() for d, n in enumerate(file.lengths)]


def as_bytes(texts, eod=True):
    return [[*text.encode(), *([EOD] if eod else [])] for text in texts if text]


def pair(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())
