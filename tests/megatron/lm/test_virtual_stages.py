"""Virtual stages in a stock Megatron-LM: the losses and optimizer states of one rank.

Needs what test_training.py needs. Megatron draws other weights in another layout, so runs go on
from the checkpoint of one rank.
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
from tests.support.gradients import write_corpus

pytestmark = MARKS

LAYERS = MODEL.replace("--num-layers 2", "--num-layers 4")
SHARDED = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
OVERLAPPED = [*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"]
OVERLAPPED += ["--ddp-bucket-size", "5000"]
RECOMPUTED = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
RECOMPUTED += ["--recompute-num-layers", "1"]
STAGES = ["--pipeline-model-parallel-size", "2"]
CHUNKS = [*STAGES, "--num-layers-per-virtual-pipeline-stage", "1"]
GROUPS = "--microbatch-group-size-per-virtual-pipeline-stage"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs of this file."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    write_corpus(folder, LENGTHS)
    run = partial(planned, folder, model=LAYERS, steps=6)
    virtual = [*HDP, "160", *OVERLAPPED, *RECOMPUTED, *CHUNKS, "--ckpt-step", "2"]
    drive(
        folder,
        [
            run("one", 1, [*HDP, "256", *SHARDED], save="one"),
            run("virtual", 4, virtual, load="one", save="virtual"),
            run("groups", 2, [*virtual, GROUPS, "3"], command=True, exits=[2, 2]),
            run("one by one", 2, [*virtual, "--no-overlap-p2p-communication"], exits=[1, 1]),
        ],
    )
    return folder


def test_losses_and_states_of_one_rank(runs):
    one, virtual = scalars(runs, "one"), scalars(runs, "virtual")
    require_same(virtual, one, rel=2e-6, steps=(3, 4, 5, 6))
    validated = one["lm loss validation"]
    assert virtual["lm loss validation"] == pytest.approx({n: validated[n] for n in (4, 6)})
    require_same_states(runs, "virtual", "one", iteration=6, rel=1e-5)


def test_pipelines_ran_different_counts(runs):
    """Also where each is padded to a multiple of the stages."""
    found = scalars(runs, "virtual")
    fewest, most = (found[f"hdp/micro-batches-{which}"] for which in ("min", "max"))
    assert any((fewest[step] + 1) // 2 < (most[step] + 1) // 2 for step in most)


def test_other_groups_are_refused_by_their_flag(runs):
    shown = (runs / "log groups.0").read_text()
    (line,) = (line for line in shown.splitlines() if line.startswith("megatron_hdp: "))
    assert f"error: {GROUPS}: found 3, expected 2" in line


def test_what_megatron_refuses_is_refused_by_megatron(runs):
    shown = (runs / "log one by one.0").read_text()
    assert "p2p communication overlap is disabled, pipeline-model-parallel size should be" in shown
