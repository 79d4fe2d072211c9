"""Gradients after one HDP step equal those of one rank that saw the whole batch: the registry."""

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.megatron import parallel
from megatron_hdp.planner import plan
from tests.gradient_equivalence.case import ACROSS, Case, mixed, plans_of
from tests.gradient_equivalence.cases import CASES, QUICK, SMOKE
from tests.gradient_equivalence.faults import FAILING, FAULTS, QUICK_FAULTS
from tests.gradient_equivalence.offloaded import OFFLOAD, QUICK_OFFLOAD
from tests.support import gradients
from tests.support.fused_wgrad import accumulating
from tests.support.gradients import (
    EXPERTS,
    drawn_sequences,
    hdp_step,
    hdp_steps_of,
    largest_error,
    reference_on_first_rank,
)
from tests.support.mla import errors_of_kind, plain_stock_attention
from tests.support.ranks import RankError

TOLERANCE = 1e-10


def rows(table, quick):
    """Names of a table's rows; those that are not quick are slow."""
    assert quick <= table.keys()
    for name in table:
        marks = [] if name in quick else [pytest.mark.slow]
        yield pytest.param(name, marks=marks + [pytest.mark.smoke] * (name == SMOKE))


def errors_of_row(table, name, runs):
    """Body of a rank: the largest error of each run of a row, on the first rank."""
    row = table[name]
    case = getattr(row, "case", row)
    # compiling Megatron's fused functions would be half of the work: slow rows do
    compiled = table is CASES and name not in QUICK
    with case.around(), mock.patch.object(gradients, "COMPILES", compiled):
        return errors_of_kind(runs, *case.patches, *getattr(row, "planted", ()))


def errors_of_case(name, runs):
    return errors_of_row(CASES, name, runs)


def errors_with_fault(name, runs):
    return errors_of_row(FAULTS | FAILING, name, runs)


def briefly(case):
    """The same row with one strategy and one plan at most."""
    return replace(case, strategies=case.strategies[-1:], plans=min(case.plans, 1))


def check_row(run_ranks, folder, name, case):
    errors = run_ranks(case.ranks, errors_of_case, name, case.runs(folder), timeout_s=570)[0]
    assert max(errors) <= case.tolerance, errors


@pytest.mark.parametrize("name", [*rows(CASES, QUICK)])
def test_gradients(run_ranks, tmp_path, name):
    case = CASES[name]
    check_row(run_ranks, tmp_path, name, briefly(case) if name in QUICK else case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in sorted(QUICK) if briefly(CASES[name]) != CASES[name]]
)
def test_gradients_of_more_plans(run_ranks, tmp_path, name):
    check_row(run_ranks, tmp_path, name, CASES[name])


@pytest.mark.parametrize("name", [*rows(FAULTS, QUICK_FAULTS)])
def test_a_planted_fault_is_seen(run_ranks, tmp_path, name):
    fault = FAULTS[name]
    runs = fault.case.runs(tmp_path)
    assert runs
    errors = run_ranks(fault.case.ranks, errors_with_fault, name, runs)[0]
    assert min(errors) > fault.least, errors


@pytest.mark.parametrize("name", FAILING)
def test_a_planted_fault_ends_the_step(run_ranks, tmp_path, name):
    case = FAILING[name].case
    with pytest.raises(RankError):
        run_ranks(case.ranks, errors_with_fault, name, case.runs(tmp_path))


def with_and_without_offload(name, arguments, stay, leave):
    """Of the first rank: error against one rank alone, whether the bits agree, bytes offloaded."""
    latent = arguments.multi_latent_attention
    with OFFLOAD[name].around(), plain_stock_attention() if latent else nullcontext():
        parallel.initialise(arguments)
        without, expected = hdp_step(arguments, plan=stay)
        report, found = hdp_step(arguments, plan=leave)
        reference = reference_on_first_rank(arguments)
    if reference is None:
        return None
    assert without.offloaded_bytes == without.host_bytes_max == 0
    same = report.loss == without.loss and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
    assert report.host_bytes_max > 0
    return largest_error((report.loss, found), reference), same, report.offloaded_bytes


@pytest.mark.parametrize("name", [*rows(OFFLOAD, QUICK_OFFLOAD)])
def test_a_step_with_offload_has_the_bits_of_one_without(run_ranks, tmp_path, name):
    case = OFFLOAD[name]
    arguments = case.arguments_of(tmp_path, case)
    (stay,), (leave,) = (plans_of(arguments, case, offload=one) for one in (False, True))
    found = run_ranks(case.ranks, with_and_without_offload, name, arguments, stay, leave)[0]
    error, same, offloaded_bytes = found
    assert same and error <= TOLERANCE and offloaded_bytes > 1000, found


@st.composite
def batches(draw):
    """Ranks, capacity and the lengths of a batch that fits: 1 token to several capacities."""
    ranks, capacity = draw(st.integers(1, 5)), draw(st.integers(8, 40))
    multiple = draw(st.sampled_from([1, 1, 2, 3]))
    longest = ranks * (capacity // (2 * multiple)) * 2 * multiple
    longest = longest if ranks > 1 else capacity // multiple * multiple
    some_length = st.one_of(st.integers(1, min(6, longest)), st.integers(1, longest))
    lengths = st.lists(some_length, min_size=1, max_size=7)
    lengths = draw(lengths.filter(lambda found: max(found) > 1))  # one token predicts nothing
    kind = draw(st.sampled_from(["gqa", "mha-tied-layernorm", "mqa-qknorm-qkvbias"]))
    kind = {} if kind == "gqa" else CASES[f"pp2/{kind}"].settings
    more = {"hdp_tokens_per_rank": capacity, "hdp_slice_multiple": multiple, "seq_length": longest}
    more |= {"seed": draw(st.integers(0, 99)), "pipeline_model_parallel_size": 1}
    everyone = ("static", "naive", "dp-balance", "pp-balance")
    return Case(
        ranks, kind | more | {"max_position_embeddings": longest}, everyone, 0, tuple(lengths)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=200)
@given(case=batches())
def test_gradients_of_random_batches(run_ranks, case):
    with tempfile.TemporaryDirectory() as folder:
        case = replace(case, plans=0)
        runs = case.runs(folder)
        arguments = runs[0][0]
        runs += [(arguments, one) for one in plans_of(arguments, replace(case, plans=1))]
        errors = run_ranks(case.ranks, errors_of_kind, runs, timeout_s=570)[0]
    assert max(errors) <= TOLERANCE, errors


@pytest.mark.slow  # rows of EP groups have plans of `auto` and others
def test_gradients_of_plans_for_experts(run_ranks, tmp_path):
    """Two EP groups of two ranks: rings inside one and over both, whole ones beside, padding."""
    case = Case(4, EXPERTS | ACROSS | {"hdp_tokens_per_rank": 64}, ("auto",), 0)
    runs = case.runs(tmp_path)
    arguments = runs[0][0]
    lengths = plans_of(arguments, replace(case, plans=1))[0].lengths
    made = plan(lengths, ranks=4, tokens_per_rank=64, expert_parallel_size=2)
    assert made.strategy == "ep-balance"
    assert {2, 4} <= {len(made.micro_batch(m).ranks) for m in range(made.num_micro_batches)}
    apart = replace(made, positions=2 * made.positions)  # every second slot is padding
    runs += [(arguments, made), (arguments, apart)]
    assert max(run_ranks(4, errors_of_kind, runs)[0]) <= TOLERANCE


def is_rounded(arguments, around):
    """Body of a rank: whether bfloat16 holds the gradient of a layer's weights after a step."""
    with around():
        parallel.initialise(arguments)
        ((_, (chunk,)),) = hdp_steps_of(arguments, [None])
    weights = dict(chunk.named_parameters())
    (gradient,) = (weights[name].main_grad for name in weights if "0.mlp.linear_fc1.wei" in name)
    assert gradient.dtype == torch.float32 and gradient.any()
    return torch.equal(gradient.bfloat16().float(), gradient)


def test_weights_gradients_are_added_up_unrounded_where_apex_is(run_ranks, tmp_path):
    """Of one micro-batch of 16 predicted tokens, by which the sum is divided exactly."""
    case = Case(1, {"fp64": False, "bf16": True, "global_batch_size": 1}, lengths=(17,))
    found = [
        run_ranks(1, is_rounded, case.arguments_of(tmp_path, case), around)
        for around in (nullcontext, accumulating)
    ]
    assert found == [[True], [False]]


def test_what_is_mixed_is_masked(tmp_path):
    """The batch of the mixtures holds what they are about."""
    arguments = mixed(tmp_path, Case(1, {}))
    with mock.patch("megatron_hdp.megatron.parallel.is_first_rank", lambda: True):
        found = list(drawn_sequences(arguments))
    masked = [one for one in found if not one[2].all()]
    assert len(found) == 12 and 0 < len(masked) < 12
