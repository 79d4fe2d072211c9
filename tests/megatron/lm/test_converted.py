"""Converted weights in a stock checkout: with HDP, without it and by our command, one first loss.

Needs MEGATRON_LM_PATH (docs/megatron-lm.md, "What the checkout needs").
"""

import json

import pytest
import torch

from megatron_hdp.convert.to_hugging_face import to_hugging_face
from megatron_hdp.convert.to_megatron import to_megatron
from megatron_hdp.data import TokenWriter
from tests.convert.models import VOCABULARY, logits_of, save_model
from tests.convert.test_families import same_tensors
from tests.megatron.lm.runs import HDP, MARKS, drive, own, planned, scalars

pytestmark = [*MARKS, pytest.mark.slow]

SEQUENCES, LENGTH = 8, 256
MODEL = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --kv-channels 8 --seq-length 256
--max-position-embeddings 256 --position-embedding-type rope --rotary-base 500000 --swiglu
--normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"""
FROM_CHECKPOINT = """--use-checkpoint-args --seq-length 256 --max-position-embeddings 256
--norm-epsilon 1e-6"""
PADDED = ["--make-vocab-size-divisible-by", "150"]
# the tokenizer's vocabulary of 300 and an end of documents
SETTINGS = ["--split", "100,0,0", "--eval-iters", "0", "--vocab-size", "299", "--lr", "0"]
SETTINGS += ["--min-lr", "0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    save_model("llama3", folder / "model")
    to_megatron(folder / "model", folder / "weights", None, print)
    tokens = torch.randint(
        0, 256, (SEQUENCES * LENGTH + 1,), generator=torch.Generator().manual_seed(0)
    )
    with TokenWriter(folder / "corpus", VOCABULARY) as writer:
        writer.add(tokens.numpy())
    torch.save(tokens, folder / "tokens.pt")
    # the last token is a sequence of its own, without a label
    split = [*HDP, "256", "--hdp-long-sequence", "split", "--global-batch-size", "9"]
    tensor = ["--tensor-model-parallel-size", "2"]

    def run(name, ranks, extra, *, model=MODEL, **more):
        extra = [*SETTINGS, *extra]
        return planned(folder, name, ranks, extra, model=model, load="weights", steps=1, **more)

    drive(
        folder,
        [
            run("stock", 1, PADDED[:1] + ["300"], plugin=False, save="saved"),
            run("stock, tensor", 2, [*PADDED, *tensor], plugin=False),
            run("arguments of the checkpoint", 1, [], model=FROM_CHECKPOINT, plugin=False),
            run("hdp", 3, [*PADDED[:1], "300", *split]),
            own_command(folder, split),
        ],
    )
    return folder


def own_command(folder, split):
    arguments = ["--config", str(folder / "weights" / "model.yaml"), "--load"]
    arguments += [str(folder / "weights"), "--data-path", str(folder / "corpus"), *split]
    arguments += ["--seq-length", "256", "--max-position-embeddings", "256"]
    arguments += ["--split", "100,0,0", "--train-iters", "1", "--lr", "0"]
    return own(folder, 2, arguments)


def loss_of_transformers(folder):
    tokens = torch.load(folder / "tokens.pt")
    losses = []
    for i in range(SEQUENCES):
        piece = tokens[i * LENGTH : (i + 1) * LENGTH + 1]
        logits = logits_of(folder / "model", piece[:-1])
        losses.append(torch.nn.functional.cross_entropy(logits, piece[1:]).item())
    return sum(losses) / SEQUENCES


def test_the_first_loss_is_that_of_transformers(runs):
    expected = loss_of_transformers(runs)
    for name in ("stock", "stock, tensor", "arguments of the checkpoint", "hdp"):
        assert scalars(runs, name)["lm loss"][1] == pytest.approx(expected, rel=2e-6), name
    own = json.loads((runs / "own.jsonl").read_text().splitlines()[0])
    assert own["loss"] == pytest.approx(expected, rel=2e-6)


def test_a_checkpoint_of_the_stock_script_becomes_a_model_again(runs):
    to_hugging_face(runs / "saved", runs / "back", print, like=runs / "model")
    assert not same_tensors(runs / "back", runs / "model")  # the run had fewer positions
    found, before = (
        json.loads((runs / name / "config.json").read_text()) for name in ("back", "model")
    )
    assert found == before | {"max_position_embeddings": 256}
