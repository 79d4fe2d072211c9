"""A loss or gradient that is no number stops every rank before weights change, and is traced."""

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_hdp import pretrain_gpt
from megatron_hdp.megatron.step.non_finite import NonFiniteError
from megatron_hdp.training import loop, training_job
from tests.training.runs import run

POISON = 200  # a token of one document alone
POISONED = 5
LENGTHS = [30, 60, 0, 20, 33, 50, 90, 21, 40, 70, 22]  # the third document is empty


@pytest.fixture
def prefix(tmp_path):
    """Documents of which one holds the poison; an empty one keeps rows and documents apart."""
    generator = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.uint16)
    for document, length in enumerate(LENGTHS):
        tokens = generator.integers(0, POISON, length)
        if document == POISONED:
            tokens[length // 2] = POISON
        builder.add_document(tokens, [length] if length else [])
    builder.finalize(str(tmp_path / "corpus.idx"))
    return str(tmp_path / "corpus")


def arguments(prefix, **overrides):
    """A run that saves every step, beside the data."""
    folder = Path(prefix).parent
    settings = {"hdp_tokens_per_rank": 60, "global_batch_size": 5, "lr": 1e-3, "save_interval": 1}
    settings |= {"save": folder / "checkpoints", "metrics_path": folder / "metrics.jsonl"}
    return run(prefix, steps=4, **(settings | overrides))


WHOLE = {"hdp_tokens_per_rank": 100}  # each sequence on a rank
STOCK = {"hybrid_data_parallel": False, "hdp_tokens_per_rank": None, "seq_length": 40}
STOCK |= {"global_batch_size": 8, "fp64": False}


def outcome(run, plant, looks_at_losses=True):
    """Body of a rank: message, whether weights are unchanged, saves.

    `plant`, called with the chunks of the model, plants what it likes.
    """
    parameters, weights = [], []
    build, train_step = training_job.build_chunks, loop._train_step

    def build_poisoned(*args):
        chunks = build(*args)
        parameters.extend(one for chunk in chunks for one in chunk.parameters())
        with torch.no_grad():
            plant(chunks)
        return chunks

    def copy_and_train(*args):
        weights[:] = [one.detach().clone() for one in parameters]
        return train_step(*args)

    with (
        mock.patch.object(training_job, "build_chunks", build_poisoned),
        mock.patch.object(loop, "_train_step", copy_and_train),
        mock.patch.object(training_job.Checkpoints, "save") as save,
        nullcontext() if looks_at_losses else mock.patch.object(loop, "_require_finite_loss"),
    ):
        try:
            loop.pretrain(run)
            message = None
        except NonFiniteError as error:
            message = str(error)
    same = all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(weights, parameters, strict=True)
    )
    return message, same, save.call_count


def poison(chunks, value):
    """Puts a value into the place of the poison's embedding."""
    if chunks[0].module.pre_process:
        next(chunks[0].parameters())[POISON] = value


def poison_a_rank(chunks):
    if torch.distributed.get_rank() == 1:
        next(chunks[0].parameters())[:] = float("nan")


def poison_last_part(chunks):
    chunks[-1].module.decoder.layers[0].mlp.linear_fc1.weight[0] = float("nan")


def poison_gradient_of_a_token(chunks):
    """The gradient of the micro-batches that hold the token is NaN; their loss is not."""

    def forward(module, args, kwargs, output):
        if (kwargs["input_ids"] == POISON).any() and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))

    if chunks[0].module.pre_process:
        chunks[0].module.embedding.register_forward_hook(forward, with_kwargs=True)


def poison_gradient_behind_the_layers(chunks):
    def forward(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / 0)

    if chunks[0].module.post_process:
        chunks[0].module.decoder.register_forward_hook(forward)


def first_weight_of(chunks):
    return chunks[0].module.decoder.layers[0].mlp.linear_fc1.weight


def overflow_one_weight(chunks):
    """No micro-batch's gradient is infinite where it reaches the embedding."""
    first_weight_of(chunks).register_hook(lambda gradient: gradient * 1e200)


def make_one_weight_huge(chunks):
    first_weight_of(chunks).register_hook(lambda gradient: gradient.sign() * 1e30)


LINE = r"rank (\d+): micro-batch (\d+) has loss (\S+): documents? ([\d, ]+) of \S+corpus"
GRADIENT_LINE = LINE.replace("has loss", "has a gradient of norm")
NAN = partial(poison, value=float("nan"))


IN_PARTS = {"pipeline_model_parallel_size": 2, "hdp_sequence_parts": 4}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (3, {}),
        pytest.param(4, IN_PARTS, marks=pytest.mark.slow),
        pytest.param(3, {"mtp_num_layers": 1}, marks=pytest.mark.slow),
    ],
    ids=["rings", "parts", "mtp"],
)
@pytest.mark.parametrize(
    ("plant", "value", "pattern", "line"),
    [
        (NAN, "nan", r"the loss of step (\d) is nan", LINE),
        pytest.param(
            *(partial(poison, value=float("inf")), "(nan|inf)"),
            *(r"the loss of step (\d) is (?:nan|inf)", LINE),
            marks=pytest.mark.slow,
        ),
        (
            *(poison_gradient_of_a_token, "nan"),
            r"the gradient of step (\d), whose loss is \d\.\d+, is NaN or infinite, "
            r"first in embedding.word_embeddings.weight \(rank 0\): expected",
            GRADIENT_LINE,
        ),
    ],
    ids=["nan", "inf", "gradient"],
)
def test_the_micro_batch_is_named_and_weights_stay(
    run_ranks, prefix, ranks, settings, plant, value, pattern, line
):
    run = arguments(prefix, **settings)
    results = run_ranks(ranks, outcome, run, plant)
    (message,) = {message for message, _, _ in results}
    step = int(re.search(pattern, message)[1])
    lines = re.findall(line, message)
    assert len({m for _, m, _, _ in lines}) == 1, "one sequence is in one micro-batch"
    for _, _, found, documents in lines:
        assert re.fullmatch(value, found) and POISONED in map(int, documents.split(", "))
    assert all(same and saves == step - 1 for _, same, saves in results)
    assert not run.metrics_path.exists() or step > 1


CASES = {  # ranks, flags, what is planted, words of the message
    "a-rank": (3, {}, poison_a_rank, "the loss of step 1 is nan", "rank 1: micro-batch"),
    "one-weight": (
        *(2, WHOLE | {"fp64": False, "use_distributed_optimizer": True}, overflow_one_weight),
        "first in decoder.layers.0.mlp.linear_fc1.weight (rank 0): expected",
        "saves nothing: resume from the last checkpoint",
    ),
    "validation": (  # the poison is in the second part
        *(1, WHOLE | {"eval_iters": 1, "eval_interval": 1, "split": "5,6,0"}, NAN),
        *(
            "batch 1 of the validation after step 1",
            "rank 0: micro-batch ",
            " has loss nan: documents ",
        ),
    ),
    "stock": (1, STOCK, NAN, "the loss of step"),
    "stock-gradient": (1, STOCK, overflow_one_weight, "the gradient of step 1"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=pytest.mark.slow if one == "stock-gradient" else ()) for one in CASES],
)
def test_all_ranks_stop(run_ranks, prefix, case):
    ranks, settings, plant, *expected = CASES[case]
    for message, same, saves in run_ranks(ranks, outcome, arguments(prefix, **settings), plant):
        assert all(text in message for text in expected), message
        step = int(re.search(r"step (\d)", message)[1])
        assert (same or case == "validation") and saves == step - 1


def test_without_poison_nothing_is_said(run_ranks, prefix):
    """The same run, with the planted fault taken out."""
    harmless = partial(poison, value=0.1)
    ((message, same, saves),) = run_ranks(1, outcome, arguments(prefix, **WHOLE), harmless)
    assert message is None and not same and saves == 4


def test_a_gradient_of_a_later_stage_is_known_on_the_first(run_ranks, prefix):
    run = arguments(prefix, pipeline_model_parallel_size=2, **WHOLE)
    for message, same, saves in run_ranks(2, outcome, run, poison_gradient_behind_the_layers):
        assert "embedding.word_embeddings.weight (rank 0), " in message, message
        assert {rank for rank, *_ in re.findall(GRADIENT_LINE, message)} == {"0"}, message
        assert same and saves == 0


def test_a_gradient_is_named_with_its_part_of_the_model(run_ranks, prefix):
    chunks = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    run = arguments(prefix, num_layers=4, **chunks, **WHOLE)
    assert "part 0: " in run_ranks(4, outcome, run, poison_last_part, False)[0][0]


@pytest.mark.slow
def test_a_norm_that_overflows_is_no_fault(run_ranks, prefix):
    run = arguments(prefix, fp64=False, train_iters=1, **WHOLE)
    ((message, *_),) = run_ranks(1, outcome, run, make_one_weight_huge)
    assert message is None


def test_the_command_ends_with_2(run_ranks, prefix):
    assert run_ranks(1, code_of_the_command, arguments(prefix)) == [2]


def code_of_the_command(run):
    with (
        mock.patch("megatron_hdp.megatron.options.parse_arguments", return_value=run),
        mock.patch("megatron_hdp.megatron.parallel.join_job"),  # the fixture joined it
        mock.patch("megatron_hdp.training.loop.pretrain", side_effect=NonFiniteError("x")),
    ):
        return pretrain_gpt.main([])
