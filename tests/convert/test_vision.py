"""Models of pictures and text: tensors come back, and loss and gradients are transformers'."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hdp.convert.families.table import pieces
from megatron_hdp.convert.families.vision import language_of, with_language
from megatron_hdp.convert.to_hugging_face import to_hugging_face
from megatron_hdp.convert.to_megatron import Model, to_megatron
from megatron_hdp.encoders import load_encoder, save_encoder
from megatron_hdp.session import HdpSession, MediaItem, TokenBatch
from tests.convert.test_families import TRAINING, our_model, same_tensors
from tests.support.gradients import whole_gradients
from tests.support.vision_models import VOCABULARY, drawn_patches, encoder_of, hugging_face

SLOW = pytest.mark.slow
NAMES = ["qwen2.5-vl", "qwen3-vl", "llava-clip", "llava-siglip", "qwen2-audio", "qwen3-vl-moe"]
HDP = ["--hybrid-data-parallel", "--hdp-tokens-per-rank=96"]


@pytest.fixture
def converted(tmp_path):
    """Saves and converts a model; returns the model and both folders."""

    def of(name):
        model = hugging_face(name)
        model.save_pretrained(tmp_path / "model")
        if name == "qwen3-vl-moe":
            as_published(tmp_path / "model" / "model.safetensors")
        to_megatron(tmp_path / "model", tmp_path / "checkpoint", None, print)
        return model, tmp_path / "model", tmp_path / "checkpoint"

    return of


def as_published(path):
    """Turns experts' matrices round."""
    tensors = load_file(path)
    for name, one in tensors.items():
        if ".experts." in name:
            tensors[name] = one.transpose(1, 2).contiguous()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("name", NAMES)
def test_tensors_come_back(converted, tmp_path, name):
    """Those of pictures lie beside the checkpoint, where the encoder is found."""
    _, folder, checkpoint = converted(name)
    to_hugging_face(checkpoint, tmp_path / "back", print)
    assert same_tensors(tmp_path / "back", folder)
    beside = load_encoder(checkpoint / "hugging_face").state_dict()
    expected = load_encoder(tmp_path / "back").state_dict()
    assert all(torch.equal(one, expected[key]) for key, one in beside.items())


@pytest.mark.parametrize("name", ["qwen2.5-vl", "llava-clip"])
def test_a_trained_encoder_comes_back(converted, tmp_path, name):
    """Under the names of the files, beside the trained language model."""
    _, folder, checkpoint = converted(name)
    encoder = load_encoder(checkpoint / "hugging_face")
    with torch.no_grad():
        for weight in encoder.parameters():
            weight += 1
    saved = tmp_path / "trained"
    save_encoder(encoder, saved, like=checkpoint / "hugging_face")
    to_hugging_face(checkpoint, tmp_path / "back", print, like=saved)
    found, before = load_encoder(tmp_path / "back").state_dict(), load_encoder(folder).state_dict()
    for key, weight in encoder.state_dict().items():
        assert torch.equal(found[key], weight) and not torch.equal(found[key], before[key])
    with pytest.raises(ValueError, match="expected"):
        save_encoder(encoder, saved, like=folder)
    other = encoder_of("qwen3-vl")
    with pytest.raises(ValueError, match="among the encoder's"):
        save_encoder(other, tmp_path / "other", like=folder)


OLD_LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"model_type": "llama", "vocab_size": 32064, "torch_dtype": "float16"},
    "torch_dtype": "float16",
    "vision_config": {},
}
OLD_QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "vision_config": {},
}


@pytest.mark.parametrize("config", [OLD_LLAVA, OLD_QWEN])
def test_older_configurations(config):
    """What they leave out is known, and is not written; what changed is."""
    language = language_of(config)
    assert language["hidden_size"] in (3584, 4096)
    assert "mrope" not in json.dumps(language.get("rope_scaling"))
    assert with_language(config, language) == config
    changed = with_language(config, language | {"rms_norm_eps": 1e-3, "rope_scaling": None})
    text = changed.get("text_config", changed)
    assert text["rms_norm_eps"] == 1e-3
    kept = (text.get("rope_scaling") or {}).get("mrope_section")
    assert kept == config.get("rope_scaling", {}).get("mrope_section")


def test_files_without_pictures(converted):
    _, folder, _ = converted("llava-clip")
    tensors = {"model.norm.weight": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="none of an encoder of pictures"):
        Model.find(folder)


def conversation(name, encoder):
    """Tokens with placeholders of three pictures or sounds, and where they begin."""
    generator = np.random.default_rng(3)
    grids = [(1, 6, 6)] * 3 if name.startswith("llava") else [(1, 4, 6), (1, 10, 8), (1, 2, 2)]
    grids = [50, 7, 201] if name == "qwen2-audio" else grids
    items = drawn_patches(encoder, grids)
    tokens, media = [*generator.integers(0, 280, 9)], []
    for item in items:
        media.append(MediaItem(0, len(tokens), item))
        tokens += [290] * encoder.grid(item).num_rows
        tokens += [*generator.integers(0, 280, 11)]
    return np.array(tokens), media


def step_of_ours(checkpoint, name):
    """Body of a rank: loss and gradients by Megatron's names, and the encoder's."""
    more = ["--moe-aux-loss-coeff=0"] if name == "qwen3-vl-moe" else []
    arguments, model = our_model(checkpoint, [*TRAINING, *HDP, *more])
    session = HdpSession(arguments, [model], vocab_size=VOCABULARY)
    encoder = load_encoder(checkpoint / "hugging_face")
    session.attach_encoder(encoder)
    tokens, media = conversation(name, encoder)
    report = session.step(TokenBatch([tokens], media=media))
    found = whole_gradients(session.chunks, arguments)
    return report.loss, found, {key: one.grad for key, one in encoder.named_parameters()}


def step_of_theirs(name, model, encoder):
    """Loss by transformers; gradients stay in the model."""
    tokens, media = conversation(name, encoder)
    ids = torch.from_numpy(tokens)[None]
    if name == "qwen2-audio":
        frames = torch.tensor([one.data.num_frames for one in media])
        given = {
            "input_features": torch.stack([torch.from_numpy(one.data.values) for one in media]),
            "feature_attention_mask": (torch.arange(400) < frames[:, None]).long(),
            "attention_mask": torch.ones_like(ids),
        }
    else:
        numbers = torch.cat(
            [encoder._frames(encoder.pixels.of(torch.from_numpy(one.data.values))) for one in media]
        )
    if name.startswith("llava"):
        cells = numbers.reshape(3, 6, 6, 3, 4, 4).permute(0, 3, 1, 4, 2, 5)
        given = {"pixel_values": cells.reshape(3, 3, 24, 24)}
    elif name != "qwen2-audio":
        given = {
            "pixel_values": numbers,
            "image_grid_thw": torch.tensor([one.data.grid for one in media]),
            "mm_token_type_ids": (ids == 290).int(),
        }
    logits = model(input_ids=ids, **given).logits[0, :-1]
    labels = ids[0, 1:].masked_fill(ids[0, 1:] == 290, -100)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    loss.backward()
    return loss.item()


NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one == "qwen3-vl" else SLOW) for one in NAMES]
)
def test_loss_and_gradients(run_ranks, converted, name):
    """Of every weight, on a ring of two ranks that a picture lies across."""
    model, folder, checkpoint = converted(name)
    loss, of_model, of_encoder = run_ranks(2, step_of_ours, checkpoint, name)[0]
    encoder = load_encoder(folder)
    expected = step_of_theirs(name, model, encoder)
    assert abs(loss - expected) < 1e-5 * expected
    gradients = {key: one.grad for key, one in model.named_parameters()}
    worst = {}
    for key, found in of_encoder.items():
        theirs = gradients[f"model.visual.{key}" if "-vl" in name else f"model.{key}"]
        if found is None or theirs is None:
            assert theirs is None and (found is None or not found.any()), key
            continue
        worst[key] = distance(found, theirs)
    source = Model.find(folder)
    for piece in pieces(source.family, source.config, stacked=False):
        key = piece.key
        for of_checkpoints, of_modules in NORMS.items():
            key = key.replace(of_checkpoints, of_modules)
        sizes = source.family.sizes(source.config)
        offsets, lengths = piece.offsets, piece.lengths
        if ".experts.experts." in key:
            (expert, *offsets), (_, *lengths) = offsets, lengths
            key = key.replace(".experts.experts.", f".experts.local_experts.{expert}.")
        ends = zip(offsets, lengths, strict=True)
        region = of_model[key][tuple(slice(begin, begin + length) for begin, length in ends)]
        tensors = piece.layout.to_hugging_face(region, sizes)
        for entry, found in zip(piece.entries, tensors, strict=True):
            theirs = gradients[entry.name.replace("model.", "model.language_model.")]
            theirs = theirs if entry.part is None else theirs[entry.part].T
            worst[entry.name] = distance(found, theirs)
    assert max(worst.values()) < 1e-4, worst
    worst_of_all = max(worst.values())
    print(f"{name}: loss {abs(loss / expected - 1):.1e}, gradients {worst_of_all:.1e}")


def distance(found, expected):
    """The largest, as a share of the largest number."""
    scale = expected.abs().max().clamp(min=1e-3)
    return ((found - expected).abs().max() / scale).item()
