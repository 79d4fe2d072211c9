"""What the plugin replaces in Megatron-LM and in its model, as far as megatron-core shows it."""

import importlib.util
import inspect
from types import SimpleNamespace

import pytest
import torch
from megatron.core import package_info, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator, RerunStateMachine
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.lm.log import operations
from megatron_hdp.megatron.lm.model import adapt
from megatron_hdp.megatron.lm.patches import PATCHES, check_patches
from megatron_hdp.megatron.lm.releases import RELEASES, installed_version, release_of
from megatron_hdp.megatron.model.attention import HdpCoreAttention
from megatron_hdp.megatron.model.fused_loss import FusedLossModel, FusedLossOutputLayer
from megatron_hdp.megatron.model.rotary import OwnPositionRotaryEmbedding

NORM = "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__"


def parameters(function):
    return tuple(inspect.signature(function).parameters)


def test_every_record_is_whole():
    targets = [patch.target for patch in PATCHES.patches]
    assert len(set(targets)) == len(targets)
    for patch in PATCHES.patches:
        assert patch.target.startswith("megatron.training.") or patch.target == NORM
        assert patch.why
        assert patch.parameters and set(patch.parameters) <= set(RELEASES)


def test_the_installed_megatron_core_is_what_the_records_expect():
    (record,) = (one for one in PATCHES.patches if "forward_backward" in one.target)
    assert record.parameters[release_of(installed_version())] == parameters(
        get_forward_backward_func
    )
    assert parameters(RerunDataIterator.__init__) == ("self", "iterable")
    wanted = {"result", "rejection_func", "message", "tolerance", "fatal"}
    assert wanted <= set(parameters(RerunStateMachine.validate_result))


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="this megatron-core has no megatron.training: install 0.17 or newer, or set PYTHONPATH "
    "to a Megatron-LM checkout",
)
def test_every_record_fits_the_installed_megatron_training():
    found = check_patches()
    assert found is not None and len(found) == len(PATCHES.of(installed_version()))
    assert not [one for one in found if one.problem is not None]


def test_the_commit_of_a_git_checkout_is_no_part_of_the_version(monkeypatch):
    monkeypatch.setattr(package_info, "__version__", "0.19.1+abc1234")
    assert installed_version() == "0.19.1"


def test_operations_of_different_lengths():
    def stock(args, batch_size):
        return batch_size * (args.weights * args.seq_length + 7 * args.seq_length**2)

    args, lengths = SimpleNamespace(weights=100, seq_length=256), [3, 50, 999]
    expected = sum(100 * length + 7 * length**2 for length in lengths)
    squares = sum(length**2 for length in lengths)
    assert operations(stock, args, sum(lengths), squares) == pytest.approx(expected, rel=1e-12)
    assert args.seq_length == 256
    frozen = operations(stock, args, sum(lengths), squares, linear_share=2 / 3)
    assert expected - frozen == pytest.approx(100 * sum(lengths) / 3, rel=1e-9)


def _adapt_on_a_rank(fused_loss):
    shim.apply()
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="rope",
    )
    before = {name: (id(one), one.clone()) for name, one in model.named_parameters()}
    keys = list(model.state_dict())
    assert adapt(model, fused_loss=fused_loss) is model
    after = dict(model.named_parameters())
    assert list(after) == list(before) and list(model.state_dict()) == keys
    for name, (identity, values) in before.items():
        assert id(after[name]) == identity and torch.equal(after[name], values)
    for layer in model.decoder.layers:
        assert isinstance(layer.self_attention.core_attention, HdpCoreAttention)
    assert isinstance(model.rotary_pos_emb, OwnPositionRotaryEmbedding)
    assert isinstance(model, FusedLossModel) == fused_loss
    assert isinstance(model.output_layer, FusedLossOutputLayer) == fused_loss
    for stranger, message in (
        (torch.nn.Linear(2, 2), "found a Linear, expected megatron.core's GPTModel"),
        (_with_other_attention(model), "layer 2: found SelfAttention with Linear, expected"),
    ):
        with pytest.raises(ValueError, match=message):
            adapt(stranger, fused_loss=fused_loss)


def _with_other_attention(model):
    model.__class__ = GPTModel
    first, second = (layer.self_attention for layer in model.decoder.layers)
    first.core_attention.__class__ = type("TEDotProductAttention", (torch.nn.Module,), {})
    second.core_attention = torch.nn.Linear(2, 2)
    return model


@pytest.mark.parametrize("fused_loss", [True, False])
def test_the_model_keeps_its_parameters(run_ranks, fused_loss):
    run_ranks(1, _adapt_on_a_rank, fused_loss)
