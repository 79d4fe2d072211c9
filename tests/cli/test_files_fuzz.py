"""Lengths files, plans and cost models of any bytes: read rightly or refused by name."""

import json
import random

from megatron_hdp.cli.lengths import read_lengths
from megatron_hdp.planner import CostModel, Plan, PlanError, plan

LINES = (
    *("1", "12", " 7 ", "", "007"),  # good ones
    *("0", "-1", "1.5", "x", "1 2", str(2**63 - 1), str(2**63), "9" * 30),
)
GOOD = plan([5, 900, 30, 30], ranks=4, tokens_per_rank=300).to_json()
VALUES = (
    *(None, True, -1, 0, 2**31, 2**63, 2**70, 1.5, 1e308),
    *("x", [], {}, [[1]], {"1": [2]}, "9" * 5000),
)


def lengths_of(text):
    """What a simple reader makes of the file; None if it may not be read."""
    lines = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    lines = [line for line in lines if line]
    plain = all(line.isascii() and line.isdigit() and 0 < int(line) < 2**63 for line in lines)
    return list(map(int, lines)) if plain and lines else None


def check_lengths(path, draw, seed):
    ends = draw.choice(["\n", "\r\n", "\r"])
    lines = draw.choices(LINES[:5] if draw.random() < 0.5 else LINES, k=draw.randrange(1, 9))
    text = ends.join(lines)
    raw = draw.choice([b"", b"\xef\xbb\xbf"]) + text.encode()
    expected = lengths_of(text)
    if draw.random() < 0.3:
        raw, expected = draw.randbytes(draw.randrange(60)), "anything"
    path.write_bytes(raw)
    try:
        found = read_lengths(str(path)).tolist()
    except ValueError as error:
        assert str(path) in str(error), (seed, error)
        found = None
    assert expected in ("anything", found), (seed, raw)


def changed(draw):
    """A plan with something in it replaced, cut, or flipped."""
    if draw.random() < 0.4:
        raw = bytearray(GOOD)
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        return bytes(raw[: draw.randrange(len(raw))] if draw.random() < 0.3 else raw)
    data = json.loads(GOOD)
    target = draw.choice([data, *data["micro_batches"]])
    key = draw.choice([*target, "other"])
    target[key] = draw.choice(VALUES)
    if draw.random() < 0.2:
        return b"[" * 3000
    return json.dumps(data).encode()


def check_plan(path, draw, seed):
    path.write_bytes(changed(draw))
    try:
        Plan.load(path).validate(num_layers=4)
    except PlanError:
        return
    except ValueError as error:
        assert str(path) in str(error), (seed, error)


def check_cost_model(path, draw, seed):
    data = {"a": 1e-9, "b": 1e-6, "kv_bytes_per_token": 1}
    others = ["num_layers", "rank_speeds", "attention_points", "other"]
    data[draw.choice([*data, *others])] = draw.choice(VALUES)
    raw = json.dumps(data).encode()
    path.write_bytes(
        draw.choice([raw, raw[:-3], b"[" * 3000, draw.randbytes(40), b"\xff\xfe" + raw])
    )
    try:
        CostModel.from_json(path)
    except ValueError as error:
        assert str(path) in str(error), (seed, error)


def test_damaged_files(tmp_path, seeds):
    for seed in seeds:
        for check in (check_lengths, check_plan, check_cost_model):
            check(tmp_path / "file", random.Random(seed), seed)
