"""Steps of ranks, from plans that no strategy would make."""

from dataclasses import fields, replace

import numpy as np

from megatron_hdp.data.mixture import Position, Step
from megatron_hdp.data.mixture.position import Drawn
from megatron_hdp.data.steps import Amounts, PlannedStep, Reader, StepShares, StepTotals, read_step
from tests.support.random_plans import random_plan


class Numbers:
    """Tokens that are made up from where they stand; every third has no trained label."""

    def tokens(self, source, row, start, count):
        return (np.arange(start, start + count) * 31 + row * 7 + source) % 50_000

    def is_trained(self, source, row, start, stop):
        return np.arange(start, stop) % 3 > 0


def rank_steps(lengths, ranks=3, *, seed=0, tokens_per_rank=128, **reader):
    """Return the step of every rank under a random plan."""
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths, dtype=np.int64)
    rows = rng.permutation(len(lengths))
    drawn = {"pages": Drawn(7, 3, 2**53 + 1, 0.1 + 0.2), "böcker": Drawn(owed=-5e-324)}
    step = Step(
        sources=rng.integers(0, 2, len(lengths)),
        rows=rows,
        starts=rng.integers(0, 9, len(lengths)),
        lengths=lengths,
        num_labels=lengths - 1,
        num_loss_tokens=lengths // 2,
        before=Position(4, 44, 4444, drawn),
        after=Position(5, 44 + len(lengths), 4444 + int(lengths.sum()), drawn),
        max_length=100,
        weights=(0.5, 0.5),
    )
    made = random_plan(
        lengths,
        ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        slice_multiple=2,
        seed=seed,
        offload=True,
    )
    totals = StepTotals.of(PlannedStep(step, made, failure="a „failure”\n\0"), 2)
    return [
        read_step(totals, share, Reader(share.hdp_rank, 50_000, **reader), Numbers())
        for share in StepShares(step, made, is_aligned=bool(seed % 2)).of(range(ranks))
    ]


def differences(one, other, where="step"):
    """Return the names of what differs, to the bit and the type."""
    if isinstance(one, np.ndarray):
        is_same = (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
        return [] if is_same else [where]
    if type(one) is not type(other):
        return [where]
    if isinstance(one, tuple | dict):
        if len(one) != len(other) or (isinstance(one, dict) and one.keys() != other.keys()):
            return [where]
        keys = one if isinstance(one, dict) else range(len(one))
        return [name for k in keys for name in differences(one[k], other[k], f"{where}.{k}")]
    if hasattr(one, "__dataclass_fields__"):
        names = [item.name for item in fields(one) if item.compare]
        pairs = [(getattr(one, name), getattr(other, name), name) for name in names]
        return [name for a, b, n in pairs for name in differences(a, b, f"{where}.{n}")]
    return [] if repr(one) == repr(other) else [where]


def with_loss_tokens(step, loss_tokens):
    """Return a step whose totals name other loss tokens."""
    amounts = Amounts(**{**vars(step.totals.amounts), "loss_tokens": loss_tokens})
    return replace(step, totals=replace(step.totals, amounts=amounts))
