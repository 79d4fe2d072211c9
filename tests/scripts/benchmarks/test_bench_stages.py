"""The benchmark of stages: both ways run the same batch, one of them in parts."""

import re
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_hdp.planner import plan
from tests.support.processes import run_script
from tests.support.scripts import script_module

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_stages.py"


class Planning:
    """As much of a session as makes plans."""

    def plan(self, batch):
        return plan(
            list(map(len, batch)),
            ranks=1,
            tokens_per_rank=4096,
            pipeline_stages=4,
            sequence_parts=8,
        )


def test_whole_and_parts_are_one_plan():
    settings = Namespace(long=4096, short=64, shorts=4)
    batch = [range(4096), *[range(64)] * 4]
    with script_module("benchmarks/bench_stages.py") as bench:
        plans = bench.plans_of(Planning(), batch, settings)
    whole, parts = (plans[way] for way in ("whole", "parts"))
    assert max(parts.parts_of_each) > 1 and set(whole.parts_of_each) == {1}
    assert whole.sequences.tolist() == parts.sequences.tolist()


@pytest.mark.slow
def test_a_small_run():
    flags = "--stages 2 --layers 2 --hidden 64 --long 512 --short 32 --shorts 2 --steps 1 --parts 4"
    done = run_script(SCRIPT, *flags.split(), timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(
        r"^\| (whole|parts) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", done.stdout, re.M
    )
    assert [row[0] for row in rows] == ["whole", "parts"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:3])
    (apart,) = re.findall(r"difference of the loss: (\S+)", done.stdout)
    assert float(apart) < 1e-6
