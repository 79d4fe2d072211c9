"""Evaluation on the validation split: independent of the ranks, and training does not notice it."""

import numpy as np

from megatron_hdp.training.loop import pretrain
from tests.support.gradients import tiny_arguments, write_corpus

LENGTHS = [30, 60, 20, 33, 21, 50, 100, 3, 44, 45, 46, 47]


def run(prefix, **overrides):
    settings = {
        "seq_length": 100,
        "max_position_embeddings": 100,
        "split": "8,4,0",
        "global_batch_size": 3,
        "train_iters": 4,
        "lr_decay_iters": 4,
        "lr": 1e-2,
        "clip_grad": 0.0,
        "hdp_tokens_per_rank": 100,
        "log_interval": 1000,
    }
    return tiny_arguments(prefix, **(settings | overrides))


def losses(arguments):
    records = pretrain(arguments)
    return [m.loss for m in records], [m.validation_loss for m in records]


def test_validation_loss(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, LENGTHS)
    plain, nothing = run_ranks(1, losses, run(prefix))[0]
    assert nothing == [None] * 4
    with_evaluation = run(prefix, eval_iters=2, eval_interval=2)
    train, valid = run_ranks(1, losses, with_evaluation)[0]
    assert train == plain
    assert valid[0] is None and valid[2] is None and valid[3] < valid[1] < 8
    train3, valid3 = run_ranks(3, losses, with_evaluation)[0]
    found, expected = np.array([*train3, valid3[1], valid3[3]]), [*train, valid[1], valid[3]]
    assert np.abs(found / expected - 1).max() <= 1e-10
