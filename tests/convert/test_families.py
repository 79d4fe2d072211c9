"""Every family: the same logits on both sides, and the same tensors when they come back."""

import json
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_hdp.convert.to_hugging_face import to_hugging_face
from megatron_hdp.convert.to_megatron import to_megatron
from megatron_hdp.data import TokenWriter
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.checkpoint.state import TrainingState
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.session import HdpSession
from megatron_hdp.training.loop import pretrain
from tests.convert.models import MODELS, VOCABULARY, logits_of, save_model

QUICK = {"gpt-oss"}  # experts, sinks, windows, YaRN
LENGTHS = [50, 7, 30, 90, 12, 64]
TRAINING = ["--train-iters=1", "--lr=0", "--split=1,0,0", f"--global-batch-size={len(LENGTHS)}"]
HDP = ["--hybrid-data-parallel", "--hdp-tokens-per-rank=64", "--hdp-long-sequence=error"]


@pytest.fixture
def converted(tmp_path):
    """Saves and converts a model; returns the folders of both."""

    def of(name):
        model = save_model(name, tmp_path / "model")
        to_megatron(model, tmp_path / "checkpoint", None, print)
        return model, tmp_path / "checkpoint"

    return of


def our_model(folder, argv):
    """In a rank: the model that the written YAML describes with the converted weights."""
    arguments = parse_arguments(["--config", str(folder / "model.yaml"), *argv], needs_data=False)
    parallel.initialise(arguments)
    parallel.set_seeds(arguments.seed)
    model = building.build_gpt(arguments, VOCABULARY)
    state = TrainingState(arguments, None, [model], mock.Mock(), None)
    state.load_weights(folder / "release")
    return arguments, model


def log_probs_of_ours(folder, sequences, argv):
    """Body of a rank: log-probabilities of the tokens under HDP."""
    arguments, model = our_model(folder, argv)
    session = HdpSession(arguments, [model], vocab_size=VOCABULARY)
    return session.log_probs(sequences)


def logits_of_ours(folder, tokens, argv):
    """Body of a rank: logits by stock attention."""
    _, model = our_model(folder, argv)
    length = len(tokens)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return model.module(tokens[None], torch.arange(length)[None], mask)[0].numpy()


def losses_of(argv):
    """Body of a rank: the loss of every step."""
    return [one.loss for one in pretrain(parse_arguments(argv))]


def documents(folder):
    """A corpus within the byte tokenizer's vocabulary; its prefix, and the documents."""
    generator = np.random.default_rng(0)
    found = [generator.integers(0, 256, length) for length in LENGTHS]
    with TokenWriter(folder / "corpus", 257) as writer:
        for document in found:
            writer.add(document)
    return str(folder / "corpus"), found


def loss_of(folder, sequences):
    """Mean loss over all labels by transformers."""
    total, count = 0.0, 0
    for sequence in sequences:
        tokens = torch.from_numpy(sequence)
        logits = logits_of(folder, tokens[:-1])
        total += torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
        count += len(tokens) - 1
    return total / count


def same_tensors(found, expected):
    """Whether two folders hold the same tensors bit for bit, and the same configuration."""
    tensors: list[dict] = [{}, {}]
    for held, folder in zip(tensors, (found, expected), strict=True):
        for path in sorted(folder.glob("*.safetensors")):
            held.update(load_file(path))
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        other = tensors[1][name]
        assert tensor.dtype == other.dtype and torch.equal(tensor, other), name
    configs = [json.loads((folder / "config.json").read_text()) for folder in (found, expected)]
    return configs[0] == configs[1]


def largest_difference(model, found, sequences):
    """Of log-probabilities of each sequence, from those that transformers gives."""
    differences = []
    for one, sequence in zip(found, sequences, strict=True):
        tokens = torch.from_numpy(sequence)
        scores = logits_of(model, tokens[:-1]).log_softmax(-1)
        expected = scores.gather(-1, tokens[1:, None])[:, 0]
        differences.append((one[1:] - expected).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("name", MODELS)
def test_tensors_come_back(converted, tmp_path, name):
    model, checkpoint = converted(name)
    to_hugging_face(checkpoint, tmp_path / "back", print)
    assert same_tensors(tmp_path / "back", model)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_logits_under_hdp(run_ranks, converted, name):
    model, checkpoint = converted(name)
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, VOCABULARY, length) for length in LENGTHS]
    (found, _) = run_ranks(2, log_probs_of_ours, checkpoint, sequences, [*TRAINING, *HDP])
    difference = largest_difference(model, found, sequences)
    print(f"{name}: {difference:.1e}")
    assert difference <= 1e-5


def test_logits_of_stock_attention(run_ranks, converted):
    model, checkpoint = converted("llama3")
    tokens = torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(1))
    (found,) = run_ranks(1, logits_of_ours, checkpoint, tokens, TRAINING)
    assert np.abs(found - logits_of(model, tokens).numpy()).max() <= 1e-5


@pytest.mark.slow  # a run on converted weights: test_adapters.py
@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_first_loss_under_hdp(run_ranks, converted, tmp_path, name):
    model, checkpoint = converted(name)
    prefix, sequences = documents(tmp_path)
    argv = [f"--config={checkpoint}/model.yaml", f"--load={checkpoint}", f"--data-path={prefix}"]
    argv += [*TRAINING, *HDP, "--moe-aux-loss-coeff=0"]
    (found, *_) = run_ranks(2, losses_of, argv)
    assert found[0] == pytest.approx(loss_of(model, sequences), rel=2e-6)


@pytest.mark.slow
def test_back_from_a_run_on_another_layout(run_ranks, converted, tmp_path):
    model, checkpoint = converted("mixtral")
    prefix, _ = documents(tmp_path)
    argv = [f"--config={checkpoint}/model.yaml", f"--load={checkpoint}"]
    argv += [f"--data-path={prefix}", *TRAINING, *HDP, f"--save={tmp_path}/saved"]
    layout = ["--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2"]
    layout += ["--sequence-parallel", "--expert-model-parallel-size=2", "--hdp-tokens-per-rank=128"]
    run_ranks(4, losses_of, [*argv, *layout, "--expert-tensor-parallel-size=1"])
    to_hugging_face(tmp_path / "saved", tmp_path / "back", print)
    assert same_tensors(tmp_path / "back", model)  # a step with a learning rate of 0
