"""A session over Megatron's HybridModel has the gradients of one rank, block by block."""

import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import OwnPositionRotaryEmbedding
from megatron_hdp.session import HdpSession
from tests.gradient_equivalence.cases import RECOMPUTE
from tests.session.test_taken_over import everything
from tests.support.gradients import EXPERTS, VOCABULARY
from tests.support.hybrids import HAS_LATENT, NEEDS, hybrid_chunk, hybrid_errors
from tests.support.mla import MLA
from tests.support.own_loop import arguments_of

pytestmark = NEEDS

TP2 = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}
PP2 = {"pipeline_model_parallel_size": 2, "hdp_tokens_per_rank": 200}
TIED = {"untie_embeddings_and_output_weights": False}
LAYOUTS = {  # pattern, ranks, overrides
    "rings": ("*-*-", 2, {}),
    "attention-twice": ("**-*", 3, {}),
    "experts": ("*E*-", 2, EXPERTS),
    "experts-ep2": ("*E*E", 2, EXPERTS | {"expert_model_parallel_size": 2}),
    "latent": ("+-+", 2, MLA),
    "latent-experts": ("+E+-", 2, MLA | EXPERTS),
    "tp2": ("*-*-", 4, TP2),
    "tp2-sp": ("*-*-", 4, TP2 | {"sequence_parallel": True}),
    "pp2": ("*-|*--*", 2, PP2),
    "pp2-no-bar": ("*-*-", 2, PP2),
    "pp2-tied": ("*-*|-", 4, PP2 | TIED),
    "pp2-v2": ("*-|*|-*|-", 2, PP2 | {"num_virtual_stages_per_pipeline_rank": 2}),
    "pp2-parts": ("*-|*-", 4, PP2 | {"hdp_tokens_per_rank": 128, "hdp_sequence_parts": 5}),
    "recompute": ("*-*-", 2, RECOMPUTE),
    "offload": ("*-*-", 2, {"hdp_offload": "auto"}),
}
QUICK = {"experts"}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS],
)
def test_gradients_are_those_of_one_rank(run_ranks, layout):
    pattern, ranks, overrides = LAYOUTS[layout]
    if "+" in pattern and not HAS_LATENT:
        pytest.skip("this megatron-core has no latent attention in hybrids: install 0.19")
    letters = pattern.replace("|", "")
    arguments = arguments_of(**{"num_layers": len(letters), **overrides})
    kinds = ("weighted", "clipped", "values")
    found = run_ranks(ranks, hybrid_errors, arguments, pattern, kinds)[0]
    assert len(found) == 6 and max(found.values()) <= 1e-10, found


def by_place_in_the_pack(self, positions, offset=0):
    """Angles of tokens that count from the begin of the micro-batch."""
    return ANGLES(self, torch.arange(len(positions)), offset)


ANGLES = OwnPositionRotaryEmbedding.get_freqs_non_repeated


def test_a_planted_fault_fails_the_check(run_ranks):
    target = "megatron_hdp.megatron.model.rotary.OwnPositionRotaryEmbedding"
    fault = f"{target}.get_freqs_non_repeated", by_place_in_the_pack
    how = arguments_of(num_layers=2), "*-", ("weighted",), (0,)
    found = run_ranks(2, hybrid_errors, *how, fault)[0]
    assert min(found.values()) > 1e-6, found


def refusals():
    """What a session says of each letter that it does not train, and what it has changed then."""
    arguments = arguments_of(num_layers=4)
    parallel.initialise(arguments)
    chunk, found = hybrid_chunk(arguments, 0, pattern="*-*-"), {}
    for letter in "MGD":
        chunk.module.decoder.layer_type_list = ["*", "-", letter, "-"]
        before = everything(chunk)
        with pytest.raises(ValueError) as refused:
            HdpSession.of_model(
                [chunk], vocab_size=VOCABULARY, seq_length=200, hdp_tokens_per_rank=128
            )
        after = everything(chunk)
        left = {key for key in before.keys() | after if before.get(key) != after.get(key)}
        found[letter] = str(refused.value), left
    return found


def test_blocks_whose_tokens_cannot_be_placed_are_refused_by_name(run_ranks):
    found = run_ranks(1, refusals)[0]
    for letter, (refused, left) in found.items():
        assert f"layer 3 of the hybrid: found {letter} (" in refused and not left
        assert "expected *, +, - or E" in refused and "train a pattern without it" in refused
    words = {"M": "Mamba", "G": "gated delta net", "D": "sparse attention"}
    assert all(word in found[letter][0] for letter, word in words.items())
