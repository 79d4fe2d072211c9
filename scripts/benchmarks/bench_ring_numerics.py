"""What a ring's merges cost in precision: sums kept in bfloat16 against sums kept in float32.

Prints a Markdown table of relative errors against float64 by the ring's degree: of the whole
sequence, and of the member's slice where it is largest. All members are emulated together on the
CPU, with the blocks of `runtime.ring.attention`; kernels take and give bfloat16, and multiply
probabilities and their gradients in bfloat16. Two rings are compared: TransformerEngine's (packed
sequences, point to point), which keeps output, dQ, dK and dV in bfloat16 and rounds them at every
hop, and ours, which keeps them in float32 and rounds once.

    python bench_ring_numerics.py [--degrees 2 8 64] [--head-dims 64 128] [--tokens 32]
"""

import argparse
from dataclasses import dataclass

import torch

HEADS = 2
PARTS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Rounding:
    """How a ring keeps what it adds up."""

    kernel: torch.dtype
    """What kernels take and give."""
    sums: torch.dtype
    """Output and gradients between hops."""
    own_last: bool = False
    """Backward ends with the block of own keys, as TransformerEngine's; ours begins with it."""

    @property
    def arithmetic(self) -> torch.dtype:
        """In which products are added up."""
        return torch.promote_types(self.kernel, torch.float32)


EXACT = Rounding(torch.float64, torch.float64)
TRANSFORMER_ENGINE = Rounding(torch.bfloat16, torch.bfloat16, own_last=True)
OURS = Rounding(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Ring:
    """The slices of one sequence on all members: ``[members, heads, tokens of a slice, d]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def random(cls, degree: int, tokens: int, head_dim: int, seed: int = 0) -> "Ring":
        """Normal values that bfloat16 holds; `tokens` is those of a slice."""
        random = torch.Generator().manual_seed(seed)
        shape = (4, degree, HEADS, tokens, head_dim)
        return cls(*torch.randn(shape, generator=random).bfloat16().double())

    @property
    def degree(self) -> int:
        """Members."""
        return self.q.shape[0]


def attend(ring: Ring, rounding: Rounding) -> dict[str, torch.Tensor]:
    """Output and gradients of every slice, forward and backward around the ring, in float64."""
    q, k, v, dout = (x.to(rounding.arithmetic) for x in (ring.q, ring.k, ring.v, ring.dout))
    out = torch.zeros_like(q).to(rounding.sums)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=rounding.arithmetic)
    for step in range(ring.degree):
        for block in _blocks(ring, step):
            scores = _scores(q, k, block)
            block_lse = scores.logsumexp(-1)
            largest = scores.amax(-1, keepdim=True)
            products = _rounded((scores - largest).exp(), rounding) @ block.of_keys(v)
            block_out = _rounded(products / (block_lse[..., None] - largest).exp(), rounding)
            before = block.of_queries(lse)
            after = torch.logaddexp(before, block_lse)
            kept = block.of_queries(out).to(rounding.arithmetic) * (before - after).exp()[..., None]
            merged = kept + block_out * (block_lse - after).exp()[..., None]
            block.set_queries(out, merged)
            block.set_queries(lse, after)
    out = _rounded(out.to(rounding.arithmetic), rounding)
    delta = (dout * out).sum(-1)
    dq, dk, dv = (torch.zeros_like(out).to(rounding.sums) for _ in range(3))
    steps = range(ring.degree)
    for step in reversed(steps) if rounding.own_last else steps:
        for block in _blocks(ring, step):
            p = (_scores(q, k, block) - block.of_queries(lse)[..., None]).exp()
            dp = block.of_queries(dout) @ block.of_keys(v).mT
            ds = p * (dp - block.of_queries(delta)[..., None]) * _scale(ring)
            p, ds = _rounded(p, rounding), _rounded(ds, rounding)
            block.add_to_queries(dq, _rounded(ds @ block.of_keys(k), rounding))
            block.add_to_keys(dk, _rounded(ds.mT @ block.of_queries(q), rounding))
            block.add_to_keys(dv, _rounded(p.mT @ block.of_queries(dout), rounding))
    parts = (out, dq, dk, dv)
    return {name: _rounded(x, rounding).double() for name, x in zip(PARTS, parts, strict=True)}


def errors(
    ring: Ring, rounding: Rounding, exact: dict[str, torch.Tensor]
) -> dict[str, tuple[float, float]]:
    """Relative errors of output and gradients: of the whole sequence, and of the worst slice."""
    found = attend(ring, rounding)
    result = {}
    for part in PARTS:
        norms, off = (x.flatten(1).norm(dim=1) for x in (exact[part], found[part] - exact[part]))
        result[part] = float(off.norm() / norms.norm()), float((off / norms).max())
    return result


@dataclass(frozen=True)
class _Block:
    """Some members' queries with the keys that they hold at a step: slices of rows of both."""

    members: torch.Tensor
    owners: torch.Tensor
    """Of the keys that these members hold."""
    queries: slice
    keys: slice
    is_causal: bool = False

    def of_queries(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.members][:, :, self.queries]

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.owners][:, :, self.keys]

    def set_queries(self, total: torch.Tensor, values: torch.Tensor) -> None:
        total[self.members, :, self.queries] = values.to(total.dtype)

    def add_to_queries(self, total: torch.Tensor, values: torch.Tensor) -> None:
        total[self.members, :, self.queries] += values.to(total.dtype)

    def add_to_keys(self, total: torch.Tensor, values: torch.Tensor) -> None:
        total[self.owners, :, self.keys] += values.to(total.dtype)


def _blocks(ring: Ring, step: int) -> list[_Block]:
    """At a step a member holds the keys of the one `step` places before it, as in our ring."""
    tokens, everyone = ring.q.shape[2], torch.arange(ring.degree)
    owners, whole = (everyone - step) % ring.degree, slice(None)
    if step == 0:
        return [_Block(everyone, everyone, whole, whole, is_causal=True)]
    earlier, later = everyone[step:], everyone[:step]
    head, tail = slice(0, tokens // 2), slice(tokens // 2, None)
    return [
        _Block(earlier, owners[step:], whole, head),
        _Block(later, owners[:step], tail, whole),
    ]


def _scale(ring: Ring) -> float:
    return float(ring.q.shape[-1] ** -0.5)


def _scores(q: torch.Tensor, k: torch.Tensor, block: _Block) -> torch.Tensor:
    scores = block.of_queries(q) @ block.of_keys(k).mT * q.shape[-1] ** -0.5
    if block.is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def _rounded(x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """As a kernel takes or gives it."""
    return x.to(rounding.kernel).to(rounding.arithmetic)


def main(argv: list[str] | None = None) -> None:
    """Emulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--tokens", type=int, default=32, help="of a slice; an even number")
    options = parser.parse_args(argv)
    print("| head dimension | degree | sums in |" + "".join(f" {part} |" for part in PARTS))
    print("|---|---|---|" + "---|" * len(PARTS))
    for head_dim in options.head_dims:
        for degree in options.degrees:
            ring = Ring.random(degree, options.tokens, head_dim)
            exact = attend(ring, EXACT)
            for name, rounding in (("bfloat16", TRANSFORMER_ENGINE), ("float32", OURS)):
                found = errors(ring, rounding, exact)
                cells = (
                    f"{100 * whole:.2f}, {100 * worst:.2f} %" for whole, worst in found.values()
                )
                print(f"| {head_dim} | {degree} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
