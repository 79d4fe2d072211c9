"""Every wait of a step's host for its GPU is on a list: one that is added fails here."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import megatron_hdp
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import EXPERTS, write_corpus
from tests.support.host_waits import counted, waits_of_step
from tests.training.runs import LENGTHS, run

PACKAGE = Path(megatron_hdp.__file__).parent
OURS = {  # how often in a step of any number of micro-batches, and why
    "runtime/gathering.py largest: tolist": (3, "planner failed, document corrupt, signal came"),
    "runtime/health/agreement.py require_agreement: equal": (1, "before ranks communicate"),
    "megatron/execution/executor.py run: event": (
        3,
        "before it, its begin, its end",
    ),
    "megatron/execution/model_pass.py read_losses: tolist": (1, "for the log, by source"),
    "megatron/step/figures.py over_all_ranks: tolist": (2, "tokens that MTP predicts; the report"),
    "megatron/step/learning.py exchanged: cpu": (1, "what ranks took, for the next plans"),
    "megatron/step/learning.py exchanged: numpy": (1, "of memory of the host"),
    "megatron/finite.py non_finite: _local_scalar_dense": (1, "before the optimizer sees NaN"),
    "training/loop.py apply_step: event": (1, "the optimizer's step is timed"),
    # with tensor parallelism
    "runtime/gathering.py share_arrays: numpy": (1, "of memory of the host"),
}
CORE = "megatron/core/"
MEGATRONS = {  # in a step without HDP, too
    "models/common/embeddings/rotary_pos_embedding.py get_emb: pageable to": "on a CPU only",
    "optimizer/clip_grads.py get_grad_norm_fp32: _local_scalar_dense": "clips by it",
    "optimizer/optimizer.py step_with_ready_grads: _local_scalar_dense": "Adam's step, on the host",
    "tensor_parallel/random.py fork: _local_scalar_dense": "state of the host's generator",
    "transformer/moe/experts.py forward: tolist": "sizes of experts' products",
    "transformer/moe/moe_utils.py permute: masked_select": "sizes, unless fused",
    "transformer/moe/moe_utils.py sort_chunks_by_idxs: tolist": "sizes, unless fused",
    "transformer/moe/router.py gating: pageable to": "on a CPU only",
    "transformer/moe/token_dispatcher.py combine_preprocess: tolist": "counts to exchange",
    "transformer/moe/token_dispatcher.py dispatch_postprocess: tolist": "counts to exchange",
    "utils.py local_multi_tensor_l2_norm: _local_scalar_dense": "without TransformerEngine",
    "utils.py local_multi_tensor_l2_norm: pageable tensor": "without TransformerEngine",
}
LAYOUTS = {  # ranks, settings, which of ours there are
    "rings": (2, {"hdp_online": True, "num_layers": 1}, set(list(OURS)[:-1])),
    "tensor-parallel ranks of two stages": (
        4,
        {
            **{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            **{"sequence_parallel": True, "hdp_tokens_per_rank": 128},
        },
        {one for one in OURS if "learning" not in one},
    ),
}


def waits(arguments):
    """Body of a rank."""
    return waits_of_step(pretrain, arguments, 2)


@pytest.mark.parametrize(
    "layout", ["rings", pytest.param(list(LAYOUTS)[1], marks=pytest.mark.slow)]
)
def test_a_step_waits_as_listed(run_ranks, tmp_path, layout):
    num_ranks, settings, expected = LAYOUTS[layout]
    settings |= EXPERTS | {"mtp_num_layers": 1, "fp64": False, "bf16": True}
    settings |= {"use_distributed_optimizer": True, "global_batch_size": len(LENGTHS)}
    arguments = run(write_corpus(tmp_path, LENGTHS), steps=3, **settings)
    for found in run_ranks(num_ranks, waits, arguments):
        ours = {name: times for name, times in found.items() if not name.startswith(CORE)}
        assert ours == {name: OURS[name][0] for name in expected}
        assert found.keys() - ours.keys() <= {f"{CORE}{name}" for name in MEGATRONS}


PLANTED = {
    "x.sum().item()": "_local_scalar_dense",
    "bool(x[0])": "_local_scalar_dense",
    "[0, 1][x.argmax()]": "_local_scalar_dense",
    "x.tolist()": "tolist",
    "x.numpy()": "numpy",
    "np.asarray(x)": "__array__",
    "torch.equal(x, x)": "equal",
    "x.allclose(x)": "allclose",
    "x[x > 1]": "index by a mask",
    "torch.nonzero(x)": "nonzero",
    "torch.where(x > 1)": "nonzero",
    "x.unique()": "_unique2",
    "x.repeat_interleave(x.long())": "repeat_interleave",
    "x.long().bincount()": "bincount",
    "x.cpu()": "cpu",
    "x.to(device)": "pageable to",
    "x.to('cpu', torch.float64)": "pageable to",
    "torch.tensor([1], device=device)": "pageable tensor",
    "torch.as_tensor([1], device=device)": "pageable as_tensor",
    "x.new_tensor([1])": "pageable new_tensor",
}


@pytest.mark.parametrize("call", PLANTED)
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_planted_wait_is_counted_with_its_caller(call, in_backward):
    made = {"torch": torch, "np": __import__("numpy"), "device": torch.device("cpu")}
    exec(compile(f"def planted(x):\n {call}", f"{PACKAGE}/runtime/planted.py", "exec"), made)
    found, x = Counter(), torch.ones(2, requires_grad=in_backward)
    if in_backward:
        x.register_hook(made["planted"])
    with counted(found):
        x.sum().backward() if in_backward else made["planted"](x)
    place = f"runtime/planted.py planted: {PLANTED[call]}"
    assert found[place] == 1


@pytest.mark.parametrize(
    "call",
    [
        *("x[x > 1] = 0", "x.to(device, non_blocking=True)", "x.to(torch.float64)", "x[[0]]"),
        *("torch.tensor([1])", "torch.zeros(2, device=device)", "x.masked_fill(x > 1, 0)"),
    ],
)
def test_what_does_not_wait_is_not_counted(call):
    found = Counter()
    with counted(found):
        exec(call, {"torch": torch, "x": torch.ones(2), "device": torch.device("cpu")})
    assert not found


def test_the_device_is_waited_for_in_few_places():
    """By name: a CPU does not run what is for a GPU alone."""
    found = Counter()
    for path in PACKAGE.rglob("*.py"):
        calls = len(re.findall(r"\w\.synchronize\(", path.read_text()))
        found[str(path.relative_to(PACKAGE))] += calls
    beside = {"megatron/optimizer/pieces.py": 1}  # the thread that copies shards
    beside |= {"runtime/epochs/nccl.py": 1}  # when a rank leaves an epoch, between steps
    beside |= {"profile/items.py": 1}  # between calls of an encoder that are timed
    assert +found == {"runtime/clocks.py": 3} | beside
