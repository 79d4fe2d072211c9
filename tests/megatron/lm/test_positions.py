"""Kinds of positions in a Megatron-LM checkout: rings train as one rank does.

Needs what test_training.py needs. YaRN's flags came with 0.19.
"""

from functools import partial

import pytest
from megatron.core import package_info

from tests.megatron.lm.runs import HDP, LENGTHS, MARKS, drive, planned, require_same, scalars
from tests.support.gradients import write_corpus

pytestmark = [*MARKS, pytest.mark.slow]

HAS_YARN = tuple(map(int, package_info.__version__.split(".")[:2])) >= (0, 19)
LLAMA = """--use-rope-scaling --rotary-base 500000 --rotary-percent 0.5 --no-rope-freq [0,1]
--rotary-interleaved --rotary-seq-len-interpolation-factor 2"""
YARN = """--position-embedding-type yarn --rotary-scaling-factor 4
--yarn-original-max-position-embeddings 64 --yarn-beta-fast 8 --no-rope-freq 2
--no-yarn-correction-range-round-to-int"""
NONE = "--position-embedding-type none"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    write_corpus(folder, LENGTHS)
    run = partial(planned, folder)
    plan = []
    for name, flags in (("plain", ""), ("llama", LLAMA), ("yarn", YARN), ("none", NONE)):
        if name == "yarn" and not HAS_YARN:
            continue
        one = [*HDP, "256", *flags.split()]
        plan.append(run(f"{name} one", 1, one, steps=2))
        plan.append(run(f"{name} two", 2, [*HDP, "160", *flags.split()], steps=2))
    drive(folder, plan)
    return folder


@pytest.mark.parametrize("name", ["llama", "yarn", "none"])
def test_rings_train_as_one_rank_does(runs, name):
    if name == "yarn" and not HAS_YARN:
        pytest.skip("needs Megatron-LM 0.19")
    one, two = scalars(runs, f"{name} one"), scalars(runs, f"{name} two")
    require_same(two, one, rel=2e-6, steps=(1, 2))
    plain = scalars(runs, "plain one")
    assert plain["lm loss"][2] != pytest.approx(one["lm loss"][2], rel=1e-5)  # the flags matter
