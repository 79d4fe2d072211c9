"""What a node's constructor answers its ranks: where each finds its part of a step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from megatron_hdp.arrays import ByteArray
from megatron_hdp.data.media import Decoded
from megatron_hdp.data.mixture import Position
from megatron_hdp.data.steps import RankStep, Reader
from megatron_hdp.data_plane.records import from_plain, to_plain
from megatron_hdp.data_plane.roles import (
    Answer,
    ConstructingService,
    DecodingService,
    Loaded,
    RankItems,
    Wanted,
    WantedItems,
)
from megatron_hdp.data_plane.setup import SplitSetup
from megatron_hdp.data_plane.wire import ClientRecord, Message, SegmentFolder, pack

_SPARE_S = 15.0  # what planner and loaders may need beyond their time limit, to say why


class Others(Protocol):
    """How a constructor reaches planner and loaders; every call blocks, with a time limit."""

    num_takeovers: int
    longest_takeover_s: float

    def configure(self, setup: SplitSetup) -> None:
        """Tell the planner of a split."""

    def plan(self, split: str, position: Position, ranks: Sequence[int]) -> Answer:
        """Return the planner's answer."""

    def load(self, source: str, loaders: Sequence[str], wanted: Wanted) -> Loaded:
        """Return pieces of a source."""

    def decode(self, source: str, loaders: Sequence[str], wanted: WantedItems) -> list[Decoded]:
        """Return pictures of a source."""

    def go_on_without(self, split: str, source: str, why: str) -> None:
        """Tell the planner of a source that has failed."""


@dataclass(frozen=True)
class _Split:
    setup: SplitSetup
    service: ConstructingService[str]
    decoding: DecodingService[str]

    def close(self) -> None:
        self.service.close()
        self.decoding.close()


class NodeService:
    """Answers the requests of `data_plane.loaders.RayLoaders`; a `wire.Handler`.

    Requests are ``hello`` (setup and reader), ``get`` (a position) and ``decode`` (a position, and
    which of the step's pictures). What was decoded for a client lies there until its next such
    request, so a client maps it before.
    """

    def __init__(self, others: Others, segments: SegmentFolder, timeout_s: float) -> None:
        """Serve from an empty folder of segments.

        Args:
            others: planner and loaders.
            segments: where steps are laid out.
            timeout_s: within which planner and loaders answer, or say why they do not.
        """
        self._others = others
        self._segments = segments
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._splits: dict[str, _Split] = {}
        self._num_readers: dict[tuple[str, Reader], int] = {}
        self._numbers = itertools.count()
        self._answers: dict[str, Callable[[ClientRecord, Message], Message]] = {
            "hello": self._hello,
            "get": self._get,
            "decode": self._decode,
        }

    def __call__(self, client: ClientRecord, request: Message) -> Message:
        """Return the answer to a request.

        Raises:
            ValueError: an unknown request, or what planner or loader say of the data.
        """
        name = request.get("request")
        if name not in self._answers:
            raise ValueError(f"found the request {name!r}, expected {', '.join(self._answers)}")
        return self._answers[name](client, request)

    def gone(self, client: ClientRecord) -> None:
        """Make no more steps for a rank that has ended, unless another one reads the same."""
        facts = client.facts
        if not facts:
            return
        self._remove_items(client)
        with self._lock:
            self._num_readers[facts["split"], facts["reader"]] -= 1
            is_last = not self._num_readers[facts["split"], facts["reader"]]
        if is_last:
            self._splits[facts["split"]].service.remove(facts["reader"])

    def figures(self) -> dict[str, Any]:
        """Return what is known of this node, for `megatron-hdp data top`."""
        with self._lock:
            splits = dict(self._splits)
        return {
            "segment_bytes": self._segments.num_bytes,
            "takeovers": self._others.num_takeovers,
            "longest_takeover_s": self._others.longest_takeover_s,
            "splits": {
                name: {
                    **to_plain(one.service.figures),
                    "steps_ahead": one.service.num_ahead,
                    "readers": one.service.num_readers,
                }
                for name, one in splits.items()
            },
        }

    def close(self) -> None:
        """Drop all steps."""
        for one in self._splits.values():
            one.close()
        self._segments.close()

    def _hello(self, client: ClientRecord, request: Message) -> Message:
        setup = from_plain(SplitSetup, request["setup"])
        reader = from_plain(Reader, request["reader"])
        split = self._split(setup)
        self.gone(client)  # it may say hello twice
        with self._lock:
            key = setup.split, reader
            self._num_readers[key] = self._num_readers.get(key, 0) + 1
            client.facts = {"split": setup.split, "reader": reader, "pictures": []}
        split.service.add(reader)
        return {"segments": str(self._segments.path)}

    def _split(self, setup: SplitSetup) -> _Split:
        """What serves a split; a new setup of one, with another order of its data, replaces it."""
        with self._lock:
            found = self._splits.get(setup.split)
            if found is not None and found.setup == setup:
                return found
            self._others.configure(setup)
            names = [one.name for one in setup.spec.sources]
            decoding = DecodingService(
                names, self._others.decode, self._lay_out_items, self._segments.remove
            )
            service: ConstructingService[str] = ConstructingService(
                names,
                partial(self._others.plan, setup.split),
                self._others.load,
                self._lay_out,
                self._segments.remove,
                steps_ahead=setup.loaders.steps_ahead,
                may_fail=[one.name for one in setup.spec.sources if one.may_fail],
                tell_planner=partial(self._others.go_on_without, setup.split),
            )
            if found is not None:
                found.close()
            self._splits[setup.split] = made = _Split(setup, service, decoding)
            return made

    def _get(self, client: ClientRecord, request: Message) -> Message:
        split, asked = self._asked(client, request)
        segment = split.service.get(*asked)
        return {
            "segment": segment,
            "steps_ahead": split.service.num_ahead,
            "loaders": split.service.num_loaders,
        }

    def _decode(self, client: ClientRecord, request: Message) -> Message:
        split, asked = self._asked(client, request)
        wanted = from_plain(RankItems, request["wanted"])
        self._remove_items(client)
        found = split.decoding.get(wanted, split.service.crew(*asked))
        client.facts["pictures"] = [segment for segment, _ in found.blocks]
        return {
            "blocks": found.blocks,
            "damages": {str(i): why for i, why in found.damages.items()},
        }

    def _asked(
        self, client: ClientRecord, request: Message
    ) -> tuple[_Split, tuple[Position, Reader, float]]:
        if not client.facts:
            raise ValueError("found a request without a hello before it, expected one")
        split = self._splits[client.facts["split"]]
        position = Position.from_record(request["position"])
        limit_s = self._timeout_s * split.setup.making_waits + _SPARE_S
        return split, (position, client.facts["reader"], limit_s)

    def _remove_items(self, client: ClientRecord) -> None:
        for segment in client.facts["pictures"]:
            self._segments.remove(segment)
        client.facts["pictures"] = []

    def _lay_out(self, step: RankStep) -> str:
        packed = pack(step)
        name = f"step-{next(self._numbers)}"
        with self._segments.create(name, packed.num_bytes) as buffer:
            packed.write_into(buffer)
        return name

    def _lay_out_items(self, pictures: Sequence[ByteArray]) -> str:
        name, num_bytes = f"pictures-{next(self._numbers)}", sum(one.nbytes for one in pictures)
        with self._segments.create(name, num_bytes) as buffer:
            np.concatenate([one.ravel() for one in pictures], out=np.frombuffer(buffer, np.uint8))
        return name
