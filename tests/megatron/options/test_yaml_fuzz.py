"""YAML of any bytes and structure is read as it is written or refused with the file's name."""

import random
import string

import yaml

from megatron_hdp.megatron.options import build_parser
from megatron_hdp.options import OptionError, yaml_to_argv

KEYS = ["seed", "lr", "save", "swiglu", "num_layers", "num-layers", "data-path", "config"]
KEYS += ["x", "model"]
WORDS = ["010", "1:30", "no", "yes", "true", "null", "~", "0x10", "1_000", ".inf", "-1"]
WORDS += ["2024-01-01"]
SYNTAX = "[]{}:,-?&*!|>'\"%@`#\n\n  \t<<~=\\0\x85\u2028\ufeff"


def scalar(draw):
    kind = draw.randrange(4)
    if kind < 2:
        return draw.choice(WORDS)
    if kind == 2:
        return repr(draw.randrange(10**6))
    return "".join(draw.choice(string.ascii_letters + "-./=") for _ in range(draw.randrange(1, 9)))


def flat(draw):
    """Flags and what is written for each."""
    written = {key: scalar(draw) for key in ("seed", "lr", "save") if draw.random() < 0.7}
    lines = [f"{key}: {value}" for key, value in written.items()]
    draw.shuffle(lines)
    return written, "\n".join(lines).encode()


def structure(draw, depth=0):
    kind = draw.randrange(6 if depth < 4 else 2)
    if kind < 3:
        return scalar(draw)
    if kind == 3:
        return [structure(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(KEYS): structure(draw, depth + 1) for _ in range(draw.randrange(5))}


def noise(draw):
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:
        tokens = (": ", "\n", "\n  ", "- ", "&a ", "*a", "<<: *a", "!!int ", "---")
        parts = [*KEYS, *WORDS, *SYNTAX, *tokens]
        return "".join(draw.choice(parts) for _ in range(draw.randrange(60))).encode()
    raw = yaml.safe_dump(structure(draw)).encode()
    if kind == 2:
        return raw
    at = draw.randrange(len(raw) + 1)
    return raw[:at] + draw.randbytes(draw.randrange(4)) + raw[at + draw.randrange(4) :]


def check(path, parser, seed):
    """One flat file and one of noise; returns whether the noise was read."""
    draw = random.Random(seed)
    written, raw = flat(draw)
    path.write_bytes(raw)
    try:
        argv = yaml_to_argv(path, parser)
        assert sorted(argv) == sorted(f"--{key}={value}" for key, value in written.items()), seed
    except OptionError as error:
        assert str(path) in str(error), (seed, error)
    path.write_bytes(noise(draw))
    try:
        argv = yaml_to_argv(path, parser)
        parser.parse_args(argv)
    except OptionError as error:
        assert str(path.parent) in str(error), (seed, error, path.read_bytes())
        return False
    return True


def test_damaged_files(tmp_path, seeds):
    parser = build_parser()
    read = [check(tmp_path / "run.yaml", parser, seed) for seed in seeds]
    assert 0 < sum(read) < len(read)
