"""Who is to blame, from what each rank last said; the same cases without a culprit blame nobody."""

from dataclasses import replace

from megatron_hdp.runtime.health.diagnosis import Heard, Status, missing_ranks, stalled_ranks

WAITS = Status(
    host="a",
    step=12,
    activity="ring wait of micro-batch 3",
    call="wait, comm.py:50",
    waits=True,
    still_s=41.4,
    beat=7,
)
COMPUTES = replace(WAITS, host="b", activity="forward of micro-batch 3", waits=False)


def heard(*statuses, silent_s=0.0):
    return [Heard(status, silent_s) for status in statuses]


def test_what_the_device_does_is_told_and_survives_the_store():
    status = replace(COMPUTES, device="ring wait of micro-batch 2", device_age_s=2.0)
    assert Status.from_json(status.to_json().encode()) == status
    assert status.doing() == (
        "in forward of micro-batch 3 of step 12 (wait, comm.py:50; its device in ring wait of "
        "micro-batch 2, as 2 s ago)"
    )


def test_silent_ranks_are_missing():
    ranks = [*heard(WAITS, COMPUTES), Heard(COMPUTES, 5.0), Heard(None, 5.0)]
    assert missing_ranks(ranks, 3.0) == (
        "rank 2 (host b) died or was stopped: no sign of life for 5 s, last in forward of "
        "micro-batch 3 of step 12 (wait, comm.py:50); rank 3 never gave a sign of life"
    )
    assert missing_ranks(ranks, 6.0) is None
    ranks = heard(WAITS, replace(WAITS, left=True))
    assert missing_ranks(ranks, 3.0).startswith("rank 1 (host a) has left the job")
    text = missing_ranks(heard(*[WAITS] * 20, silent_s=9.0), 3.0)
    assert text.count("rank ") == 8 and text.endswith("; and 12 more")


def test_the_rank_that_does_not_wait_has_stalled():
    ranks = heard(WAITS, replace(WAITS, still_s=0.1), COMPUTES)
    assert stalled_ranks(ranks, 41.0) == (
        "stalled while 2 of 3 ranks wait: rank 2 (host b) in forward of micro-batch 3 of step 12 "
        "(wait, comm.py:50) for 41 s"
    )


def test_a_rank_that_gets_on_has_not_stalled():
    ranks = heard(WAITS, WAITS, replace(COMPUTES, still_s=2.0))
    assert stalled_ranks(ranks, 41.0) is None
    assert stalled_ranks(ranks, 1.0) is not None


def test_ranks_that_wait_for_each_other():
    text = stalled_ranks(heard(WAITS, replace(WAITS, host="c")), 41.0)
    assert text.startswith("all ranks wait for each other: rank 0 (host a) in ring wait")
    assert "rank 1 (host c)" in text
    passing_by = heard(WAITS, replace(WAITS, still_s=0.1))
    assert stalled_ranks(passing_by, 41.0) is None, "the other one began to wait just now"
    assert stalled_ranks(passing_by, 0.0) is not None
