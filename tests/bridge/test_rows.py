"""What of Bridge's micro-batches is trained, and what is refused by name."""

import types

import pytest
import torch
import torch.distributed as dist

from megatron_hdp.bridge import patches
from megatron_hdp.bridge.refusals import require_known
from megatron_hdp.bridge.rows import Rows
from megatron_hdp.megatron.lm.patching import PatchError


def batch_of(rows, *, length=8, trained=None, **others):
    """A padded batch, as Bridge collates it, of sequences that include their last label."""
    found = {name: [] for name in ("tokens", "labels", "loss_mask", "position_ids")}
    for number, row in enumerate(rows):
        num = len(row) - 1
        mask = [1] * num if trained is None else trained[number]
        for name, values in (("tokens", row[:-1]), ("labels", row[1:]), ("loss_mask", mask)):
            found[name].append([*values, *[0] * (length - num)])
        found["position_ids"].append(list(range(length)))
    return {name: torch.tensor(one) for name, one in found.items()} | others


def test_padding_and_untrained_ends_are_cut():
    rows = Rows.of([batch_of([[5, 6, 7], [1, 2, 3, 4]], trained=[[0, 1], [1, 1, 0]])])
    assert [one.tolist() for one in rows.tokens] == [[5, 6, 7], [1, 2, 3]]
    assert [one.tolist() for one in rows.trained] == [[False, False, True], [False, True, True]]
    assert Rows.of([batch_of([[5, 6, 7]], trained=[[0, 0]])]).tokens == []


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_q"])
def test_packed_rows_are_taken_apart(name):
    batch = {
        "tokens": torch.tensor([[1, 2, 3, 7, 8, 0, 0]]),
        "labels": torch.tensor([[2, 3, 4, 8, 9, 0, 0]]),
        "loss_mask": torch.tensor([[1, 1, 1, 0, 1, 0, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1]]),
        name: torch.tensor([[0, 3, 5, -1, -1]]),
    }
    rows = Rows.of([batch])
    assert [one.tolist() for one in rows.tokens] == [[1, 2, 3, 4], [7, 8, 9]]
    assert [one.tolist() for one in rows.trained] == [
        [False, True, True, True],
        [False] * 2 + [True],
    ]
    batch["loss_mask"][0, 6] = 1
    with pytest.raises(ValueError, match="packed sequences from 0 to 5, expected"):
        Rows.of([batch])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"labels": torch.full((1, 8), 9)}, "labels that are not the next tokens"),
        ({"loss_mask": torch.full((1, 8), 0.5)}, "loss_mask of 0.5, expected 0 and 1"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5]])}, "position_ids that are not"),
        ({"attention_mask": torch.ones(1)}, "found an attention_mask"),
        ({"labels": None}, "found no labels"),
    ],
)
def test_a_batch_that_means_something_else_is_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        Rows.of([batch_of([[1, 2, 3, 4]]) | changed])


def shares():
    """Body of a rank: everybody's rows, of which the second rank has none."""
    given = [batch_of([[5, 6, 7], [1, 2]])] if dist.get_rank() != 1 else []
    rows = Rows.of(given).gathered(dist.group.WORLD, torch.device("cpu"))
    return [one.tolist() for one in rows.tokens], [one.tolist() for one in rows.trained]


def test_ranks_gather_all_rows(run_ranks):
    tokens = [[5, 6, 7], [1, 2]] * 2
    trained = [[False, True, True], [False, True]] * 2
    assert run_ranks(3, shares) == [(tokens, trained)] * 3


PARTS = ("model", "ddp", "dist", "checkpoint")


def configuration(**changed):
    """What of Bridge's is looked at, each part with what is known."""
    found = {"peft": None, **{name: types.SimpleNamespace() for name in PARTS}}
    found["checkpoint"].async_save = False
    for path, value in changed.items():
        part, _, name = path.partition(".")
        if name:
            setattr(found[part], name, value)
        else:
            found[part] = value
    return types.SimpleNamespace(**found)


def forward_step():
    """Stands for Bridge's."""


BRIDGES_OWN = types.SimpleNamespace(
    __module__="megatron.bridge.training.gpt_step", __qualname__="forward_step"
)


def test_a_configuration_that_would_not_run_as_it_says_is_refused():
    known = types.SimpleNamespace(func=BRIDGES_OWN)
    require_known(configuration(**{"model.context_parallel_size": 1}), known)
    changed = {
        "model.context_parallel_size": 2,
        "ddp.overlap_param_gather": True,
        "peft": "canonical",
        "checkpoint.async_strategy": "nvrx",
    }
    with pytest.raises(ValueError) as told:
        require_known(configuration(**changed, **{"checkpoint.async_save": True}), forward_step)
    for name in (*changed, "tests.bridge.test_rows.forward_step"):
        assert f"found {'the forward step ' if 'tests' in name else ''}{name}" in str(told.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"target_modules": ["*.layers.0.*.linear_qkv", "router"]},
            "target_modules with router, ex",
        ),
        ({"target_modules": []}, "target_modules with exclude_modules"),
        ({"dropout": 0.1}, "found peft.dropout = 0.1, expected 0: what"),
        ({"num_moe_experts": 8, "moe_grouped_gemm": True}, "found peft in a model of grouped exp"),
        ({"kind": "DoRA"}, "found peft = DoRA, expected Bridge's LoRA"),
    ],
)
def test_adapters_that_would_not_train_as_they_say_are_refused(changed, words):
    known = types.SimpleNamespace(func=BRIDGES_OWN)
    made = type(changed.pop("kind", "LoRA"), (), {"__module__": "megatron.bridge.peft.lora"})()
    given = {"target_modules": ["linear_qkv", "*.layers.1.*.linear_fc2"], "dropout": 0.0}
    vars(made).update(given | changed)
    of_model = {f"model.{name}": value for name, value in changed.items() if name not in given}
    with pytest.raises(ValueError, match=words) as told:
        require_known(configuration(peft=made, **of_model), known)
    assert str(told.value).count("found peft") == 1
    if type(made).__name__ == "LoRA":
        vars(made).update(given)
        require_known(configuration(peft=made), known)


def test_another_release_of_bridge_is_refused(monkeypatch):
    monkeypatch.setattr(patches, "version", lambda name: "0.5.1")
    with pytest.raises(PatchError, match=r"megatron-bridge 0\.5\.1, expected a version of 0\.6"):
        patches.activate(hdp_tokens_per_rank=8)
    assert not patches.PATCHES.is_applied
