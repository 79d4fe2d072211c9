"""Rows whose micro-batches run in parts."""

from tests.gradient_equivalence.case import LENGTHS, PP2, TP2_SP, Case, joined
from tests.gradient_equivalence.settings import MHA, MQA, PP4, RECOMPUTE, SHARDED, layers


def parted() -> dict[str, Case]:
    rows = {
        "pp2": (4, PP2),
        "pp2-tp2-sp": (8, joined(MHA, PP2, TP2_SP)),
        "pp2-overlap-recompute": (4, joined(PP2, SHARDED, RECOMPUTE)),
        "pp4-mqa": (8, joined(MQA, PP4, layers(4))),
    }
    return {
        f"parts/{name}": Case(ranks, settings | {"hdp_sequence_parts": 5}, (), 4, LENGTHS * 2)
        for name, (ranks, settings) in rows.items()
    }
