"""Short runs that the tests here train, their flags, and bodies of ranks that run them."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.megatron import parallel
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import tiny_arguments, write_corpus
from tests.support.sources import data_file, mixed_arguments

LENGTHS = [30, 60, 20, 33, 21, 50, 100, 3]
SHARDED = {"use_distributed_optimizer": True}
BUCKETS = {"overlap_grad_reduce": True, "ddp_bucket_size": 1000}  # several, with padding between

TIMES = {
    *{"model_flops_per_second", "model_flops_per_second_per_rank"},
    *{"seconds", "tokens_per_second", "measured_efficiency", "makespan_s"},
    *{"idle_share_max", "idle_share_mean", "ring_wait_s", "pipeline_wait_s", "sync_s"},
    *{"planning_ms", "data_wait_ms", "loaders", "steps_ahead"},
}
"""What a file of metrics says of how long steps took: different in equal runs."""


def run(prefix, *, steps=6, **overrides):
    """Arguments of a run over sequences of at most 100 tokens, three in a step."""
    settings = {"seq_length": 100, "max_position_embeddings": 100, "global_batch_size": 3}
    settings |= {"train_iters": steps, "lr_decay_iters": steps, "lr": 1e-2, "log_interval": 1000}
    return tiny_arguments(prefix, **(settings | overrides))


def mixed_run(folder, path=None, *, steps=6, **overrides):
    """Arguments of a run over a file of --hdp-data, of three sources unless given."""
    settings = {"train_iters": steps, "lr_decay_iters": steps, "lr": 1e-2}
    settings |= {"global_batch_size": 4, "hdp_tokens_per_rank": 100}
    return mixed_arguments(folder, path or data_file(folder), **(settings | overrides))


def flags(folder, **changes):
    """A run over the folder's corpus as flags; `changes` by field, None to leave a flag out."""
    settings = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 100,
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "train_iters": 5,
        "lr": 1e-3,
        "split": "1,0,0",
        "data_path": Path(folder) / "corpus",
    }
    argv = ["--hybrid-data-parallel"]
    for name, value in (settings | changes).items():
        words = [f"--{name.replace('_', '-')}", str(value)]
        argv += [] if value is None else words[: 1 if value is True else 2]
    return argv


def long_flags(folder, **changes):
    """Flags of a run whose longest sequence needs all of three ranks, in each step."""
    settings = {"global_batch_size": len(LENGTHS), "hdp_tokens_per_rank": 40}
    settings |= {"hdp_slice_multiple": 1, "log_interval": 1, "stall_timeout_seconds": 300}
    return flags(folder, fp64=True, **(settings | changes))


@pytest.fixture
def folder(tmp_path):
    """A folder with a corpus."""
    write_corpus(tmp_path, LENGTHS)
    return tmp_path


def curve(arguments):
    """Body of a rank: (step, loss) of every step."""
    return [(metrics.step, metrics.loss) for metrics in pretrain(arguments)]


def trained(arguments):
    """Body of a rank: metrics of every step, and the log."""
    log = io.StringIO()
    with redirect_stdout(log):
        found = pretrain(arguments)
    return found, log.getvalue()


def refusals(runs):
    """Body of a rank: the message of each run's ValueError, None of a run that went."""
    messages = []
    for arguments in runs:
        try:
            pretrain(arguments)
            messages.append(None)
        except ValueError as error:
            messages.append(str(error))
            parallel.finish()
    return messages


def largest_difference(found, expected):
    """Largest relative difference of arrays of one shape."""
    found, expected = np.array(found), np.array(expected)
    assert found.shape == expected.shape
    return np.abs(found / expected - 1).max()


def lines_of(path):
    """Every line as it is."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(path):
    """Every line without times."""
    return [{k: v for k, v in one.items() if k not in TIMES} for one in lines_of(path)]
