"""A rank's end of the data plane: it asks its node's constructor and maps what that laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from megatron_hdp.data.media import Decoded
from megatron_hdp.data.mixture import Position
from megatron_hdp.data.one_ahead import OneAhead
from megatron_hdp.data.order import SourceOrder
from megatron_hdp.data.steps import RankStep, Reader, WantedItem
from megatron_hdp.data_plane.node_files import log_of, mark_lost, why_lost
from megatron_hdp.data_plane.records import to_plain
from megatron_hdp.data_plane.roles import RankItems
from megatron_hdp.data_plane.setup import SplitSetup
from megatron_hdp.data_plane.wire import (
    DataPlaneLost,
    Message,
    NodeClient,
    SegmentFolder,
    unpack,
)

_SPARE_S = 30.0  # what the constructor may need beyond its own time limit, to say so
_TRIES = 3


class RayLoaders:
    """The `Loaders` of one rank, over one split, on a node that has a constructor.

    It holds a socket and maps one step at a time; Ray is not imported.
    """

    def __init__(self, socket: Path, setup: SplitSetup, reader: Reader) -> None:
        """Set whom to ask; the connection is made with the first question.

        Args:
            socket: of the node's constructor.
            setup: of the split, the same on every rank.
            reader: what this rank reads.
        """
        self._socket = socket
        self._setup = setup
        self._reader = reader
        self._is_interrupted = False
        self._client: NodeClient | None = None
        self._segments: SegmentFolder | None = None
        self._ahead = OneAhead(self._ask, Position.key)
        self.num_loaders: int | None = 0
        self.steps_ahead: int | None = 0

    def follow(self, orders: Mapping[str, SourceOrder]) -> None:
        """Draw from now on in these orders of the sources; before the first step."""
        assert self._client is None, "a step was asked for in another order"
        self._setup = replace(self._setup, orders=dict(orders))

    def expect(self, position: Position) -> None:
        """Ask for the step that begins at a position, in the background."""
        self._ahead.expect(position)

    @property
    def has_answered(self) -> bool:
        """Whether the step that is expected is there, or cannot come."""
        return self._ahead.is_ready

    def get(self, position: Position) -> RankStep:
        """Return the step that begins at a position.

        Raises:
            ValueError: nothing of the step carries loss, or the data cannot be read.
            DataPlaneLost: the data plane does not answer; its log stays.
        """
        with self._telling_loss():
            return self._ahead.get(position)

    @contextmanager
    def _telling_loss(self) -> Iterator[None]:
        try:
            yield
        except (DataPlaneLost, FileNotFoundError) as error:
            if self._is_interrupted:  # the plane may be well
                raise DataPlaneLost(str(error)) from error
            raise DataPlaneLost(f"{error}; {self._after(str(error))}") from error

    def _after(self, loss: str) -> str:
        """Keep the log of a plane that is lost, and say where it is, or which folder is gone."""
        folder = self._socket.parent
        with suppress(OSError):  # it is gone, or full
            mark_lost(folder, loss)
        steps = [] if self._segments is None else [self._segments.path]
        gone = [str(one) for one in (folder, *steps) if not one.exists()]
        if not gone:
            return f"its log is {log_of(folder)}"
        return (
            f"found that somebody has removed {' and '.join(gone)}, expected it until the job "
            "ends: keep what removes old files off it, and start the job again; it resumes from "
            "its checkpoint"
        )

    def statically(self, step: RankStep, failure: str) -> RankStep:
        """Never needed: one planner answers all ranks alike."""
        raise RuntimeError(f"the planner's answers differ between ranks: {failure}")

    def decode(self, position: Position, wanted: Sequence[WantedItem]) -> list[Decoded]:
        """Return pictures of the step that begins at a position, decoded by their loaders.

        Raises:
            ValueError: a file cannot be read.
            DataPlaneLost: the data plane does not answer; its log stays.
        """
        with self._telling_loss():
            return self._decode(position, wanted)

    def interrupt(self) -> None:
        """From any thread: who waits for a step here gets `DataPlaneLost`, now and later."""
        self._is_interrupted = True
        if self._client is not None:
            self._client.close()

    def close(self) -> None:
        """Hang up, and end the thread that asks."""
        self.interrupt()
        self._ahead.close()
        if self._segments is not None:
            self._segments.close()

    def _ask(self, position: Position) -> RankStep:
        request = {"request": "get", "position": position.to_record()}
        answer, (mapped,) = self._mapped(request, lambda answer: [answer["segment"]])
        self.num_loaders, self.steps_ahead = answer["loaders"], answer["steps_ahead"]
        return unpack(mapped)

    def _decode(self, position: Position, wanted: Sequence[WantedItem]) -> list[Decoded]:
        pictures = RankItems(
            sources=tuple(one.source for one in wanted),
            rows=tuple(one.row for one in wanted),
            places=tuple(one.place for one in wanted),
            num_bytes=tuple(one.item.num_bytes for one in wanted),
        )
        request = {"request": "decode", "position": position.to_record()}
        request["wanted"] = to_plain(pictures)
        answer, mapped = self._mapped(
            request, lambda answer: [segment for segment, _ in answer["blocks"]]
        )
        found: dict[int, Decoded] = {int(i): why for i, why in answer["damages"].items()}
        for buffer, (_, places) in zip(mapped, answer["blocks"], strict=True):
            at = 0
            for i in places:
                found[i] = np.frombuffer(buffer, np.uint8, pictures.num_bytes[i], at)
                at += pictures.num_bytes[i]
        return [found[i] for i in range(len(wanted))]

    def _mapped(
        self, request: Message, segments_of: Callable[[Message], Sequence[str]]
    ) -> tuple[Message, list[memoryview]]:
        """An answer, and the segments that it names."""
        client, timeout_s = self._connected()
        for tries_left in reversed(range(_TRIES)):
            answer = client.call(request, timeout_s)
            assert self._segments is not None
            try:
                names = segments_of(answer)
                return answer, [memoryview(self._segments.attach(name)) for name in names]
            except FileNotFoundError:  # dropped before it was mapped: the constructor makes it anew
                if not tries_left:
                    raise
        raise AssertionError("the last try has returned or raised")

    def _connected(self) -> tuple[NodeClient, float]:
        timeout_s = self._setup.loaders.timeout_s * self._setup.making_waits + _SPARE_S
        if self._client is None or self._segments is None:
            hello = {
                "request": "hello",
                "setup": to_plain(self._setup),
                "reader": to_plain(self._reader),
            }
            self._client = NodeClient(
                self._socket, hello=hello, why_lost=partial(why_lost, self._socket.parent)
            )
            if self._is_interrupted:  # by who has not seen it
                self._client.close()
            self._client.open(timeout_s)
            self._segments = SegmentFolder(Path(self._client.greeting["segments"]))
        return self._client, timeout_s
