"""Traces of jobs whose ranks come and go, taken apart."""

import json
from math import inf

from megatron_hdp.megatron.world import recovery
from megatron_hdp.runtime.timeline import ROWS_WAIT
from megatron_hdp.training.step_trace import JOB, LANES, process_of

WAY = [recovery.LEAVES, recovery.AGREES, recovery.LETS_GO, recovery.ENTERS, recovery.PREPARES]
_ROUNDED = 0.002  # microseconds


class EpochTrace:
    """The bars of a trace by member and lane."""

    def __init__(self, document):
        self.events = document["traceEvents"]
        self.bars = [one for one in self.events if one["ph"] == "X"]
        self.names = {
            one["tid"]: one["args"]["name"]
            for one in self.events
            if one["ph"] == "M" and one["name"] == "thread_name"
        }

    def lane(self, member, lane):
        """Bars in the order of their times."""
        return self._lane(process_of(member), LANES.index(lane))

    def steps(self):
        """The bars of steps."""
        return self._lane(JOB, 0)

    def epochs(self):
        """The bars of recoveries."""
        return self._lane(JOB, LANES.index("recovery"))

    def left(self, member):
        """What a member computed in no step that is drawn as a whole."""
        return [
            one
            for one in self.lane(member, "compute")
            if not any(s["ts"] <= one["ts"] <= s["ts"] + s["dur"] for s in self.steps())
        ]

    def _lane(self, process, number):
        found = [one for one in self.bars if one["pid"] == process and one["tid"] % 10 == number]
        return sorted(found, key=lambda one: one["ts"])


def read_trace(path):
    """The only file of its folder."""
    assert list(path.parent.iterdir()) == [path]
    return EpochTrace(json.loads(path.read_bytes()))


def require_whole(trace, stayed, steps, goes_back=False):
    """Raises unless members that stayed have all steps, and whole ways into epochs.

    A job that goes back to an older state runs steps again that it had written: both are there.
    """
    assert {one["tid"] for one in trace.bars} <= set(trace.names)
    numbers = [one["name"] for one in trace.steps()]
    again = len(numbers) - len(set(numbers))
    assert goes_back or not again, numbers
    for member in stayed:
        applied = trace.lane(member, "optimizer step")
        # one that began behind the end of an epoch has applied nothing
        most = steps + again + len(trace.epochs())
        assert steps <= len(applied) <= most, (member, applied)
        way = trace.lane(member, "recovery")
        assert [one["name"] for one in way] == WAY * len(trace.epochs())
        for i, one in enumerate(way):
            assert one["dur"] >= 0
            if i % len(WAY):
                assert abs(way[i - 1]["ts"] + way[i - 1]["dur"] - one["ts"]) < _ROUNDED
        for lane in ("compute", "optimizer step"):
            ends = -inf  # encoders begin before the first step does
            for one in trace.lane(member, lane):
                if one["name"].startswith(ROWS_WAIT):  # within a forward
                    continue
                assert one["ts"] > ends - _ROUNDED, f"{lane} of member {member} overlaps"
                ends = one["ts"] + one["dur"]
    for epoch in trace.epochs():
        begins, ends = epoch["ts"], epoch["ts"] + epoch["dur"]
        for one in trace.steps():
            assert one["ts"] > ends or one["ts"] + one["dur"] < begins, (one, epoch)
