"""A session takes subclasses of Megatron's classes, unless they override what HDP replaces."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import give_megatrons_passes, known
from megatron_hdp.session import HdpSession
from tests.session.test_taken_over import class_names, everything
from tests.support.gradients import EXPERTS
from tests.support.own_loop import VOCABULARY, arguments_of, errors_of, stock_chunk

OWN_LOOP = "tests.support.own_loop"
TP2 = {"tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64}


class Branded(GPTModel):
    """Of a framework that adds to Megatron's model and leaves its passes alone."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.brand = "theirs"

    def set_input_tensor(self, input_tensor):
        assert self.brand == "theirs"
        super().set_input_tensor(input_tensor)


@pytest.mark.parametrize(
    ("ranks", "overrides"), [(2, {}), pytest.param(2, TP2, marks=pytest.mark.slow)]
)
def test_a_subclass_has_the_gradients_of_one_rank(run_ranks, ranks, overrides):
    arguments = arguments_of(**{"hdp_tokens_per_rank": 200, **overrides})
    how = ("weighted", "clipped"), (None, 0), (f"{OWN_LOOP}.GPTModel", Branded)
    found = run_ranks(ranks, errors_of, arguments, *how, by_megatron=True)[0]
    assert len(found) == 4 and max(found.values()) <= 1e-10, found


class OwnForward(GPTModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OwnEnd(Branded):
    def _postprocess(self, *args, **kwargs):
        return super()._postprocess(*args, **kwargs)


class OwnPositions(GPTModel):
    def _preprocess(self, *args, **kwargs):
        return super()._preprocess(*args, **kwargs)


class OwnAttention(SelfAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OwnLayer(TransformerLayer):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OwnRouter(TopKRouter):
    def routing(self, *args, **kwargs):
        return super().routing(*args, **kwargs)


class OwnOutput(ColumnParallelLinear):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


FOREIGN = {
    "OwnForward.forward": lambda model: (model, OwnForward),
    "OwnEnd._postprocess": lambda model: (model, OwnEnd),
    "OwnPositions._preprocess": lambda model: (model, OwnPositions),
    "OwnAttention.forward": lambda model: (model.decoder.layers[1].self_attention, OwnAttention),
    "OwnLayer.forward": lambda model: (model.decoder.layers[0], OwnLayer),
    "OwnRouter.routing": lambda model: (model.decoder.layers[1].mlp.router, OwnRouter),
    "OwnOutput.forward": lambda model: (model.output_layer, OwnOutput),
}


def refusals():
    """What each foreign part is refused with, and what of the model is different then."""
    arguments = arguments_of(**EXPERTS, num_layers=2)
    parallel.initialise(arguments)
    parallel.set_seeds(arguments.seed)
    chunk, found = stock_chunk(arguments, 0), {}
    for name, of in FOREIGN.items():
        part, cls = of(chunk.module)
        part.__class__, stock = cls, type(part)
        before, names = everything(chunk), class_names(chunk)
        with pytest.raises(ValueError) as refused:
            HdpSession.of_model(
                [chunk], vocab_size=VOCABULARY, seq_length=200, hdp_tokens_per_rank=128
            )
        after = everything(chunk)
        left = {key for key in before.keys() | after if before.get(key) != after.get(key)}
        found[name] = str(refused.value), left, class_names(chunk) == names
        part.__class__ = stock
    return found


def test_what_hdp_replaces_is_refused_by_name(run_ranks):
    for name, (refused, left, same_names) in run_ranks(1, refusals)[0].items():
        assert name in refused and "expected" in refused and ": " in refused, refused
        assert not left and same_names, name


class Written(GPTModel):
    """As a framework's that writes Megatron's passes out for what else it trains."""

    def forward(self, *args, **kwargs):
        raise AssertionError("HDP runs Megatron's")

    _preprocess = _postprocess = forward


class Further(Written):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


(SETTINGS,) = known._KNOWN.values()  # mcore-bridge's
KNOWN = "megatron_hdp.megatron.model.known._KNOWN", {f"{__name__}.Written": SETTINGS}


def test_megatrons_passes_run_where_a_subclass_is_known_to_repeat_them(run_ranks):
    arguments = arguments_of(hdp_tokens_per_rank=200)
    how = ("weighted",), (0,), (f"{OWN_LOOP}.GPTModel", Written), KNOWN
    found = run_ranks(2, errors_of, arguments, *how, by_megatron=True)[0]
    assert len(found) == 1 and max(found.values()) <= 1e-10, found


@pytest.mark.parametrize(
    ("cls", "settings", "scaling", "words"),
    [
        (Written, {"task_type": "embedding"}, None, "found task_type = embedding, expected causal"),
        (Written, {"attention_scaling": 1.2}, None, "found attention_scaling = 1.2, expected 1"),
        (Written, {}, {"rope_type": "dynamic"}, "found rotary scaling dynamic, expected one that"),
        (Further, {}, None, "Further.forward, expected Written's own forward"),
    ],
)
def test_a_known_subclass_is_refused_where_its_passes_differ(cls, settings, scaling, words):
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    model.config, model.hf_rope_scaling = SimpleNamespace(**settings), scaling
    with mock.patch(*KNOWN), pytest.raises(ValueError, match=words):
        give_megatrons_passes(model)
    assert type(model) is cls


def test_other_subclasses_keep_their_passes():
    model = OwnForward.__new__(OwnForward)
    give_megatrons_passes(model)
    assert type(model) is OwnForward
