"""A backend on a few tokens of one rank, forward and backward, against plain matrix products.

A package may load and still have no code for this GPU, or none for these shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.runtime.attention.backend import AttentionBackend, RunShapes
from megatron_hdp.runtime.kernels import MatmulKernel, PaddedKernel
from megatron_hdp.runtime.ring import RingAttention, RingComm, TokenLayout, Transfer

_LENGTHS = (48, 16)
_WINDOW = 5
_TOLERANCE = 2e-2  # bfloat16 keeps 8 bits
_Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def try_out(backend: AttentionBackend, shapes: RunShapes) -> None:
    """Tries whole sequences, with the run's heads; our own ring also with a window and with a sink.

    These two only where the run has them.

    Raises:
        RuntimeError: output or gradients differ; the message says by how much.
    """
    layout = TokenLayout((0,), 0, (), _LENGTHS, shapes.device)
    nobody: Any = None  # nothing is sent
    exact = _exact()
    inputs = shapes.inputs(sum(_LENGTHS))
    kinds: dict[str, dict[str, Any]] = {"": {}}
    if isinstance(backend, RingAttention):
        if shapes.windows:
            kinds[" in a window"] = {"window": _WINDOW}
            # slices of a ring of two, the other an echo: queries see keys before the first
            halo = TokenLayout((0, 1), 0, _LENGTHS, (), shapes.device)
            of_two = {"layout": halo, "comm": EchoComm(nobody)}
            kinds[" in a window, with a halo"] = {"window": _WINDOW, **of_two}
        if shapes.sink:
            kinds[" with a sink"] = {"sink": inputs[0][0, :, 0].detach()}
    for kind, how in kinds.items():
        how = {"layout": layout, "comm": nobody, "scale": shapes.head_dim**-0.5, **how}
        _compare(
            backend.name,
            f"{_LENGTHS} tokens{kind}",
            partial(backend, **how),
            [partial(exact, **how)],
            inputs,
        )


def try_out_ring(backend: AttentionBackend, comm: RingComm, shapes: RunShapes) -> None:
    """Tries a ring of two whose other member is an echo of this rank; nothing is sent.

    Place 0 then meets its own keys and values as the other member's, which is attention over
    sequences of the chunks (head, head, tail, tail), queries and losses in the first and the last.
    Its gradient of the other's tail chunk comes back as the other's of its own, which is none: a
    ring may add it or leave it out.

    Args:
        backend: it sends and receives by `comm` or a `ring.RingGroup` over it.
        comm: over two HDP ranks at least; only its list of ranks is used.
        shapes: the run's heads.

    Raises:
        RuntimeError: output or gradients differ; the message says by how much.
    """
    me = dist.get_rank(comm.group)
    layout = TokenLayout((me, 1 if me == 0 else 0), 0, _LENGTHS, (), shapes.device)
    whole = TokenLayout((me,), 0, (), tuple(2 * n for n in _LENGTHS), shapes.device)
    echo = EchoComm(comm.group)
    exact = _exact()
    scale = shapes.head_dim**-0.5

    def by_definition(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, adds_tail: bool
    ) -> torch.Tensor:
        queries = _whole(q, lambda head, tail: (head, 0 * head, 0 * tail, tail))
        keys, values = (
            _whole(x, lambda head, tail: (head, head, tail if adds_tail else tail.detach(), tail))
            for x in (k, v)
        )
        out = exact(queries, keys, values, whole, echo, scale)
        quarters = out.split([n // 2 for n in _LENGTHS for _ in range(4)])
        return torch.cat([one for i, one in enumerate(quarters) if i % 4 in (0, 3)])

    _compare(
        backend.name,
        f"a ring of two, {_LENGTHS} tokens",
        lambda q, k, v: backend(q, k, v, layout, echo, scale),
        [partial(by_definition, adds_tail=adds_tail) for adds_tail in (False, True)],
        shapes.inputs(sum(_LENGTHS)),
    )


def _whole(
    x: torch.Tensor,
    quarters: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
) -> torch.Tensor:
    """Whole sequences, each made of its slice's head and tail chunk."""
    chunks = x.split([n // 2 for n in _LENGTHS for _ in range(2)])
    pairs = zip(chunks[::2], chunks[1::2], strict=True)
    return torch.cat([quarter for head, tail in pairs for quarter in quarters(head, tail)])


class EchoComm(RingComm):
    """Whatever is sent comes back as what the previous member sent."""

    def trade(
        self,
        sent: torch.Tensor,
        to: Sequence[tuple[int, int]],
        received: torch.Tensor,
        of: Sequence[tuple[int, int]],
    ) -> Transfer:
        """See `RingComm.trade`; a copy on the current stream."""
        received.copy_(sent)
        works: list[Any] = []
        if received.is_cuda:  # whatever stream waits for it comes after the copy
            works.append(torch.cuda.current_stream().record_event())
        return Transfer(self, works, sent, received)


def _exact() -> RingAttention:
    return RingAttention(PaddedKernel(MatmulKernel()))


def _compare(
    name: str, trial: str, found: _Attend, expected: Sequence[_Attend], inputs: list[torch.Tensor]
) -> None:
    """What is found must be one of what is expected."""
    *qkv, dout = inputs

    def results_of(attend: _Attend) -> list[torch.Tensor]:
        out = attend(*qkv)
        return [out.detach(), *torch.autograd.grad(out, qkv, dout)]

    wanted = zip(*map(results_of, expected), strict=True)
    for what, result, right in zip(
        ("out", "dq", "dk", "dv"), results_of(found), wanted, strict=True
    ):
        error = min(float((result - one).float().norm() / one.float().norm()) for one in right)
        if not error <= _TOLERANCE:
            raise RuntimeError(
                f"{name} computes {what} with relative error {error:.1g} on a trial of {trial}, "
                f"expected at most {_TOLERANCE}"
            )
