"""Stages of unequal layers in a stock Megatron-LM: the losses and optimizer states of one rank.

Needs what test_training.py needs. Runs go on from the checkpoint of one rank, as those of
test_virtual_stages.py.
"""

from functools import partial

import pytest

from tests.megatron.lm.runs import (
    HDP,
    LENGTHS,
    MARKS,
    MODEL,
    drive,
    planned,
    require_same,
    require_same_states,
    scalars,
)
from tests.megatron.lm.test_virtual_stages import OVERLAPPED, SHARDED
from tests.support.gradients import write_corpus

pytestmark = [*MARKS, pytest.mark.slow]

STAGES = ["--pipeline-model-parallel-size", "2"]
CHUNKS = [*STAGES, "--num-virtual-stages-per-pipeline-rank", "2"]
LAYOUT = "--pipeline-model-parallel-layout"
UNEVEN = {  # ranks, flags
    "first": (4, [*STAGES, "--decoder-first-pipeline-num-layers", "2"]),
    "last with chunks": (4, [*OVERLAPPED, *CHUNKS, "--decoder-last-pipeline-num-layers", "4"]),
    "accounted": (
        4,
        [*CHUNKS, "--account-for-embedding-in-pipeline-split"]
        + ["--account-for-loss-in-pipeline-split"],
    ),
    "layout with chunks": (4, [*OVERLAPPED, *STAGES, LAYOUT, "E|tt|ttt|tL"]),
    "a stage without layers": (
        3,
        ["--pipeline-model-parallel-size", "3", LAYOUT, "Ettt|ttt|L"],
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    write_corpus(folder, LENGTHS)
    run = partial(planned, folder, model=MODEL.replace("--num-layers 2", "--num-layers 6"))
    common = [*HDP, "160", *SHARDED, "--ckpt-step", "2"]
    plan = [run("one", 1, [*HDP, "256", *SHARDED], save="one")]
    for name, (ranks, flags) in UNEVEN.items():
        capacity = ["--hdp-tokens-per-rank", "160" if ranks == 4 else "256"]
        plan.append(run(name, ranks, [*common, *capacity, *flags], load="one", save=name))
    drive(folder, plan)
    return folder


@pytest.mark.parametrize("name", UNEVEN)
def test_losses_and_states_of_one_rank(runs, name):
    one, found = scalars(runs, "one"), scalars(runs, name)
    require_same(found, one, rel=1e-5, steps=(3, 4))
    for tag in ("lm loss", "lm loss validation"):
        for step, value in found[tag].items():
            assert value == pytest.approx(one[tag][step], rel=1e-6)
    require_same_states(runs, name, "one", iteration=4, rel=1e-5)
