"""A run that stops and continues, on other ranks too, is the run that never stopped."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_hdp.megatron.checkpoint_folder import TRACKER
from megatron_hdp.training.loop import pretrain
from tests.gradients import tiny_arguments, write_corpus

LENGTHS = [30, 60, 20, 33, 21, 50, 100, 3]


def run(prefix, **overrides):
    settings = {
        "seq_length": 100,
        "max_position_embeddings": 100,
        "global_batch_size": 3,
        "train_iters": 6,
        "lr_decay_iters": 6,
        "lr": 1e-2,
        "log_interval": 1000,
        "hidden_dropout": 0.0,
    }
    return tiny_arguments(prefix, **(settings | overrides))


def curve(arguments):
    """Body of a rank: (step, loss) of every step."""
    return [(metrics.step, metrics.loss) for metrics in pretrain(arguments)]


@pytest.mark.parametrize(
    "overrides, tolerance",
    [
        ({"clip_grad": 0.0}, 1e-10),
        ({"fp64": False, "use_distributed_optimizer": True}, 2e-6),
        ({"fp64": False, "bf16": True, "use_distributed_optimizer": True}, 2e-3),
    ],
    ids=["float64", "float32-distributed-optimizer", "bfloat16-distributed-optimizer"],
)
def test_resumed_on_other_ranks(run_ranks, tmp_path, overrides, tolerance):
    whole = run(write_corpus(tmp_path, LENGTHS), **overrides)
    folder = tmp_path / "checkpoints"
    expected = run_ranks(2, curve, whole)[0]
    run_ranks(2, curve, replace(whole, train_iters=3, save=folder, save_interval=2))
    assert sorted(path.name for path in folder.iterdir()) == [
        "iter_0000002",
        "iter_0000003",
        TRACKER,
    ]
    resumed = run_ranks(3, curve, replace(whole, load=folder))[0]
    assert [step for step, _ in resumed] == [4, 5, 6]
    found, wanted = np.array(resumed), np.array(expected[3:])
    assert np.abs(found / wanted - 1).max() <= tolerance


def test_dropout_resumes_on_the_same_ranks(run_ranks, tmp_path):
    whole = run(write_corpus(tmp_path, LENGTHS), hidden_dropout=0.3)
    folder = tmp_path / "checkpoints"
    expected = run_ranks(2, curve, whole)[0]
    run_ranks(2, curve, replace(whole, train_iters=3, save=folder))
    assert run_ranks(2, curve, replace(whole, load=folder))[0] == expected[3:]


def test_an_unfinished_checkpoint_is_not_seen(run_ranks, tmp_path):
    """What a kill while saving leaves behind: the previous checkpoint is the latest."""
    whole = run(write_corpus(tmp_path, LENGTHS), hdp_tokens_per_rank=100)
    folder = tmp_path / "checkpoints"
    run_ranks(1, curve, replace(whole, train_iters=2, save=folder))
    (folder / "iter_0000003.partial").mkdir()
    (folder / "iter_0000003.partial" / "common.pt").write_bytes(b"half")
    assert run_ranks(1, curve, replace(whole, load=folder))[0][0][0] == 3


def test_nothing_to_load_starts_from_the_beginning(run_ranks, tmp_path):
    nowhere = {"load": tmp_path / "none", "train_iters": 1, "hdp_tokens_per_rank": 100}
    whole = run(write_corpus(tmp_path, LENGTHS), **nowhere)
    assert run_ranks(1, curve, whole)[0][0][0] == 1


def test_a_missing_checkpoint_is_named(run_ranks, tmp_path):
    whole = run(write_corpus(tmp_path, LENGTHS), load=tmp_path, hdp_tokens_per_rank=100)
    (tmp_path / TRACKER).write_text("7")
    with pytest.raises(Exception, match="does not hold the checkpoint iter_0000007"):
        run_ranks(1, curve, whole)
