"""Who is in which epoch: whole HDP ranks, each decision once, enough of them or a pause."""

import json
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_hdp.launching.coordinator import (
    LEAVE_S,
    READY_S,
    TOGETHER_S,
    Coordinator,
    by_rank,
    replicas_of,
)
from megatron_hdp.launching.node_ranks import Ended
from megatron_hdp.runtime.epochs import Epoch, Terms, keys

KILLED = -9


class Job:
    """A coordinator, a store, and a clock that stands."""

    def __init__(self, num_ranks, **terms):
        self.store, self.said, self.now = dist.HashStore(), [], 0.0
        self.store.set_timeout(timedelta(seconds=5))  # what is not there now never comes
        self.coordinator = Coordinator(
            self.store, range(num_ranks), self.said.append, lambda: self.now
        )
        known = {"least": 1, "replica": 1, "stages": 1, "pause_s": 10.0} | terms
        self.store.set(keys.TERMS, Terms(**known).to_json())
        assert self.coordinator.begin()

    def dies(self, member, code=KILLED):
        mates = self.coordinator.note(Ended(member, code))
        self.coordinator.look()
        return mates

    def epoch(self, number):
        return Epoch.from_json(self.store.get(keys.members(number)))

    def news(self, epoch):
        """What all members of an epoch were told."""
        told = {one: [] for one in self.epoch(epoch).members}
        for one, found in told.items():
            while self.store.check([keys.news(epoch, one, len(found))]):
                found.append(self.store.get(keys.news(epoch, one, len(found))))
        first, *others = told.values()
        assert all(found == first for found in others)
        return first

    def get_ready(self, *members):
        for one in members:
            self.store.set(keys.ready(one), b"1")

    def all_leave(self, epoch):
        for one in self.epoch(epoch).members:
            self.store.set(keys.vote(epoch, one), json.dumps({}))


@pytest.mark.parametrize(("replica", "stages"), [(1, 1), (2, 1), (2, 2), (4, 2), (3, 3)])
def test_replicas_are_numbered_as_megatron_does(replica, stages):
    members = tuple(range(100, 100 + 3 * replica))
    replicas = replicas_of(members, replica, stages)
    assert by_rank(replicas, stages) == members
    if (replica, stages) == (2, 2):
        assert replicas == [(100, 103), (101, 104), (102, 105)]


def test_a_death_ends_the_epoch_and_survivors_close_the_gap():
    job = Job(4)
    job.dies(1)
    assert job.news(0) == [keys.OVER] and job.store.check([keys.over(0)])
    assert job.epoch(1).members == (0, 2, 3) and "SIGKILL" in job.epoch(1).why
    job.dies(0)  # while they recover
    assert job.news(1) == [keys.OVER]
    assert job.epoch(2).members == (2, 3)


def test_hdp_ranks_that_share_experts_leave_as_one_and_count_as_many():
    job = Job(6, replica=2, hdp_ranks=2, least=4)
    job.dies(3)
    assert job.epoch(1).members == (0, 1, 4, 5) and "4 HDP ranks" in job.said[-1]
    job.dies(0)
    assert job.coordinator.epoch.number == 1 and "a step needs 4" in job.said[-1]
    assert not job.coordinator.is_lost()
    job.dies(4)
    assert job.coordinator.is_lost()


def test_a_slow_rank_leaves_once_a_spare_is_ready():
    job = Job(3)
    job.coordinator.joins((3,))
    job.coordinator.look()
    job.store.set(keys.slow(0), json.dumps({1: 0.25}))
    job.coordinator.look()
    assert job.news(0) == []
    job.get_ready(3)
    job.coordinator.look()
    assert job.news(0) == [keys.JOIN] and job.coordinator.retired == {1}
    job.all_leave(0)
    job.coordinator.look()
    assert job.epoch(1).members == (0, 2, 3) and "0.25" in job.epoch(1).why


def test_no_more_spares_come_in_than_there_are_places():
    job = Job(3)
    for spare in (3, 4):
        job.coordinator.joins((spare,))
        job.get_ready(spare)
    job.store.set(keys.slow(0), json.dumps({1: 0.25}))
    job.coordinator.look()
    job.all_leave(0)
    job.coordinator.look()
    assert job.epoch(1).members == (0, 2, 3)


def test_a_spare_waits_until_a_place_is_free():
    job = Job(3)
    job.coordinator.joins((3,))
    job.get_ready(3)
    job.coordinator.look()
    assert job.news(0) == []
    job.dies(0)
    assert job.epoch(1).members == (1, 2)
    job.coordinator.look()
    assert job.news(1) == [keys.JOIN]
    job.all_leave(1)
    job.coordinator.look()
    assert job.epoch(2).members == (1, 2, 3)


def test_a_replica_leaves_as_a_whole():
    job = Job(6, replica=2, stages=2)
    job.dies(4)  # the second stage of HDP rank 1
    assert job.epoch(1).members == (0, 2, 3, 5)
    job.dies(1, code=3)  # its mate, which nobody has named
    assert not job.store.check([keys.members(2)])


def test_joiners_come_in_when_all_have_left_and_last():
    job = Job(3)
    job.dies(0)
    job.coordinator.joins((3,))
    job.coordinator.look()
    assert job.news(1) == []
    job.get_ready(3)
    job.coordinator.look()
    job.coordinator.look()
    assert job.news(1) == [keys.JOIN] and not job.store.check([keys.members(2)])
    job.all_leave(1)
    job.coordinator.look()
    assert job.epoch(2).members == (1, 2, 3)
    assert job.store.get(keys.admitted(3)) == b"2"


def test_a_death_before_a_join_goes_first():
    job = Job(4)
    job.dies(3)
    job.coordinator.joins((4,))
    job.get_ready(4)
    job.coordinator.look()
    job.dies(2)
    assert job.news(1) == [keys.JOIN, keys.OVER]
    assert job.epoch(2).members == (0, 1)
    job.coordinator.look()
    assert job.news(2) == [keys.JOIN]


def test_who_does_not_leave_is_given_up():
    job = Job(3)
    job.dies(0)
    job.store.set(keys.vote(0, 1), json.dumps({}))
    assert job.coordinator.late() == []
    job.now = LEAVE_S + 1
    assert job.coordinator.late() == [2]
    assert job.coordinator.late() == []


def test_too_few_wait_for_joiners_up_to_a_time():
    job = Job(2, least=2)
    job.dies(1)
    assert job.news(0) == [keys.OVER] and not job.store.check([keys.members(1)])
    job.now = 9.0
    job.coordinator.look()
    assert not job.store.check([keys.members(1)])
    job.now = 11.0
    job.coordinator.look()
    assert job.epoch(1).is_last and job.epoch(1).members == (0,)


def test_too_few_wait_for_nobody_in_a_job_that_is_asked_to_end():
    job = Job(2, least=2)
    job.dies(1)
    job.coordinator.waits = False
    job.coordinator.look()
    assert job.epoch(1).is_last and job.epoch(1).members == (0,)
    assert "asked to end, with 1 HDP ranks of 2" in job.epoch(1).why


def test_too_few_continue_with_who_is_ready():
    job = Job(2, least=2)
    job.coordinator.joins((2,))
    job.dies(0)
    job.get_ready(2)
    job.coordinator.look()
    assert job.epoch(1).members == (1, 2) and not job.epoch(1).is_last


def test_who_is_ready_waits_a_while_for_others():
    job = Job(4)
    for member in (0, 1):
        job.dies(member)
        job.coordinator.joins((member + 4,))
    job.get_ready(4)
    job.coordinator.look()
    assert job.news(2) == []
    job.now = TOGETHER_S + 1
    job.coordinator.look()
    assert job.news(2) == [keys.JOIN]
    job.get_ready(5)
    job.all_leave(2)
    job.coordinator.look()
    assert job.epoch(3).members == (2, 3, 4, 5)


def test_who_is_never_ready_is_given_up():
    job = Job(2)
    job.coordinator.joins((2,))
    job.now = READY_S + 1
    assert job.coordinator.late() == [2]
    job.dies(2)
    assert job.coordinator.late() == []


def test_some_leave_behind_the_step_and_others_join():
    job = Job(4, least=2)
    job.coordinator.joins((4,))
    assert not job.coordinator.leave((1, 2, 3), "node 1 leaves")
    assert job.coordinator.leave((2, 3), "node 1 leaves")
    job.coordinator.look()
    assert job.news(0) == [keys.JOIN]
    job.get_ready(4)
    job.all_leave(0)
    job.coordinator.look()
    assert job.epoch(1).members == (0, 1, 4)
    assert job.epoch(1).why == "1 HDP ranks join, node 1 leaves"
    job.dies(2, code=3)  # which has read it
    assert not job.store.check([keys.members(2)])


def test_who_leaves_does_so_behind_a_death_too():
    job = Job(4)
    job.coordinator.leave((3,), "node 1 leaves")
    job.dies(1)
    assert job.epoch(1).members == (0, 2, 3)
    job.coordinator.look()
    job.all_leave(1)
    job.coordinator.look()
    assert job.epoch(2).members == (0, 2)


def test_a_death_when_others_have_ended_holds_nobody_up():
    job = Job(2)
    job.dies(0, code=0)
    job.dies(1)
    assert job.coordinator.is_done()


def test_joiners_that_die_take_their_mates():
    job = Job(4, replica=2)
    job.coordinator.joins((4, 5))
    assert job.dies(5) == [4]
    assert job.coordinator.num_coming == 2


def test_all_are_let_go_when_the_job_ends_but_those_that_save():
    job = Job(3)
    job.coordinator.dismiss("member 0 ended with exit code 2")
    assert job.epoch(1) == Epoch(1, (), "member 0 ended with exit code 2", is_last=True)
    assert job.news(0) == [keys.OVER] and job.coordinator.epoch.members == (0, 1, 2)
    few = Job(2, least=2, pause_s=0.0)
    few.dies(0)
    few.now = 1.0
    few.coordinator.look()
    assert few.coordinator.epoch.is_last
    few.coordinator.dismiss("member 1 ended with exit code 3")
    assert not few.store.check([keys.members(2)]) and few.news(1) == []


def test_ranks_that_have_ended_well_are_done():
    job = Job(2)
    job.dies(0, code=0)
    assert not job.coordinator.is_done()
    job.dies(1, code=0)
    assert job.coordinator.is_done() and not job.store.check([keys.members(1)])
