"""The training command on pictures: an encoder as part of the model, its data and checkpoints."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_hdp.convert.to_hugging_face import to_hugging_face
from megatron_hdp.convert.to_megatron import to_megatron
from megatron_hdp.encoders import Qwen3VLEncoder
from megatron_hdp.media import LearntCost
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.training.loop import pretrain
from tests.data.media import sources
from tests.support.vision_models import MODELS
from tests.training.media_runs import (
    ALONE,
    HF,
    HIDDEN,
    losses,
    media_run,
    one_sentence,
    require_damage_left_out,
    trained,
    write_encoder,
)
from tests.training.runs import BUCKETS, SHARDED, largest_difference

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
transformers = pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")

SLOW = pytest.mark.slow
CONFIG = {
    "model_type": "qwen3_vl",
    "text_config": {"rope_parameters": {"mrope_section": [2, 2, 2]}},
    "vision_config": {
        **{"depth": 2, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2},
        **{"out_hidden_size": HIDDEN, "num_position_embeddings": 36},
        "deepstack_visual_indexes": [0],
    },
}
TENSOR = {"tensor_model_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 2}
PARTS = STAGES | {"hdp_sequence_parts": 4}
LAYOUTS = {  # ranks, flags
    "rings": (3, {}),
    "sharded": (3, SHARDED | BUCKETS),
    "gathered-beside": (3, SHARDED | BUCKETS | {"overlap_param_gather": True}),
    "tp2": (2, TENSOR | {"hdp_tokens_per_rank": 400}),
    "tp2-sp-pp2": (4, TENSOR | {"sequence_parallel": True} | STAGES),
    "pp2-sharded": (4, STAGES | SHARDED | BUCKETS),
    "pp2-v2": (2, STAGES | {"num_virtual_stages_per_pipeline_rank": 2}),
    "pp2-parts": (4, PARTS | SHARDED),
    "home": (3, {"hdp_media_balance": "home"}),
    "three-waves": (3, {"hdp_media_waves": 3}),
    "parked": (2, SHARDED | {"hdp_encoder_rows": 24, "hdp_media_waves": 1}),
    "parked-pp2": (2, STAGES | {"hdp_encoder_rows": 24}),
    "recomputed": (
        2,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
}


def model_folder(folder):
    return write_encoder(folder, Qwen3VLEncoder, CONFIG)


def pictures_run(folder, **overrides):
    """A run over conversations with pictures, and texts."""
    data = sources.write_mixture(folder, "some text without pictures\n" * 3)
    return media_run(folder, data, model_folder(folder / "model"), **overrides)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one == "rings" else SLOW) for one in LAYOUTS]
)
def test_a_run_is_that_of_one_rank(run_ranks, tmp_path, name):
    """Losses and the norm of all gradients, step by step, while all weights move."""
    ranks, flags = LAYOUTS[name]
    whole = pictures_run(tmp_path, steps=4)
    expected = trained(run_ranks, whole, **ALONE)
    found = trained(run_ranks, whole, ranks, **flags)
    assert largest_difference(found, expected) <= 1e-10
    assert all(items and rows > items for *_, items, rows in found)
    assert len({loss for _, loss, *_ in found}) == 4


@SLOW
def test_weights_are_whole_behind_a_step_without_pictures(run_ranks, tmp_path):
    """Nothing there waits for gathers of the encoder's weights, and the next step reads them."""
    whole = pictures_run(tmp_path, steps=8, global_batch_size=1)
    phases = "weight-unit: sequences\nschedule: [{from: 0, weights: {pictures: 0.5, text: 0.5}}]\n"
    whole.hdp_data.write_text(sources.MIXTURE + phases)
    expected = trained(run_ranks, whole, **ALONE)
    flags = SHARDED | BUCKETS | {"overlap_param_gather": True}
    found = trained(run_ranks, whole, 3, **flags)
    assert largest_difference([one[:3] for one in found], [one[:3] for one in expected]) <= 1e-10
    has_media = [bool(items) for *_, items, _ in found]
    assert (False, True) in zip(has_media, has_media[1:], strict=False)


def flop(arguments):
    """Body of a rank: each step's FLOP, and what is left of them without its pictures' rows."""
    found = pretrain(arguments)
    return [(one.model_flops_per_second * one.seconds, one.media_rows) for one in found]


@SLOW
def test_flop_of_pictures_count(run_ranks, tmp_path):
    """Trained or not: the same steps differ by what the encoder's backward takes."""
    whole = pictures_run(tmp_path, steps=3)
    trained, frozen = (
        run_ranks(1, flop, replace(whole, hdp_frozen=one, **ALONE))[0]
        for one in ((), ("hdp_encoder.*",))
    )
    shape = Qwen3VLEncoder(CONFIG).shape
    for (one, rows), (other, same) in zip(trained, frozen, strict=True):
        assert rows == same
        patches = np.array([4 * rows])
        lowest, highest = (
            shape.training_flop(some) - shape.training_flop(some, tower=False, projector=False)
            for some in (np.full(rows, 4), patches)  # as if a row were an item, and as if one
        )
        assert lowest <= one - other <= highest


@SLOW
def test_a_run_draws_who_encodes_what(run_ranks, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'megatron-hdp[plot]'")
    path = tmp_path / "plan.png"
    trained(run_ranks, pictures_run(tmp_path, steps=2), 3, hdp_plot_plan=path, hdp_plot_step=2)
    for name in ("plan.png", "plan-items.png"):
        assert (tmp_path / name).stat().st_size > 5_000


def without_sums(arguments):
    """Body of a rank: the planted fault, stages keep the gradients of their own items."""
    with mock.patch("megatron_hdp.megatron.step.items.add_up_gradients"):
        return losses(arguments)


@SLOW
def test_gradients_that_stay_on_a_stage_are_seen(run_ranks, tmp_path):
    whole = pictures_run(tmp_path, steps=2)
    expected = trained(run_ranks, whole, **ALONE)
    found = run_ranks(2, without_sums, replace(whole, **STAGES, **ALONE))[0]
    assert largest_difference(found, expected) > 1e-6


@SLOW
@pytest.mark.parametrize(
    "after", [(4, STAGES | SHARDED | BUCKETS), (2, TENSOR | ALONE | SHARDED | BUCKETS)]
)
def test_resumed_on_another_layout(run_ranks, tmp_path, after):
    """The encoder and its optimizer are in the checkpoint; its folder is no longer asked."""
    whole, folder = pictures_run(tmp_path, **SHARDED, **BUCKETS), tmp_path / "checkpoints"
    expected = trained(run_ranks, whole, **ALONE)
    first = trained(run_ranks, whole, 3, train_iters=3, save=folder)
    assert largest_difference(first, expected[:3]) <= 1e-10
    ranks, flags = after
    found = trained(run_ranks, whole, ranks, load=folder, **flags)
    assert largest_difference(found, expected[3:]) <= 1e-10


@SLOW
def test_an_encoder_joins_a_language_model(run_ranks, tmp_path):
    """Weights of text alone are loaded beside it; whole ones bring theirs."""
    whole = pictures_run(tmp_path, steps=3)
    text = replace(whole, hdp_encoder=None, hdp_data=tmp_path / "text.yaml", train_iters=1)
    (tmp_path / "text.yaml").write_text("sources:\n  text: {path: x.txt, tokenizer: hf:hf}\n")
    base, folder = tmp_path / "base", tmp_path / "whole"
    trained(run_ranks, text, save=base, **ALONE)
    mine = replace(whole, pretrained_checkpoint=base)
    expected = trained(run_ranks, mine, **ALONE)
    fresh = trained(run_ranks, whole, **ALONE)
    assert abs(fresh[0][1] - expected[0][1]) > 1e-3
    assert largest_difference(trained(run_ranks, mine, 2), expected) <= 1e-10
    trained(run_ranks, mine, save=folder, **ALONE)
    further = replace(whole, pretrained_checkpoint=folder, train_iters=1)
    again = trained(run_ranks, further, **ALONE)
    assert abs(again[0][1] - expected[0][1]) > 1e-3


@SLOW
@pytest.mark.parametrize("frozen", [("hdp_encoder.*",), ("decoder.*", "embedding.*", "output*")])
def test_either_side_may_be_frozen(run_ranks, tmp_path, frozen):
    whole = pictures_run(tmp_path, steps=3, hdp_frozen=frozen)
    expected = trained(run_ranks, whole, **ALONE)
    assert largest_difference(trained(run_ranks, whole, 2), expected) <= 1e-10
    assert len({loss for _, loss, *_ in expected}) == 3


def costs_of_run(arguments):
    """Body of a rank: losses, and by what costs items of each step were planned."""
    found = []

    def of_step(self, step):
        found.append((step, OF_STEP(self, step).patch_s))
        return OF_STEP(self, step)

    with mock.patch.object(LearntCost, "of_step", of_step):
        told = losses(arguments)
    return told, dict(found)


OF_STEP = LearntCost.of_step


@SLOW
@pytest.mark.parametrize("name", ["rings", "pp2-v2"])
def test_what_items_cost_is_learnt(run_ranks, tmp_path, name):
    """All ranks plan each step by the same cost, that of the shape until two steps are known."""
    ranks, flags = LAYOUTS[name]
    whole = pictures_run(tmp_path, steps=5)
    expected = trained(run_ranks, whole, **ALONE)
    (found, costs), *others = run_ranks(
        ranks, costs_of_run, replace(whole, hdp_online=True, **flags)
    )
    assert largest_difference(found, expected) <= 1e-10
    assert all(of_rank == costs for _, of_rank in others)
    assert costs[0] == costs[1] == costs[2] and len({costs[step] for step in range(2, 5)}) == 3


@SLOW
@pytest.mark.parametrize("name", ["rings", "tp2-sp-pp2", "pp2-parts"])
def test_further_tokens_beside_pictures(run_ranks, tmp_path, name):
    ranks, flags = LAYOUTS[name]
    further = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
    whole = pictures_run(tmp_path, steps=3, **further)
    expected = trained(run_ranks, whole, **ALONE)
    assert largest_difference(trained(run_ranks, whole, ranks, **flags), expected) <= 1e-10
    plain = trained(run_ranks, replace(whole, mtp_num_layers=None), **ALONE)
    assert abs(plain[0][2] - expected[0][2]) > 1e-6, "the norm knows further losses"


@SLOW
def test_adapters_beside_pictures(run_ranks, tmp_path):
    """The encoder stays as it is, and comes from its folder when the run resumes."""
    whole = pictures_run(tmp_path, steps=3)
    base, folder = tmp_path / "base", tmp_path / "adapters"
    trained(run_ranks, whole, train_iters=1, save=base, **ALONE)
    mine = replace(whole, lora_rank=2, lora_alpha=4.0, pretrained_checkpoint=base)
    expected = trained(run_ranks, mine, **ALONE)
    first = trained(run_ranks, mine, 2, train_iters=2, save=folder)
    found = first + trained(run_ranks, mine, load=folder, **ALONE)
    assert largest_difference(found, expected) <= 1e-10


@SLOW
def test_a_damaged_picture_leaves_with_its_sequence(run_ranks, tmp_path):
    whole = pictures_run(tmp_path, steps=3)
    picture = tmp_path / sources.name(1)
    require_damage_left_out(
        run_ranks, whole, picture, lambda raw: raw[: len(raw) // 3].ljust(len(raw), b"\0")
    )


def real_model(folder):
    """A whole tiny model as transformers saves it, with patches as data have them."""
    config = {**MODELS["qwen3-vl"][2]}
    config["vision_config"] = config["vision_config"] | {"patch_size": 16}
    built = transformers.Qwen3VLConfig(**config)
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(built)
    model.save_pretrained(folder)
    return model.state_dict()


@SLOW
def test_a_model_comes_trains_and_goes(run_ranks, tmp_path):
    """From Hugging Face's files and back, with encoder and language model trained."""
    data = pictures_run(tmp_path).hdp_data
    before = real_model(tmp_path / "model-before")
    weights, saved = tmp_path / "weights", tmp_path / "saved"
    to_megatron(tmp_path / "model-before", weights, None, print)
    flags = {
        **{"config": weights / "model.yaml", "pretrained-checkpoint": weights, "save": saved},
        **{"hdp-encoder": weights / "hugging_face", "hdp-data": data, "tokenizer-type": HF},
        **{"tokenizer-model": tmp_path / "hf", "train-iters": 2, "global-batch-size": 5},
        **{"seq-length": 200, "hdp-tokens-per-rank": 100, "lr": 0.01, "attention-dropout": 0},
    }
    argv = [f"--{name}={value}" for name, value in flags.items()]
    arguments = parse_arguments(["--hybrid-data-parallel", "--hidden-dropout=0", *argv])
    assert len(trained(run_ranks, arguments, 2)) == 2
    to_hugging_face(saved, tmp_path / "back", print)
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "back")
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert [name for name, one in after.items() if torch.equal(one, before[name])] == []


@SLOW
def test_pictures_want_an_encoder(run_ranks, tmp_path):
    whole = pictures_run(tmp_path, steps=1)
    said = run_ranks(1, one_sentence, replace(whole, hdp_encoder=None, **ALONE))[0]
    assert "found a source with pictures and nothing to encode them" in said
    may_fail = tmp_path / "may-fail.yaml"
    keys = "format: chat\n    on-failure: go-on-without"
    may_fail.write_text(sources.MIXTURE.replace("format: chat", keys))
    with_plane = replace(whole, hdp_data=may_fail, hdp_loaders="ray", **ALONE)
    said = run_ranks(1, one_sentence, with_plane)[0]
    assert "found on-failure: go-on-without of source 'pictures', which has pictures" in said
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}')
    said = run_ranks(1, one_sentence, replace(whole, hdp_encoder=other, **ALONE))[0]
    assert "found model_type 'llama'" in said
