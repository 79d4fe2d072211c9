"""MTP layers in a run: it resumes with other pipeline stages."""

from dataclasses import replace

import numpy as np

from megatron_hdp.training.loop import pretrain
from tests.gradient_equivalence.cases import MTP
from tests.support.gradients import tiny_arguments, write_corpus


def curve(arguments):
    """Body of a rank: losses of every step."""
    return [(one.loss, one.mtp_loss) for one in pretrain(arguments)]


def test_a_run_resumes_with_stages(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, [30, 60, 20, 33, 21, 50, 64, 3], corrupt=[2])
    settings = {"seq_length": 64, "max_position_embeddings": 64, "global_batch_size": 3}
    whole = tiny_arguments(prefix, train_iters=4, lr_decay_iters=4, **settings, **MTP)
    folder = tmp_path / "checkpoints"
    expected = run_ranks(1, curve, replace(whole, save=folder, save_interval=2))[0]
    stages = replace(whole, pipeline_model_parallel_size=2, load=folder, ckpt_step=2)
    found = run_ranks(2, curve, stages)[0]
    np.testing.assert_allclose(found, expected[2:], rtol=1e-10)
    assert all(3 < further < 8 for _, further in expected)
