"""Adapters are trained beside a base that stays; their checkpoints hold them alone."""

from dataclasses import replace

import pytest
from megatron.core import dist_checkpointing

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.adapters import adapter_record, require_same_adapters
from megatron_hdp.megatron.model import build_chunks
from megatron_hdp.options import OptionError
from megatron_hdp.session import HdpSession
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import EXPERTS
from tests.training.runs import BUCKETS, SHARDED, largest_difference
from tests.training.test_resume_layouts import (
    ALONE,
    DEEP,
    LATENT,
    SEQUENCE,
    SMALL,
    STAGES,
    TENSOR,
    TWO,
    trained,
    whole_run,
)

SLOW = pytest.mark.slow
SHARES = SHARDED | BUCKETS
ADAPTERS = {"lora_rank": 2, "lora_alpha": 8.0}
PROJECTED = ("linear_proj",)
OF_LATENTS = {"lora_targets": ("linear_q_down_proj", "linear_kv_up_proj", "linear_proj")}
CASES = {  # what is trained, where it is resumed
    "to-tp2": (SMALL, (2, TENSOR)),
    "sharded-to-tp2-sp-pp2": (SMALL | SHARES, (4, SEQUENCE | STAGES)),
    "experts-spread": (EXPERTS | SMALL, (2, {"expert_model_parallel_size": 2})),
    "latent-to-pp2": (LATENT | OF_LATENTS, (2, STAGES | {"hdp_mla_ring": "kv"})),
    "deep-to-virtual": (DEEP, (4, STAGES | {"num_virtual_stages_per_pipeline_rank": 2})),
}


def with_adapters(whole, base, **overrides):
    """The same run of adapters beside a base."""
    return replace(whole, pretrained_checkpoint=base, **(ADAPTERS | overrides))


@SLOW
@pytest.mark.parametrize("name", CASES)
def test_resumed_on_another_layout(run_ranks, tmp_path, name):
    """The curve is that of an unbroken run; the base is what it was."""
    model, after = CASES[name]
    targets = {key: value for key, value in model.items() if key == "lora_targets"}
    model = {key: value for key, value in model.items() if key not in targets}
    whole, folder, base = whole_run(tmp_path, **model), tmp_path / "adapters", tmp_path / "base"
    trained(run_ranks, replace(whole, train_iters=1, save=base), ALONE)
    mine = with_adapters(whole, base, **targets)
    expected = trained(run_ranks, mine, ALONE)
    assert len({loss for _, loss, *_ in expected}) == 6
    first = trained(run_ranks, replace(mine, train_iters=3, save=folder), TWO)
    assert largest_difference(first, expected[:3]) <= 1e-10
    found = trained(run_ranks, replace(mine, load=folder), after)
    assert [step for step, *_ in found] == [4, 5, 6]
    assert largest_difference(found, expected[3:]) <= 1e-10
    saved = dist_checkpointing.load_tensors_metadata(str(folder / "iter_0000003"))
    weights = [key for key in saved if not key.startswith(("optimizer.", "chained_"))]
    assert weights and all(key.rpartition(".")[-1] in ("lora_a", "lora_b") for key in weights)


def refusal(arguments):
    """Body of a rank: the sentence that a run ends with."""
    try:
        pretrain(arguments)
    except (ValueError, OptionError) as error:
        return str(error)
    return None


def loaded_sessions(arguments, base, folder):
    """Body of a rank: losses of sessions that have loaded a base, and adapters beside it."""
    parallel.initialise(arguments)
    session = HdpSession(arguments, build_chunks(arguments, 257), vocab_size=257)
    batch, found = [list(range(1, 60))], []
    for path in (base, folder):
        session.load_weights(path)
        found.append(session.step(batch, forward_only=True).loss)
    parallel.finish()
    return found


@SLOW
def test_what_does_not_belong_together(run_ranks, tmp_path):
    """One sentence, before anything is written; a session loads both."""
    whole, folder, base = whole_run(tmp_path, **SMALL), tmp_path / "adapters", tmp_path / "base"
    trained(run_ranks, replace(whole, train_iters=1, save=base), ALONE)
    mine = with_adapters(whole, base)
    trained(run_ranks, replace(mine, train_iters=1, save=folder), ALONE)
    new = tmp_path / "new"
    runs = [
        ("expected --lora-rank 2 --lora-alpha 8", replace(mine, load=folder, lora_rank=3)),
        ("found --lora-targets linear_proj", replace(mine, load=folder, lora_targets=PROJECTED)),
        ("holds the weights of a whole model", replace(mine, load=base)),
        ("holds adapters alone", replace(whole, load=folder)),
        ("holds adapters alone", replace(mine, pretrained_checkpoint=folder)),
        ("found no --pretrained-checkpoint", replace(mine, pretrained_checkpoint=None)),
        ("without a checkpoint", replace(mine, pretrained_checkpoint=tmp_path / "none")),
        ("--finetune: found it beside", replace(mine, load=base, finetune=True)),
    ]
    for sentence, arguments in runs:
        found = run_ranks(1, refusal, replace(arguments, save=new, **ALONE[1]))[0]
        assert found is not None and sentence in found, (sentence, found)
        assert not [*new.glob("iter_*")]
    one, other = run_ranks(1, loaded_sessions, replace(mine, **ALONE[1]), base, folder)[0]
    assert one != other


def test_the_sentence_names_what_differs():
    """And all flags that are expected."""

    class Options:
        lora_rank, lora_alpha, lora_targets = 4, None, ("linear_qkv", "linear_fc1")

    mine = adapter_record(Options)
    assert mine == {"rank": 4, "alpha": 4.0, "targets": ["linear_fc1", "linear_qkv"]}
    require_same_adapters(mine, dict(mine), "x")
    with pytest.raises(ValueError, match="found --lora-alpha 4, expected --lora-rank 4 --lora-a"):
        require_same_adapters(mine, mine | {"alpha": 16.0}, "x")
