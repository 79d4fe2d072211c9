"""Gradients after a checkout's step of a hybrid with multi-token prediction are those of one rank.

Those of sessions over hybrids: `tests.session.test_hybrids` and `tests.session.test_mtp`.
"""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.lm.model import take_over
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import num_model_chunks
from tests.gradient_equivalence.case import ACROSS, PP2, TP2_SP, Case, joined
from tests.gradient_equivalence.settings import MTP, RECOMPUTE, SHARDED, TIED
from tests.support import gradients
from tests.support.gradients import EXPERTS
from tests.support.hybrids import HAS_LATENT, NEEDS, hybrid, hybrid_chunk
from tests.support.mla import MLA

pytestmark = NEEDS

PADDED = TP2_SP | {"make_vocab_size_divisible_by": 64}
CASES = {  # pattern, ranks, settings
    "rings": ("*-*-/*-/*-", 3, {}),
    "tied": ("*-*-/*-/*-", 2, TIED),
    "tensor": ("*-*-/*-/*-", 4, PADDED),
    "stages": ("*-|*-/*-/*-", 4, PP2 | SHARDED),
    "virtual-stages": ("*|-|*|-/*-/*-", 4, PP2 | {"num_virtual_stages_per_pipeline_rank": 2}),
    "experts": ("*E*-/*E/*E", 2, EXPERTS),
    "experts-apart": ("*E*-/*E/*E", 4, EXPERTS | ACROSS),
    "latent": ("+-+-/+-/+-", 2, MLA),
    "recompute": ("*-*-/*-/*-", 2, RECOMPUTE),
}
QUICK = {"experts"}


def errors_of_hybrid(runs, pattern, fault=nullcontext):
    """Body of a rank: see `gradients.errors_of`; Megatron builds the model, which is taken over."""

    def chunks_of(arguments, vocab_size):
        numbers = range(num_model_chunks(arguments))
        chunks = [hybrid_chunk(arguments, one, pattern=pattern) for one in numbers]
        take_over(chunks)
        return chunks

    def alone(arguments):
        parallel.set_seeds(arguments.seed)
        return hybrid(gradients.stock(arguments), 0, pattern.replace("|", ""))

    with (
        mock.patch.object(building, "build_chunks", chunks_of),
        mock.patch.object(gradients, "stock_model", alone),
        fault(),
    ):
        return gradients.errors_of(runs)


def runs_of(folder, name):
    pattern, ranks, settings = CASES[name]
    letters = pattern.partition("/")[0].replace("|", "")
    case = Case(ranks, joined(MTP, {"num_layers": len(letters)}, settings))
    return ranks, case.runs(folder), pattern


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES],
)
def test_gradients(run_ranks, tmp_path, name):
    ranks, runs, pattern = runs_of(tmp_path, name)
    if "+" in pattern and not HAS_LATENT:
        pytest.skip("this megatron-core has no latent attention in hybrids: install 0.19")
    errors = run_ranks(ranks, errors_of_hybrid, runs, pattern)[0]
    assert len(errors) == len(runs) and max(errors) <= 1e-10, errors


def without_divisors():
    """Each depth's loss is weighed as if as many tokens had a label there as anywhere."""
    target = "megatron_hdp.megatron.model.mtp.FurtherTokens.weights_of"
    factor = MTP["mtp_loss_scaling_factor"] / MTP["mtp_num_layers"]
    return mock.patch(target, lambda self, depth, dtype: factor * self.mask[depth - 1].to(dtype))


@pytest.mark.slow
def test_a_planted_fault_is_seen(run_ranks, tmp_path):
    ranks, runs, pattern = runs_of(tmp_path, "rings")
    errors = run_ranks(ranks, partial(errors_of_hybrid, fault=without_divisors), runs, pattern)[0]
    assert min(errors) > 1e-4, errors
