"""Models that Megatron built with its own attention under some configuration, then taken over."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_hdp.megatron.lm.model import adapt
from megatron_hdp.megatron.model import HdpCoreAttention, HdpMlaSelfAttention, building
from tests.support.mla import PlainCoreAttention

CONFIG, DRAW = building.transformer_config, building.initialise_by_name
TEDotProductAttention = type("TEDotProductAttention", (PlainCoreAttention,), {})


@contextmanager
def configured(**values: Any) -> Iterator[None]:
    """Within it every model's configuration has these fields, also the reference's."""

    def with_values(arguments):
        config = CONFIG(arguments)
        for name, value in values.items():
            assert hasattr(config, name)
            setattr(config, name, value)
        return config

    with mock.patch.object(building, "transformer_config", with_values):
        yield


@contextmanager
def taken_over(latent: bool = False, **values: Any) -> Iterator[None]:
    """The same, and HDP's models are Megatron's until they are adapted."""

    def adapt_and_draw(model, seed):
        layers = model.decoder.layers
        assert not any(isinstance(one.self_attention, HdpMlaSelfAttention) for one in layers)
        assert not any(
            isinstance(one.self_attention.core_attention, HdpCoreAttention) for one in layers
        )
        adapt(model, fused_loss=False)
        attentions = (one.self_attention.core_attention for one in layers)
        assert all(isinstance(one, HdpCoreAttention) for one in attentions)
        DRAW(model, seed)

    core = TEDotProductAttention if latent else DotProductAttention
    with ExitStack() as patches:
        patches.enter_context(configured(**values))
        for name, stand_in in {
            "attend_to_own_positions": lambda spec, has_experts: None,
            "give_own_positions": lambda model: None,
            "HdpCoreAttention": core,
            "initialise_by_name": adapt_and_draw,
        }.items():
            patches.enter_context(mock.patch.object(building, name, stand_in))
        yield
