"""Frozen weights: they keep their bits, and what cannot be frozen is refused."""

from fnmatch import fnmatchcase
from unittest import mock

import pytest
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import build_chunks, frozen
from megatron_hdp.megatron.model.initialisation import global_parameters
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import VOCABULARY, tiny_arguments, write_corpus
from tests.support.ranks import RankError
from tests.training.runs import LENGTHS, run

PATTERNS = ("embedding.*", "*.linear_fc1.*")


def moved_by(arguments):
    """Body of a rank: names of its weights, and whether training has moved them."""
    built = []

    def build(*given):
        (chunk,) = build_chunks(*given)
        weights = dict(global_parameters(chunk.module))
        built.append((weights, {name: one.detach().clone() for name, one in weights.items()}))
        return [chunk]

    with mock.patch("megatron_hdp.training.training_job.build_chunks", build):
        pretrain(arguments)
    ((weights, before),) = built
    return {name: not torch.equal(one, before[name]) for name, one in weights.items()}


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_frozen_weights_keep_their_bits(run_ranks, tmp_path, sharded):
    prefix = write_corpus(tmp_path, LENGTHS)
    settings = {"hdp_frozen": PATTERNS, "use_distributed_optimizer": sharded}
    arguments = run(prefix, steps=2, weight_decay=0.1, add_bias_linear=False, **settings)
    for moved in run_ranks(2, moved_by, arguments):
        frozen = {name for name in moved if any(fnmatchcase(name, one) for one in PATTERNS)}
        assert len(frozen) >= 3
        assert {name for name, has_moved in moved.items() if not has_moved} == frozen


@pytest.mark.parametrize(
    "patterns, message",
    [
        (("*.linear_fc3.*",), r"matches '\*\.linear_fc3\.\*'"),
        (("*",), "found every weight frozen"),
        (("*.linear_fc1.weight",), "freeze decoder.layers.0.mlp.linear_fc1"),
    ],
    ids=["nothing", "everything", "without its bias"],
)
def test_what_cannot_be_frozen_is_refused(run_ranks, patterns, message):
    """On both stages, also on the one whose names would do."""
    settings = {"hdp_frozen": patterns, "pipeline_model_parallel_size": 2}
    arguments = tiny_arguments(None, add_bias_linear=True, **settings)
    with pytest.raises(RankError, match=message):
        run_ranks(2, built_with, arguments)


class TELinear(torch.nn.Linear):
    """Stands in for its layers, whose backward needs a GPU; Megatron has classes of them."""

    __module__ = "megatron.core.extensions.transformer_engine"


def test_layers_of_transformer_engine_are_known():
    """A norm and torch's own layers may train their bias alone."""
    free = torch.nn.ModuleList([torch.nn.LayerNorm(3), torch.nn.Linear(3, 2)])
    for one in free:
        one.weight.requires_grad_(False)
    frozen.require_whole_layers(free)
    layer = TELinear(3, 2)
    frozen.require_whole_layers(layer)
    layer.weight.requires_grad_(False)
    frozen.require_whole_layers(TELinear(3, 2, bias=False).requires_grad_(False))
    with pytest.raises(ValueError, match=r"found 0\.weight frozen and 0\.bias not"):
        frozen.require_whole_layers(torch.nn.ModuleList([layer]))
    layer.bias.requires_grad_(False)
    frozen.require_whole_layers(layer)


def built_with(arguments):
    parallel.initialise(arguments)
    build_chunks(arguments, VOCABULARY)
