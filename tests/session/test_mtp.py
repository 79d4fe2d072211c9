"""Multi-token prediction beside any loss of a session: its mean over the batch, as of one rank."""

import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.session import TokenBatch
from tests.gradient_equivalence.settings import MTP, RECOMPUTE, TIED
from tests.support import media
from tests.support.gradients import EXPERTS
from tests.support.hybrids import HAS_LATENT, NEEDS, hybrid_errors
from tests.support.mla import MLA
from tests.support.own_loop import arguments_of, batch_of, errors_of, session_of

SLOW = pytest.mark.slow
TP2_SP = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}
TP2_SP |= {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2, "hdp_tokens_per_rank": 200}
KINDS = ("weighted", "clipped", "values", "preferred", "log-probs")
GPTS = {  # ranks, overrides
    "rings": (2, {}),
    "tied": (2, TIED),
    "tp2-sp": (4, TP2_SP),
    "pp2": (4, PP2),
    "pp2-parts": (4, PP2 | {"hdp_tokens_per_rank": 128, "hdp_sequence_parts": 5}),
    "experts-ep2": (2, EXPERTS | {"expert_model_parallel_size": 2}),
    "recompute": (2, RECOMPUTE),
}
WIDE = {"kv_channels": 12, "num_layers": 4}
ITEMS = {  # ranks, family, overrides
    "rings": (3, None, {}),
    "tp2-sp": (4, None, TP2_SP),
    "pp2-parts": GPTS["pp2-parts"][:1] + (None,) + GPTS["pp2-parts"][1:],
    "deepstack": (2, "qwen3-vl", WIDE),
    "recompute": (2, "qwen2.5-vl", RECOMPUTE | WIDE),
}
HYBRIDS = {  # pattern, ranks, overrides
    "rings": ("*-*-/*-/*-", 2, {}),
    "experts": ("*E*-/*E/*E", 2, EXPERTS),
    "latent": ("+-+-/+-/+-", 2, MLA),
    "tp2-sp": ("*-*-/*-/*-", 4, TP2_SP),
    "pp2": ("*-|*-/*-/*-", 4, PP2),
}


def slow_one(name):
    return pytest.param(name, marks=SLOW)


def check(found, kinds):
    assert len(found) == 2 * len(kinds) and max(found.values()) <= 1e-10, found


@SLOW
@pytest.mark.parametrize("layout", GPTS)
def test_gradients_of_a_gpt(run_ranks, layout):
    ranks, overrides = GPTS[layout]
    check(run_ranks(ranks, errors_of, arguments_of(**MTP, **overrides), KINDS)[0], KINDS)


@NEEDS
@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=() if one == "experts" else SLOW) for one in HYBRIDS]
)
def test_gradients_of_a_hybrid(run_ranks, layout):
    pattern, ranks, overrides = HYBRIDS[layout]
    if "+" in pattern and not HAS_LATENT:
        pytest.skip("this megatron-core has no latent attention in hybrids: install 0.19")
    arguments = arguments_of(**MTP, num_layers=4, **overrides)
    check(run_ranks(ranks, hybrid_errors, arguments, pattern, KINDS[:3])[0], KINDS[:3])


@pytest.mark.parametrize("layout", [pytest.param("tied", marks=()), *map(slow_one, ITEMS)])
def test_gradients_beside_items(run_ranks, layout):
    """Of encoder and model; no depth learns from a token of an item that it is given."""
    ranks, family, overrides = ITEMS.get(layout, (2, None, TIED))
    arguments = arguments_of(**MTP, **overrides)
    errors, _ = run_ranks(ranks, media.errors_of, arguments, (None, 0), family=family)[0]
    assert max(errors.values()) <= 1e-10, errors


def as_if_all_were_text(self, batch, micro_batch):
    """Has depths learn from tokens of items as well."""
    return micro_batch


@SLOW
def test_a_depth_that_learns_from_items_is_seen(run_ranks):
    fault = "megatron_hdp.megatron.media.items.BatchMedia.with_text_behind", as_if_all_were_text
    errors, _ = run_ranks(2, media.errors_of, arguments_of(**MTP), (0,), fault)[0]
    assert errors[0] > 1e-5, errors


def losses_by_divisor():
    """Body of a rank: loss and that of further tokens with two divisors, and in evaluation."""
    arguments = arguments_of(**MTP)
    parallel.initialise(arguments)
    session, batch = session_of(arguments), batch_of()
    plain = TokenBatch(batch.tokens, batch.loss_mask)
    reports = [session.step(plain, divisor=one) for one in (None, 7.0)]
    reports.append(session.step(plain, forward_only=True))
    return [(one.loss * one.divisor, one.mtp_loss) for one in reports]


@SLOW
def test_its_loss_is_reported_and_does_not_depend_on_the_divisor(run_ranks):
    (loss, further), (_, same), (evaluated, none) = run_ranks(2, losses_by_divisor)[0]
    assert further == pytest.approx(same, rel=1e-12) and 4 < further < 8
    assert evaluated == pytest.approx(loss, rel=1e-12) and none is None


def without_weights(self, micro_batches, divisor):
    """As if each depth's sum were divided like the loss."""
    return (MTP["mtp_loss_scaling_factor"] / MTP["mtp_num_layers"],) * self.depths


@SLOW
def test_a_planted_fault_fails_the_check(run_ranks):
    fault = "megatron_hdp.megatron.step.figures.FurtherLosses.weights", without_weights
    found = run_ranks(2, errors_of, arguments_of(**MTP), ("clipped",), (0,), fault)[0]
    assert min(found.values()) > 1e-4, found


def refusal():
    """Body of a rank: what a critic with such layers is told."""
    arguments = arguments_of(**MTP)
    parallel.initialise(arguments)
    (chunk,) = session_of(arguments).chunks
    chunk.module.output_layer = torch.nn.Linear(16, 1, bias=False)
    with pytest.raises(ValueError) as refused:
        chunk.module.take_over_loss()
    return str(refused.value)


@SLOW
def test_a_critic_has_none(run_ranks):
    assert "multi-token prediction in a model whose head gives values" in run_ranks(1, refusal)[0]
