"""Rings of multi-latent attention: what travels is counted, and chosen for each ring."""

from dataclasses import replace
from unittest import mock

from megatron_hdp.megatron import parallel
from megatron_hdp.planner import RingWays
from tests.gradient_equivalence.cases import CASES
from tests.support.gradients import hdp_step
from tests.support.mla import errors_of_kind

WAYS = ("kv", "latent")


def bytes_of_ways(arguments, plan):
    """Body of a rank: bytes that all ranks send around rings, by what travels."""
    parallel.initialise(arguments)
    return [hdp_step(replace(arguments, hdp_mla_ring=way), plan=plan)[0].ring_bytes for way in WAYS]


def test_what_travels_is_counted(run_ranks, tmp_path):
    *_, (arguments, plan) = CASES["mla-kv-yarn"].runs(tmp_path)
    tokens = 0  # of members, once for each hop
    for i in range(plan.num_micro_batches):
        degree = int(plan.rank_offsets[i + 1] - plan.rank_offsets[i])
        rows = plan.sequences[plan.sequence_offsets[i] : plan.sequence_offsets[i + 1]]
        lengths = plan.lengths[rows].tolist() if degree > 1 else []
        tokens += (degree - 1) * sum(-(-n // (2 * degree)) * 2 * degree for n in lengths)
    assert tokens > 0
    values = {"kv": 4 * (6 + 4 + 5), "latent": 10 + 4}  # of a token in a layer
    expected = [3 * arguments.num_layers * tokens * values[way] * 8 for way in WAYS]
    assert run_ranks(3, bytes_of_ways, arguments, plan)[0] == expected


def errors_of_both_in_a_step(cases):
    """Body of a rank: errors, and how often the cost model let what travel."""
    said = []

    def latent_in_turn(self, lengths, ring):
        said.append(sum(lengths) // 12 % 2 == 0)  # members of a ring agree
        return said[-1]

    with mock.patch.object(RingWays, "latent_is_faster", latent_in_turn):
        errors = errors_of_kind(cases)
    return errors, sum(said), len(said)


def test_rings_of_a_step_may_differ(run_ranks, tmp_path):
    """Under auto the cost model is asked for each ring; gradients of both ways add up."""
    _, *runs = CASES["mla-kv-yarn"].runs(tmp_path)
    runs = [(replace(arguments, hdp_mla_ring="auto"), plan) for arguments, plan in runs]
    errors, latents, total = run_ranks(3, errors_of_both_in_a_step, runs)[0]
    assert 0 < latents < total
    assert max(errors) <= 1e-10, errors
