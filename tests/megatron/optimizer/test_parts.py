"""Settings of one optimizer laid out for two, and of two for one; tests/training resumes runs."""

from types import SimpleNamespace

from megatron_hdp.megatron.optimizer.parts import laid_out


def group(decay, is_expert=False, **rest):
    kind = {"wd_mult": decay, "lr_mult": 1.0, "is_decoupled_lr": False}
    return kind | {"is_expert_parallel": is_expert} | rest


def optimizer(*parts):
    return SimpleNamespace(
        chained_optimizers=[SimpleNamespace(param_groups=groups) for groups in parts]
    )


ALL = [group(1.0), group(0.0)]
EXPERTS = [group(1.0, is_expert=True)]
SAVED = [group(0.0, lr=3, step=7), group(1.0, lr=4, step=7)]


def test_one_becomes_two():
    common = {"param_groups": SAVED, "state": {"common_step": 7}}
    loaded = common | {
        0: {"state": {5: "dense"}, "param_groups": [{"params": [0]}, {"params": [1]}]},
        1: {"state": {6: "expert"}, "param_groups": [{"params": [2]}]},
    }
    assert laid_out(loaded, common, optimizer(ALL, EXPERTS)) == {
        0: {
            "state": {"common_step": 7, 5: "dense"},
            "param_groups": [
                group(1.0, lr=4, step=7, params=[0]),
                group(0.0, lr=3, step=7, params=[1]),
            ],
        },
        1: {
            "state": {"common_step": 7, 6: "expert"},
            "param_groups": [group(1.0, is_expert=True, lr=4, step=7, params=[2])],
        },
    }


def test_two_become_one_wrapped_once_more():
    common = {
        0: {"optimizer": {"param_groups": SAVED}, "kind": "k"},
        1: {"optimizer": {"param_groups": [group(1.0, is_expert=True, lr=4, step=7)]}, "kind": "k"},
    }
    loaded = common | {"param_state": "tensors"}
    assert laid_out(loaded, common, optimizer(ALL)) == {
        "optimizer": {"param_groups": [group(1.0, lr=4, step=7), group(0.0, lr=3, step=7)]},
        "kind": "k",
        "param_state": "tensors",
    }


def test_as_many_as_before_stay_as_they_are():
    loaded = {0: "a", 1: "b"}
    assert laid_out(loaded, {0: {}, 1: {}}, optimizer(ALL, EXPERTS)) is loaded
    assert laid_out(loaded, {"param_groups": SAVED}, optimizer(ALL)) is loaded
