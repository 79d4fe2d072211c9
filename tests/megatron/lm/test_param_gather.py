"""Who starts to gather parameters, and when; test_training.py runs it on a real checkout."""

from types import SimpleNamespace

import pytest

from megatron_hdp.megatron.lm.param_gather import start_param_gather


class Group:
    def __init__(self, dispatched):
        self.param_gather_dispatched = dispatched
        self.num_started = 0

    def start_param_sync(self):
        self.num_started += 1


def model(groups, **changed):
    values = {
        "use_forward_hook": True,
        "remove_forward_pre_hook_handles": {"a module": "a handle"},
        "bucket_groups": groups[:2],
        "expert_parallel_bucket_groups": groups[2:],
        "config": SimpleNamespace(param_sync_func="Megatron's"),
        "ddp_config": SimpleNamespace(align_param_gather=False),
    }
    return SimpleNamespace(**values | changed)


def test_every_bucket_starts_once_those_of_experts_too():
    groups = [Group(False), Group(True), Group(False)]  # an evaluation gathered the second
    start_param_gather([model(groups)])
    assert [group.num_started for group in groups] == [1, 0, 1]


def test_all_chunks_start_here_and_nowhere_else():
    groups = [Group(False), Group(False)]
    chunks = [model([group]) for group in groups]
    start_param_gather(chunks)
    assert [group.num_started for group in groups] == [1, 1]
    assert chunks[0].config.param_sync_func is None  # the schedule's
    assert all(chunk.ddp_config.align_param_gather for chunk in chunks)  # the hooks'


@pytest.mark.parametrize(
    "changed",
    [{"use_forward_hook": False}, {"remove_forward_pre_hook_handles": {}}],
    ids=["no-overlap", "parameters-are-whole"],
)
def test_where_nobody_would_wait_for_it_nothing_starts(changed):
    groups = [Group(False)]
    start_param_gather([model(groups, **changed)])
    assert groups[0].num_started == 0
