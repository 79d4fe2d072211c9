"""A loss or gradient that is no number stops every rank before weights change, and is traced."""

import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_hdp import pretrain_gpt
from megatron_hdp.megatron.step.non_finite import NonFiniteError
from megatron_hdp.training import loop, training_job
from tests.support.gradients import tiny_arguments

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


def arguments(prefix, tmp_path, **overrides):
    settings = {
        "seq_length": 100,
        "max_position_embeddings": 100,
        "hdp_tokens_per_rank": 60,
        "global_batch_size": 5,
        "train_iters": 4,
        "save": tmp_path / "checkpoints",
        "log_interval": 1000,
        "metrics_path": tmp_path / "metrics.jsonl",
        "save_interval": 1,
    }
    return tiny_arguments(prefix, **(settings | overrides))


def outcome(run, poisoned_rank, value, poison_gradient=None):
    """Body of a rank: message, whether weights are unchanged, saves.

    `value` takes the place of the poison's embedding, or of every one on `poisoned_rank` alone;
    `poison_gradient`, called with the model, plants what it likes.
    """
    models, build = [], training_job.build_chunks
    weights = []

    def build_poisoned(*args):
        chunks = build(*args)
        (model,) = chunks
        models.append(model)
        is_poisoned = torch.distributed.get_rank() == poisoned_rank
        with torch.no_grad():
            embedding = first_parameter(model.module)
            if value is None:
                pass
            elif poisoned_rank is None:
                embedding[POISON] = value
            elif is_poisoned:
                embedding[:] = value
        if poison_gradient is not None:
            poison_gradient(model.module)
        return chunks

    train_step = loop._train_step

    def copy_and_train(*args):
        weights[:] = [p.detach().clone() for p in models[0].parameters()]
        return train_step(*args)

    with (
        mock.patch.object(training_job, "build_chunks", build_poisoned),
        mock.patch.object(loop, "_train_step", copy_and_train),
        mock.patch.object(training_job.Checkpoints, "save") as save,
    ):
        try:
            loop.pretrain(run)
            message = None
        except NonFiniteError as error:
            message = str(error)
    same = all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(weights, models[0].parameters(), strict=True)
    )
    return message, same, save.call_count


def first_parameter(model):
    return next(model.parameters())  # the embedding's, on the first stage


LINE = r"rank (\d+): micro-batch (\d+) has loss (\S+): documents? ([\d, ]+) of \S+corpus"


@pytest.mark.parametrize(
    "value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)]
)
def test_the_micro_batch_is_named_and_weights_stay(run_ranks, prefix, tmp_path, value):
    results = run_ranks(3, outcome, arguments(prefix, tmp_path), None, value)
    messages = {message for message, _, _ in results}
    assert len(messages) == 1, messages
    (message,) = messages
    step = int(re.search(r"the loss of step (\d) is (nan|inf)", message)[1])
    lines = re.findall(LINE, message)
    assert lines, message
    assert len({m for _, m, _, _ in lines}) == 1, "one sequence is in one micro-batch"
    for _, _, loss, documents in lines:
        assert loss in ("nan", "inf")
        assert POISONED in map(int, documents.split(", "))
    assert all(same and saves == step - 1 for _, same, saves in results)
    assert not (tmp_path / "metrics.jsonl").exists() or step > 1


def test_a_poisoned_rank_stops_all(run_ranks, prefix, tmp_path):
    results = run_ranks(3, outcome, arguments(prefix, tmp_path), 1, float("nan"))
    for message, same, saves in results:
        assert "the loss of step 1 is nan" in message and "rank 1: micro-batch" in message
        assert same and saves == 0


def test_without_poison_nothing_is_said(run_ranks, prefix, tmp_path):
    """The same run, with the planted fault taken out."""
    ((message, same, saves),) = run_ranks(
        1, outcome, arguments(prefix, tmp_path, hdp_tokens_per_rank=100), None, 0.1
    )
    assert message is None and not same and saves == 4


def test_validation_stops_too(run_ranks, prefix, tmp_path):
    run = arguments(prefix, tmp_path, hdp_tokens_per_rank=100, eval_iters=1, eval_interval=1)
    run = replace(run, split="5,6,0", global_batch_size=6)  # the poison is in the second part
    ((message, _, saves),) = run_ranks(1, outcome, run, None, float("nan"))
    assert "batch 1 of the validation after step 1" in message and saves == 0
    assert re.search(LINE, message), message


def poison_gradient_of_a_token(model):
    """The gradient of the micro-batches that hold the token is NaN; their loss is not."""

    def forward(module, args, kwargs, output):
        if (kwargs["input_ids"] == POISON).any() and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))

    model.embedding.register_forward_hook(forward, with_kwargs=True)


def poison_gradient_behind_the_layers(model):
    def forward(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / 0)

    if model.post_process:
        model.decoder.register_forward_hook(forward)


def overflow_one_weight(model):
    """No micro-batch's gradient is infinite where it reaches the embedding."""
    model.decoder.layers[0].mlp.linear_fc1.weight.register_hook(lambda gradient: gradient * 1e200)


def make_one_weight_huge(model):
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    weight.register_hook(lambda gradient: gradient.sign() * 1e30)


GRADIENT_LINE = LINE.replace("has loss", "has a gradient of norm")


def test_the_micro_batches_of_a_gradient_are_named(run_ranks, prefix, tmp_path):
    run = arguments(prefix, tmp_path)
    results = run_ranks(3, outcome, run, None, None, poison_gradient_of_a_token)
    ((message, *_),) = {(message,) for message, *_ in results}
    assert re.search(r"the gradient of step \d, whose loss is \d\.\d+, is NaN or infinite", message)
    assert "first in embedding.word_embeddings.weight (rank 0): expected" in message
    lines = re.findall(GRADIENT_LINE, message)
    assert len({micro_batch for _, micro_batch, *_ in lines}) == 1, message
    for _, _, value, documents in lines:
        assert value == "nan" and POISONED in map(int, documents.split(", "))
    step = int(re.search(r"step (\d)", message)[1])
    assert all(same and saves == step - 1 for _, same, saves in results)


def test_a_gradient_of_a_later_stage_is_known_on_the_first(run_ranks, prefix, tmp_path):
    run = arguments(prefix, tmp_path, pipeline_model_parallel_size=2, hdp_tokens_per_rank=100)
    plant = poison_gradient_behind_the_layers
    for message, same, saves in run_ranks(2, outcome, run, None, None, plant):
        assert "embedding.word_embeddings.weight (rank 0), " in message, message
        assert {rank for rank, *_ in re.findall(GRADIENT_LINE, message)} == {"0"}, message
        assert same and saves == 0


def test_a_gradient_that_overflows_in_one_weight_alone(run_ranks, prefix, tmp_path):
    settings = {"fp64": False, "use_distributed_optimizer": True, "hdp_tokens_per_rank": 100}
    run = arguments(prefix, tmp_path, **settings)
    for message, same, saves in run_ranks(2, outcome, run, None, None, overflow_one_weight):
        assert "first in decoder.layers.0.mlp.linear_fc1.weight (rank 0): expected" in message
        assert "saves nothing: resume from the last checkpoint" in message
        assert same and saves == 0


@pytest.mark.slow
def test_a_norm_that_overflows_is_no_fault(run_ranks, prefix, tmp_path):
    run = arguments(prefix, tmp_path, fp64=False, hdp_tokens_per_rank=100, train_iters=1)
    ((message, *_),) = run_ranks(1, outcome, run, None, None, make_one_weight_huge)
    assert message is None


@pytest.mark.slow
def test_a_gradient_without_hdp(run_ranks, prefix, tmp_path):
    run = arguments(prefix, tmp_path, hybrid_data_parallel=False, hdp_tokens_per_rank=None)
    run = replace(run, seq_length=40, global_batch_size=8, fp64=False)
    ((message, same, _),) = run_ranks(1, outcome, run, None, None, overflow_one_weight)
    assert "the gradient of step 1" in message and same


def test_without_hdp_it_stops_too(run_ranks, prefix, tmp_path):
    run = arguments(prefix, tmp_path, hybrid_data_parallel=False, hdp_tokens_per_rank=None)
    run = replace(run, seq_length=40, global_batch_size=8, fp64=False)
    ((message, same, _),) = run_ranks(1, outcome, run, None, float("nan"))
    assert "the loss of step" in message and same


def test_the_command_ends_with_2(run_ranks, prefix, tmp_path):
    assert run_ranks(1, code_of_the_command, arguments(prefix, tmp_path)) == [2]


def code_of_the_command(run):
    with (
        mock.patch("megatron_hdp.megatron.options.parse_arguments", return_value=run),
        mock.patch("megatron_hdp.megatron.parallel.join_job"),  # the fixture joined it
        mock.patch("megatron_hdp.training.loop.pretrain", side_effect=NonFiniteError("x")),
    ):
        return pretrain_gpt.main([])


def words_of_a_poisoned_part(run):
    """Body of a rank: the error of a run whose last model chunk has a NaN weight.

    The loss is not looked at.
    """
    build = training_job.build_chunks

    def build_poisoned(*args):
        chunks = build(*args)
        with torch.no_grad():
            chunks[-1].module.decoder.layers[0].mlp.linear_fc1.weight[0] = float("nan")
        return chunks

    with (
        mock.patch.object(loop, "_require_finite_loss"),
        mock.patch.object(training_job, "build_chunks", build_poisoned),
        pytest.raises(NonFiniteError) as caught,
    ):
        loop.pretrain(run)
    return str(caught.value)


def test_a_gradient_is_named_with_its_part_of_the_model(run_ranks, prefix, tmp_path):
    chunks = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    run = arguments(prefix, tmp_path, num_layers=4, hdp_tokens_per_rank=100, **chunks)
    assert "part 0: " in run_ranks(4, words_of_a_poisoned_part, run)[0]
