"""Gathers of parameters: all ahead of a step, or layer by layer in it; evaluated, saved whole."""

from types import SimpleNamespace
from unittest import mock

import pytest
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_hdp.megatron.execution.param_gather import start_param_gather
from megatron_hdp.megatron.options.checks import check_parallel
from megatron_hdp.options import OptionError
from megatron_hdp.runtime.cuda.settings import CONNECTIONS
from megatron_hdp.training import loop
from tests.support.gradients import EXPERTS, write_corpus
from tests.training.runs import LENGTHS, run

GATHERED = {
    **{"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 1},
    **{"hdp_tokens_per_rank": 100, "global_batch_size": len(LENGTHS), "hdp_slice_multiple": 1},
}


class Group:
    def __init__(self, dispatched=False):
        self.param_gather_dispatched = dispatched
        self.param_gather_handle = mock.Mock()
        self.begun = []

    def start_param_sync(self):
        self.begun.append(self)


def ddp_model(groups, **changed):
    values = {
        "use_forward_hook": True,
        "remove_forward_pre_hook_handles": {"a module": "a handle"},
        "bucket_groups": groups[:2],
        "expert_parallel_bucket_groups": groups[2:],
        "config": SimpleNamespace(param_sync_func="Megatron's"),
        "ddp_config": SimpleNamespace(align_param_gather=None),
    }
    return SimpleNamespace(**values | changed)


@pytest.mark.parametrize(
    ("queues", "begins_together", "num_chunks", "in_forward"),
    [
        ("32", True, 1, False),
        ("1", True, 1, True),
        ("1", False, 1, False),  # a gather would wait for a ring that waits for it
        ("1", True, 2, False),  # the second chunk begins behind other micro-batches
    ],
)
def test_first_layers_come_first(monkeypatch, queues, begins_together, num_chunks, in_forward):
    monkeypatch.setenv(CONNECTIONS, queues)
    begun, chunks = [], []
    for chunk in range(num_chunks):
        groups = [Group() for _ in range(4)]
        for number, group in enumerate(groups):
            group.begun, group.start_param_sync = begun, lambda at=(chunk, number): begun.append(at)
        chunks.append(ddp_model(groups))
    start_param_gather(chunks, begins_together)
    order = [1, 3] if in_forward else [1, 0, 3, 2]  # DDP's buckets begin at the last layer
    assert begun == [(chunk, number) for chunk in range(num_chunks) for number in order]
    assert all(chunk.ddp_config.align_param_gather is not in_forward for chunk in chunks)
    assert chunks[0].config.param_sync_func is None


@pytest.mark.parametrize(
    ("changed", "started"),
    [
        ({}, [1, 0, 1]),  # an evaluation gathered the second
        ({"use_forward_hook": False}, [0, 0, 0]),
        ({"remove_forward_pre_hook_handles": {}}, [0, 0, 0]),
    ],
    ids=["overlap", "no-overlap", "parameters-are-whole"],
)
def test_what_is_whole_is_not_gathered(changed, started):
    groups = [Group(False), Group(True), Group(False)]
    start_param_gather([ddp_model(groups, **changed)], True)
    assert [len(group.begun) for group in groups] == started


def test_gloo_has_one_gather_under_way():
    groups, said = [Group() for _ in range(3)], []
    for number, group in enumerate(groups):
        group.start_param_sync = lambda at=number: said.append(("begins", at))
        group.param_gather_handle.wait = lambda at=number: said.append(("is over", at))
    start_param_gather([ddp_model(groups)], False)
    assert said == [(what, at) for at in (1, 0, 2) for what in ("begins", "is over")]


@pytest.mark.parametrize("lacking", ["use_distributed_optimizer", "overlap_grad_reduce"])
def test_what_the_flag_needs_is_asked_for(lacking):
    with pytest.raises(OptionError, match="--use-distributed-optimizer --overlap-grad-reduce"):
        check_parallel(run(None, **GATHERED | {"overlap_param_gather": True, lacking: False}))


def launches_of(runs):
    """Body of a rank: of each (queues, run) losses and saved sums, what begins in step 2."""
    found = []
    for queues, arguments in runs:
        begun, saved, step = [], [], loop._train_step
        start, forward = _ParamAndGradBucketGroup.start_param_sync, TransformerLayer.forward

        def gathering(group, force_sync=False, begun=begun, start=start):
            begun.append("whole" if force_sync else "gather")
            start(group, force_sync)

        def computing(layer, *args, begun=begun, forward=forward, **kwargs):
            begun.append("layer")
            return forward(layer, *args, **kwargs)

        def stepping(job, outputs, progress, begun=begun, saved=saved, step=step):
            begun.append(progress.iteration + 1)
            job.checkpoints.save = lambda _: saved.extend(
                one.detach().sum().item() for chunk in job.chunks for one in chunk.parameters()
            )
            return step(job, outputs, progress)

        with (
            mock.patch.dict("os.environ", {CONNECTIONS: queues}),
            mock.patch.object(_ParamAndGradBucketGroup, "start_param_sync", gathering),
            mock.patch.object(TransformerLayer, "forward", computing),
            mock.patch.object(loop, "_train_step", stepping),
        ):
            losses = [(one.loss, one.validation_loss) for one in loop.pretrain(arguments)]
        found.append(((losses, saved), begun[begun.index(2) : begun.index(3)]))
    return found


CASES = {  # ranks, settings
    "rings": (2, {"num_layers": 3}),
    "experts": (4, EXPERTS | {"expert_model_parallel_size": 2}),
    "tensor-parallel stages": (
        4,
        {
            **{"tensor_model_parallel_size": 2, "sequence_parallel": True},
            **{"pipeline_model_parallel_size": 2, "num_layers": 4},
        },
    ),
    "uneven virtual stages": (
        2,
        {
            **{"pipeline_model_parallel_size": 2, "num_layers": 6},
            "pipeline_model_parallel_layout": "E|tt|ttt|tL",
        },
    ),
}


@pytest.mark.parametrize(
    "case", [one if one == "rings" else pytest.param(one, marks=pytest.mark.slow) for one in CASES]
)
def test_losses_are_those_without_and_layers_run_beside_gathers(run_ranks, tmp_path, case):
    num_ranks, settings = CASES[case]
    settings = GATHERED | settings | {"split": "1,1,0", "eval_iters": 1, "eval_interval": 2}
    settings |= {"global_batch_size": 4}
    plain = run(write_corpus(tmp_path, LENGTHS), steps=3, **settings)
    overlapped = run(
        write_corpus(tmp_path, LENGTHS), steps=3, **settings | {"overlap_param_gather": True}
    )
    of_ranks = run_ranks(
        num_ranks, launches_of, [("32", plain), ("32", overlapped), ("1", overlapped)]
    )
    for (expected, _), (ahead, all_at_once), (inside, in_turn) in of_ranks:
        assert ahead == expected and inside == expected
        assert not gathers_beside_layers(all_at_once), "all come first"
        has_several = all_at_once.count("gather") > 1  # Megatron's later stages have one bucket
        assert has_several or case == "tensor-parallel stages"
        is_in_turn = has_several and case != "uneven virtual stages"
        assert gathers_beside_layers(in_turn) == is_in_turn


def gathers_beside_layers(begun):
    """Whether some begin behind a layer of the step, before its evaluation."""
    return "gather" in begun[begun.index("layer") : begun.index("whole")]


def test_the_comparison_sees_parameters_that_are_not_whole(run_ranks, tmp_path):
    settings = GATHERED | {"split": "1,1,0", "eval_iters": 1, "eval_interval": 2}
    settings |= {"global_batch_size": 4, "num_layers": 1}
    runs = [
        ("32", run(write_corpus(tmp_path, LENGTHS), steps=3, **settings, overlap_param_gather=one))
        for one in (False, True)
    ]
    ((expected, _), (found, _)), _ = run_ranks(2, launches_without, runs)
    assert [loss for loss, _ in found[0]] == [loss for loss, _ in expected[0]]
    assert found != expected and found[1] != expected[1]


def launches_without(runs):
    """Body of a rank: the same, where nobody waits for whole parameters."""
    with mock.patch.object(loop, "make_parameters_whole", lambda chunks: None):
        return launches_of(runs)
