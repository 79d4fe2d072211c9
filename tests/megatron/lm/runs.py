"""Runs of a Megatron-LM checkout for tests: what they are started with, and what they left."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_hdp.planner import CostModel
from tests.support.processes import run_python

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
SCRIPT = Path(CHECKOUT, "pretrain_gpt.py")

MARKS = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not CHECKOUT, reason="set MEGATRON_LM_PATH to a Megatron-LM checkout"),
    pytest.mark.timeout(900),
]

MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 256
--max-position-embeddings 256 --position-embedding-type rope --swiglu --normalization RMSNorm
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0"""
TRAINING = """--micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --min-lr 1e-4
--lr-decay-iters 10 --lr-decay-style cosine --clip-grad 1.0 --seed 7 --split 90,10,0
--tokenizer-type NullTokenizer --vocab-size 300 --log-interval 1 --eval-iters 1 --eval-interval 2
--save-interval 2 --num-workers 0 --log-throughput"""
ON_CPU = """--distributed-backend gloo --transformer-impl local --no-persist-layer-norm
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
--no-gradient-accumulation-fusion --use-cpu-initialization
--no-create-attention-mask-in-dataloader"""
HDP = ["--hybrid-data-parallel", "--hdp-tokens-per-rank"]
TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
TENSOR += ["--make-vocab-size-divisible-by", "64"]
SHARDED = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
OVERLAPPED = [*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"]
OVERLAPPED += ["--ddp-bucket-size", "5000"]
RECOMPUTED = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
RECOMPUTED += ["--recompute-num-layers", "1"]
IN_PARTS = ["--hdp-sequence-parts", "4"]
STAGES = ["--pipeline-model-parallel-size", "2"]
LENGTHS = np.clip(np.random.default_rng(0).lognormal(4, 1, 120), 8, 256).astype(int)


def planned(folder, name, ranks, extra, *, model=MODEL, script=SCRIPT, data=None, steps=4, **more):
    """A run for `drive`, by flags that all runs have and its own.

    Args:
        folder: where everything lies.
        name: of its log and its TensorBoard folder.
        ranks: how many.
        extra: flags after the common ones.
        model: the model's flags.
        script: what runs, under the plugin unless ``plugin=False``.
        data: flags that name the data; None: the corpus in `folder`.
        steps: to train.
        more: folders to ``save`` checkpoints into and to ``load`` them from; what the driver knows.
    """
    arguments = [*model.split(), *TRAINING.split(), *ON_CPU.split(), *extra]
    arguments += ["--train-iters", str(steps)]
    arguments += ["--data-path", str(folder / "corpus")] if data is None else data
    arguments += ["--tensorboard-dir", str(folder / f"tensorboard {name}")]
    for flag in ("save", "load"):
        arguments += [f"--{flag}", str(folder / more.pop(flag))] if flag in more else []
    run = {"name": name, "ranks": ranks, "plugin": True, "script": str(script)}
    return run | {"arguments": arguments, "log": str(folder / f"log {name}"), **more}


def own(folder, ranks, arguments):
    """A run of the project's own command for `drive`, with metrics in ``own.jsonl``."""
    arguments = [*arguments, "--metrics-path", str(folder / "own.jsonl")]
    log = str(folder / "log own")
    return {"name": "own", "ranks": ranks, "own": True, "arguments": arguments, "log": log}


def wanted(request, names):
    """What of `names` the selected tests of a module are about, by their parameter ``name``."""
    items = [item for item in request.session.items if item.module is request.module]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return [name for name in names if name in {found.get("name") for found in params}]


def drive(folder, plan, timeout_s=850):
    """Makes the runs one after the other, in one process that imports Megatron once."""
    (folder / "runs.json").write_text(json.dumps(plan))
    done = run_python(
        *("-m", "tests.megatron.lm.driver", CHECKOUT, str(folder / "runs.json")),
        timeout_s=timeout_s,
        OMP_NUM_THREADS="1",
        CUDA_DEVICE_MAX_CONNECTIONS="1",  # Megatron asks for it with tensor parallelism
        TORCHDYNAMO_DISABLE="1",
        # a stock script compiles its dataset helpers for the `python3` that it finds
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    )
    logs = {one["name"]: one["log"] for one in plan}
    tails = [f"{name}: {Path(log + '.0').read_text()[-3000:]}" for name, log in logs.items()]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr[-3000:], *tails])


def offloading(folder, num_layers):
    """Flags of a run that offloads, by a cost model in its folder."""
    cost = CostModel(
        a=1e-6, b=1e-3, kv_bytes_per_token=1, activation_bytes_per_token=1e3, num_layers=num_layers
    )
    (folder / "cost.json").write_bytes(cost.to_json())
    return ["--hdp-offload", "auto", "--hdp-cost-model", str(folder / "cost.json")]


def pictures(folder, steps, step):
    """Flags of a run that writes a trace of `steps` and the plan of `step`."""
    flags = ["--hdp-trace", str(folder / "trace"), "--hdp-trace-steps", steps]
    return [*flags, "--hdp-plot-plan", str(folder / "plan.png"), "--hdp-plot-step", step]


def require_rerun(folder):
    """The rerun machine ran the step of run ``nan`` again, and so did ``nan again``, resumed."""
    text = (folder / "log nan.0").read_text()
    true = [line for line in text.splitlines() if line.startswith("instead of ")]
    assert len(true) == 2 and true[0] == true[1]
    assert "unexpected result is reproducible within the tolerance (nan = nan)" in text
    again = (folder / "log nan again.0").read_text()
    assert true[0] in again and "Got rescheduled on the same GPU" in again


def scalars(folder, name):
    """TensorBoard's scalars of a run: tag -> {iteration: value}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / f"tensorboard {name}"))
    events.Reload()
    tags = events.Tags()["scalars"]
    # the first of a step: ranks here end at once, and what comes after training may be lost
    return {tag: {one.step: one.value for one in events.Scalars(tag)[::-1]} for tag in tags}


def weights(folder, name, iteration=4):
    """The tensors of a run's checkpoint, as they are on disk."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = folder / name / f"iter_{iteration:07d}"
    dcp_to_torch_save(str(path), str(folder / "whole.pt"))
    state = torch.load(folder / "whole.pt", weights_only=False)
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def require_same(found, expected, *, rel, steps=(1, 2, 3, 4)):
    """Losses and gradient norms of two runs, the second as long or longer; routers' losses too."""
    for tag in ("lm loss", "grad-norm"):
        assert sorted(found[tag]) == list(steps)
        for step, value in found[tag].items():
            assert value == pytest.approx(expected[tag][step], rel=rel), (tag, step)
    for tag in {"seq_load_balancing_loss", "z_loss"} & set(expected):  # as Megatron logs them
        assert found[tag] == pytest.approx(expected[tag], rel=1e-5), tag


def require_same_bits(folder, found, expected, iteration=4):
    """The tensors of two runs' checkpoints, which are some."""
    one, other = (weights(folder, name, iteration) for name in (found, expected))
    assert len(other) > 20 and one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def require_same_states(folder, found, expected, *, iteration, rel):
    """Weights and Adam's means of gradients in two runs' checkpoints, tensor by tensor."""
    found, expected = (weights(folder, name, iteration) for name in (found, expected))
    assert found.keys() == expected.keys()
    assert any("exp_avg." in name for name in expected)
    for name, value in expected.items():
        error = (found[name] - value).double().norm() / value.double().norm()
        assert error <= rel, (name, error)
