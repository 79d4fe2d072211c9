"""A run that stops and resumes is the run that never stopped; what cannot resume is refused."""

import errno
import os
import re
import shutil
from dataclasses import replace
from unittest import mock

import psutil
import pytest
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_hdp.megatron.checkpoint import checkpoints
from megatron_hdp.megatron.checkpoint.folder import TRACKER, CheckpointFolder
from megatron_hdp.megatron.checkpoint.staging import SavesInNewProcesses
from megatron_hdp.megatron.checkpoint.together import require_shared
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import EXPERTS, write_corpus
from tests.support.mla import MLA
from tests.support.ranks import RankError
from tests.training.runs import LENGTHS, SHARDED, curve, largest_difference, refusals, run


def rates(arguments):
    """Body of a rank: the learning rate of every step."""
    return [metrics.learning_rate for metrics in pretrain(arguments)]


STOCK = {  # there the state of the random generators is what has to be restored
    **{"hybrid_data_parallel": False, "hdp_tokens_per_rank": None, "fp64": False},
    **{"attention_dropout": 0.3, "seq_length": 20, "global_batch_size": 2},
}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, {}), pytest.param(1, STOCK, marks=pytest.mark.slow)],
    ids=["hdp", "stock"],
)
def test_dropout_resumes(run_ranks, tmp_path, ranks, settings):
    whole = run(write_corpus(tmp_path, LENGTHS), hidden_dropout=0.3, **settings)
    folder = tmp_path / "checkpoints"
    expected = run_ranks(ranks, curve, replace(whole, save=folder, save_interval=3))[0]
    assert run_ranks(ranks, curve, replace(whole, load=folder, ckpt_step=3))[0] == expected[3:]


def said(runs):
    """Body of a rank: what each run says of its checkpoint's positions, and its first loss."""
    found = []
    for arguments in runs:
        with mock.patch("megatron_hdp.megatron.parallel.say") as say:
            loss = pretrain(arguments)[0].loss
        lines = [call.args[0] for call in say.call_args_list]
        found.append(([line for line in lines if line.startswith("positions differ")], loss))
    return found


def test_a_context_grows_with_other_positions(run_ranks, tmp_path):
    lengths = [length // 2 for length in LENGTHS[:6]]
    short = run(write_corpus(tmp_path, lengths), train_iters=1, no_rope_freq="2")
    saved = tmp_path / "checkpoints"
    again = replace(short, load=saved, train_iters=2)
    longer = replace(again, rotary_base=500_000, use_rope_scaling=True)
    start = replace(longer, finetune=True, no_rope_freq="[0,0]")
    (_, same, other, anew) = run_ranks(1, said, [replace(short, save=saved), again, longer, start])[
        0
    ]
    line = (
        "positions differ from those of the checkpoint: --rotary-base 500000 instead of 10000, "
        "--use-rope-scaling True instead of False"
    )
    assert same[0] == [] and other[0] == [line] and same[1] != other[1]
    assert anew[0] == [f"{line}, --no-rope-freq (0, 0) instead of (0, 1)"]


def saves(arguments, queue):
    """Body of a rank: steps whose save began, those whose save became visible, the curve."""
    begun, visible = [], []
    with (
        mock.patch.object(checkpoints, "AsyncCallsQueue", queue),
        mock.patch.object(CheckpointFolder, "begin", _noting(CheckpointFolder.begin, begun, 1)),
        mock.patch.object(
            CheckpointFolder, "publish", _noting(CheckpointFolder.publish, visible, 2)
        ),
    ):
        records = pretrain(arguments)
    assert psutil.Process().children() == []  # nothing that could outlive a killed rank
    return begun, visible, [(record.step, record.loss) for record in records]


def _noting(method, notes, index):
    def noting(*args):
        result = method(*args)
        notes.append(args[index])
        return result

    return noting


@pytest.mark.parametrize(
    "queue",
    [AsyncCallsQueue, pytest.param(SavesInNewProcesses, marks=pytest.mark.slow)],
    ids=["on-a-cpu", "as-on-a-gpu"],
)
def test_asynchronous_saves_are_whole_and_in_order(run_ranks, tmp_path, queue):
    whole = run(write_corpus(tmp_path, LENGTHS), **SHARDED)
    folder = tmp_path / "checkpoints"
    saving = replace(whole, save=folder, save_interval=2, async_save=True)
    begun, visible, expected = run_ranks(2, saves, saving, queue)[0]
    assert begun == visible == [2, 4, 6]  # the end falls on a save: not saved twice
    resumed = run_ranks(2, curve, replace(whole, load=folder, ckpt_step=4))[0]
    assert largest_difference(resumed, expected[4:]) <= 1e-10


@pytest.fixture(scope="module")
def saved(run_ranks, tmp_path_factory):
    """One rank, one batch of everything: arguments, folder with steps 2 and 3, the whole curve."""
    tmp_path = tmp_path_factory.mktemp("saved")
    alone = {"hdp_tokens_per_rank": 400, "global_batch_size": len(LENGTHS)}
    whole = run(write_corpus(tmp_path, LENGTHS), **alone)
    folder = tmp_path / "checkpoints"
    run_ranks(1, curve, replace(whole, train_iters=3, save=folder, save_interval=2))
    found = sorted(path.name for path in folder.iterdir())
    assert found == ["iter_0000002", "iter_0000003", TRACKER]
    return whole, folder, run_ranks(1, curve, whole)[0]


def test_what_cannot_continue_is_refused(run_ranks, saved, tmp_path):
    whole, folder, _ = saved
    same = replace(whole, load=folder, train_iters=4)
    (tmp_path / "other").mkdir()
    other_corpus = write_corpus(tmp_path / "other", [31, *LENGTHS[1:]])
    expected = [
        (replace(same, seed=7), "--seed: found 7, expected 1234"),
        (
            replace(same, data_path=(other_corpus,)),
            "fingerprint of its lengths or files: found",
        ),
        (replace(same, seq_length=150, max_position_embeddings=150), "--seq-length: found 150"),
        (
            replace(same, hdp_long_sequence="split"),
            r"--hdp-long-sequence\): found split, expected er",
        ),
        (replace(same, lr=2e-2), "--lr: found 0.02, expected 0.01"),
        (replace(same, lr_decay_iters=9), "--override-opt-param-scheduler"),
        (replace(same, use_distributed_optimizer=True), "--no-load-optim"),
        (replace(same, fp64=False), "'precision': 'fp32'"),
        (replace(same, hidden_size=20), "does not fit this model"),
        (replace(same, num_layers=4), "does not fit this model"),
        (replace(same, ckpt_step=9), r"iter_0000009.*it holds iter_0000002, iter_0000003"),
        (same, None),
    ]
    messages = run_ranks(1, refusals, [arguments for arguments, _ in expected])[0]
    for message, (_, pattern) in zip(messages, expected, strict=True):
        assert (message is None) == (pattern is None), (message, pattern)
        assert message is None or re.search(pattern, message), message


def see_a_folder(folder):
    """Body of a rank: the message of the check; the last rank sees another disk."""
    elsewhere = dist.get_rank() == dist.get_world_size() - 1
    try:
        require_shared(folder / "nowhere" if elsewhere else folder, "--save")
    except ValueError as error:
        return str(error)


def test_a_folder_that_ranks_do_not_share_stops_all(run_ranks, tmp_path):
    messages = run_ranks(3, see_a_folder, tmp_path)
    assert all("1 of 3 ranks do not see" in message for message in messages)


def curve_on_a_full_disk(arguments):
    """Body of a rank: `curve`, with writers that get no space."""
    fsync_there = os.fsync

    def fsync(descriptor):
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            return fsync_there(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch("os.fsync", fsync):
        return curve(arguments)


@pytest.mark.parametrize(
    "async_save",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["blocking", "asynchronous"],
)
def test_a_full_disk_ends_the_run_and_leaves_the_old_checkpoint(
    run_ranks, saved, tmp_path, async_save
):
    whole, folder, expected = saved
    copy = shutil.copytree(folder, tmp_path / "copy")
    failing = replace(whole, load=copy, save=copy, save_interval=1, async_save=async_save)
    # from 0.17 on Megatron logs the reason and hands on the error's class alone
    reason = "NotSavedError: the checkpoint of iteration 4 could not be saved: .*({})"
    with pytest.raises(RankError, match=reason.format("No space left on device|OSError")):
        run_ranks(1, curve_on_a_full_disk, failing)
    assert not list(copy.glob("*.partial-*")) and not list(copy.glob("owner-*"))
    assert CheckpointFolder(copy).latest() == 3
    found = run_ranks(1, curve, replace(whole, load=copy))[0]
    assert largest_difference(found, expected[3:]) <= 1e-12


def test_only_a_part_is_loaded(run_ranks, saved, tmp_path):
    """The batch is the same in every step, so the fourth loss is that of the saved weights."""
    whole, folder, expected = saved
    losses = [loss for _, loss in expected]
    short = replace(whole, train_iters=5)

    def check(arguments, first_step):
        found = run_ranks(1, curve, arguments)[0]
        assert [step for step, _ in found[:2]] == [first_step, first_step + 1]
        assert largest_difference(found[0][1], losses[3]) <= 1e-12  # the weights
        assert largest_difference(found[1][1], losses[4]) > 1e-6  # a fresh optimizer

    check(replace(short, load=folder, load_optim=False), 4)
    check(replace(short, load=folder, finetune=True, seed=7, lr=5e-3), 1)
    new = replace(short, pretrained_checkpoint=folder, load=tmp_path / "new", save=tmp_path / "new")
    check(replace(new, train_iters=2, lr_decay_iters=9), 1)
    resumed = run_ranks(1, curve, replace(new, lr_decay_iters=9))[0]
    assert [step for step, _ in resumed] == [3, 4, 5]


def test_another_schedule_when_asked_for(run_ranks, saved):
    whole, folder, _ = saved
    longer = replace(whole, load=folder, train_iters=7, lr_decay_iters=8, lr=2e-2)
    found = run_ranks(1, rates, replace(longer, override_opt_param_scheduler=True))[0]
    assert found == pytest.approx([2e-2 * (8 - step) / 8 for step in (3, 4, 5, 6)])


KEYS = (
    *("linear_q_down_proj.weight", "linear_q_up_proj.weight", "linear_q_up_proj.layer_norm_weight"),
    *("linear_kv_down_proj.weight", "linear_kv_up_proj.weight"),
    *("linear_kv_up_proj.layer_norm_weight", "linear_proj.weight"),
)
"""Of latent attention, as TransformerEngine's layers name them."""


def saved_keys(arguments):
    """Body of a rank: what the checkpoint of a run holds of its layers."""
    pretrain(arguments)
    found = dist_checkpointing.load_tensors_metadata(str(arguments.save / "iter_0000001"))
    return sorted(name for name in found if name.startswith("decoder.layers."))


@pytest.mark.parametrize("has_experts", [False, True])
def test_norms_are_named_as_transformer_engines(run_ranks, tmp_path, has_experts):
    settings = MLA | (EXPERTS if has_experts else {}) | {"hdp_tokens_per_rank": 200}
    arguments = run(write_corpus(tmp_path, LENGTHS), steps=1, **settings)
    keys = run_ranks(1, saved_keys, replace(arguments, save=tmp_path / "checkpoints"))[0]
    for name in (f"self_attention.{key}" for key in KEYS):
        assert any(key.endswith(name) for key in keys), (name, keys)
    assert not any("q_layernorm" in key or "kv_layernorm" in key for key in keys)
    alone = any(key.endswith("pre_mlp_layernorm.weight") for key in keys)
    assert alone == has_experts
    assert any(key.endswith("linear_fc1.layer_norm_weight") for key in keys) != has_experts
