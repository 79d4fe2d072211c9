"""A session's gradients and log-probabilities equal those of one rank, whatever the plan."""

from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from megatron_hdp.megatron.model import last_stage
from megatron_hdp.runtime.loss import log_probs
from megatron_hdp.session import objectives
from tests.gradient_equivalence.cases import RECOMPUTE
from tests.support.gradients import EXPERTS
from tests.support.own_loop import arguments_of, errors_of

TOLERANCE, OF_LOG_PROBS = 1e-10, 1e-12
KINDS = ("weighted", "clipped", "hot", "distilled", "values", "preferred", "log-probs")


def check(errors):
    wrong = {
        case: error
        for case, error in errors.items()
        if not error <= (OF_LOG_PROBS if case[0] == "log-probs" else TOLERANCE)
    }
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (3, (1,)),
        *(pytest.param(one, (None, 0, 1), marks=pytest.mark.slow) for one in (3, 4)),
    ],
)
def test_every_loss_under_rings(run_ranks, ranks, seeds):
    check(run_ranks(ranks, errors_of, arguments_of(), KINDS, seeds)[0])


SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 1000}
TP2 = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}
PP2 = {"pipeline_model_parallel_size": 2, "hdp_tokens_per_rank": 200}
STREAMS = {"hdp_long_sequence": "stream", "hdp_offload": "auto"}
LAYOUTS = {  # ranks, overrides
    "tp2-overlap": (2, TP2 | SHARDED | {"hdp_tokens_per_rank": 200}),
    "tp2-sp": (4, TP2 | {"sequence_parallel": True}),
    "pp2": (2, PP2),
    "pp2-tied-overlap": (4, PP2 | SHARDED | {"untie_embeddings_and_output_weights": False}),
    "pp2-parts": (4, PP2 | {"hdp_tokens_per_rank": 128, "hdp_sequence_parts": 5}),
    "pp2-v2": (2, PP2 | {"num_layers": 4, "num_virtual_stages_per_pipeline_rank": 2}),
    "tied-overlap": (2, SHARDED | {"untie_embeddings_and_output_weights": False}),
    "experts": (2, EXPERTS | {"expert_model_parallel_size": 2}),
    "recompute": (2, RECOMPUTE),
    "offload": (2, {"num_layers": 4, "hdp_offload": "auto"}),
    "streams": (2, STREAMS | {"hdp_tokens_per_rank": 48}),
}
OF_THE_VOCABULARY = ("clipped", "hot", "distilled")  # what tensor-parallel ranks exchange


@pytest.mark.parametrize(
    ("layout", "kinds", "seeds"),  # a pipeline below, experts in the slow ones
    [
        ("tp2-overlap", OF_THE_VOCABULARY, (None,)),
        *(pytest.param(one, KINDS, (None, 0), marks=pytest.mark.slow) for one in LAYOUTS),
    ],
)
def test_every_loss_in_layouts(run_ranks, layout, kinds, seeds):
    ranks, overrides = LAYOUTS[layout]
    check(run_ranks(ranks, errors_of, arguments_of(**overrides), kinds, seeds)[0])


@pytest.mark.parametrize(
    "layout",
    [
        "pp2-v2",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("tp2-overlap", "tied-overlap")),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("experts", "pp2", "pp2-parts")),
    ],
)
def test_a_model_that_megatron_has_built(run_ranks, layout):
    ranks, overrides = LAYOUTS[layout]
    arguments = arguments_of(**overrides)
    seeds = (0,) if layout == "pp2-v2" else (None, 0)
    kinds = ("weighted", "distilled", "preferred") if layout == "pp2-v2" else KINDS
    check(run_ranks(ranks, errors_of, arguments, kinds, seeds, by_megatron=True)[0])


def weights_of_the_token_before(self, micro_batch):
    """Takes each token's weight from its neighbour."""
    found = ARRAYS(self, micro_batch)
    _, places = TOKENS_WITH_LOSS(self._batch, micro_batch, 1)
    return found | {objectives._WEIGHTS: self._batch.weights[places - 1]}


def divisor_of_this_rank(given, loss_tokens):
    """Divides by another number on each rank, as a mean over a rank's own tokens would."""
    return float(loss_tokens + dist.get_rank())


def in_the_order_of_the_micro_batch(batch, micro_batch, shift):
    """Takes a sequence's place in the micro-batch for its place in the batch."""
    ids = tuple(range(len(micro_batch.sequence_ids)))
    return TOKENS_WITH_LOSS(batch, replace(micro_batch, sequence_ids=ids), shift)


def one_place_further(batch, micro_batch, shift):
    """Takes the prediction of a token for the one before it."""
    rows, places = TOKENS_WITH_LOSS(batch, micro_batch, shift)
    return np.maximum(rows - 1, 0), places


def gathered_as_for_logits(states, tensor_parallel_output_grad=True, group=None):
    """Sums gradients over tensor-parallel ranks that have all of them each."""
    return GATHER(states, tensor_parallel_output_grad=True, group=group)


def of_this_part_alone(figures, group):
    """Normalises over this rank's part of the vocabulary."""
    return WHOLE_VOCABULARY(figures, None)


def this_part_alone(figures, group):
    """The same for entropies."""
    return ALL_PARTS(figures, None)


def leave_alone(gradient):
    """Adds up nothing."""


ARRAYS, TOKENS_WITH_LOSS = objectives.WeightedNll.arrays, objectives.tokens_with_loss
WHOLE_VOCABULARY = log_probs.over_the_vocabulary
ALL_PARTS = log_probs.of_all_parts
GATHER = last_stage.gather_from_sequence_parallel_region
OBJECTIVES, LAST_STAGE = "megatron_hdp.session.objectives", "megatron_hdp.megatron.model.last_stage"
TENSOR_RANKS = LAYOUTS["tp2-sp"][1] | {"hdp_tokens_per_rank": 200}


def planted(kind, target, fault, **overrides):
    """A fault in the loss of a kind."""
    return kind, (target, fault), overrides


FAULTS = {
    "weights shifted by one": planted(
        "weighted", f"{OBJECTIVES}.WeightedNll.arrays", weights_of_the_token_before
    ),
    "divisor of a rank": planted(
        "clipped", "megatron_hdp.session.session.divisor_of", divisor_of_this_rank
    ),
    "order of the data mixed": planted(
        "log-probs", f"{OBJECTIVES}.tokens_with_loss", in_the_order_of_the_micro_batch
    ),
    "prediction of another token": planted(
        "log-probs", f"{OBJECTIVES}.tokens_with_loss", one_place_further
    ),
    "head of one rank": planted(
        "values", "megatron_hdp.megatron.parallel.sum_over_hdp_ranks", leave_alone
    ),
    "hidden gradients summed": planted(
        "distilled",
        f"{LAST_STAGE}.gather_from_sequence_parallel_region",
        gathered_as_for_logits,
        **TENSOR_RANKS,
    ),
    "vocabulary not exchanged": planted(
        "clipped",
        "megatron_hdp.runtime.loss.log_probs.over_the_vocabulary",
        of_this_part_alone,
        **TENSOR_RANKS,
    ),
    "entropies of a part of the vocabulary": planted(
        "hot", "megatron_hdp.runtime.loss.log_probs.of_all_parts", this_part_alone, **TENSOR_RANKS
    ),
}


QUICK_FAULTS = {"divisor of a rank", "order of the data mixed", "head of one rank"}
QUICK_FAULTS |= {"vocabulary not exchanged"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK_FAULTS)) for one in FAULTS],
)
def test_a_planted_fault_fails_the_check(run_ranks, name):
    kind, fault, overrides = FAULTS[name]
    errors = run_ranks(2, errors_of, arguments_of(**overrides), (kind,), (0,), fault)[0]
    assert min(errors.values()) > 1e-6, errors
