"""TransformerEngine's attention as a backend: its own ring, over our communicator.

Its context-parallel attention (``thd``, point to point) cuts sequences as ours does: head and tail
chunk, every length a multiple of ``2 x degree``. Padding at a sequence's end counts as tokens, as
in our own ring: nothing before it sees it, and the loss leaves it out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from megatron_hdp.runtime.attention.backend import RunShapes
from megatron_hdp.runtime.attention.kernel_choice import KernelChoices
from megatron_hdp.runtime.kernels import Segments, longest_class
from megatron_hdp.runtime.ring import EarlierKeys, RingComm, RingGroups, TokenLayout

OLDEST_RINGS = (2, 20, 2)  # earlier ones keep keys, values and output of every step of a ring


class TransformerEngineAttention:
    """Ring slices in one context-parallel call, whole local sequences in another beside it.

    A `DotProductAttention` holds no parameters and is not part of the model: all layers use the
    same two, one for rings (its group is set anew in every call; a backward pass keeps its own) and
    one without.

    Args:
        device: the GPU.

    Raises:
        ImportError, OSError, RuntimeError, AssertionError: it does not load, or a library of its.

    Attributes:
        takes_rings: whether it is for rings too; see `OLDEST_RINGS`.
    """

    def __init__(self, device: torch.device) -> None:
        import transformer_engine
        from transformer_engine.pytorch import DotProductAttention

        version = transformer_engine.__version__
        self.takes_rings = _numbers(version) >= OLDEST_RINGS
        self.name = f"transformer-engine {version}"
        self._new_module = DotProductAttention
        self._modules: dict[tuple[object, ...], torch.nn.Module] = {}
        self._choices = KernelChoices()
        self._groups: RingGroups | None = None  # of the communicator that is in use
        self._stream = torch.cuda.Stream(device)  # every second step of a ring runs on it

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        comm: RingComm,
        scale: float,
        *,
        window: int | None = None,
        sink: torch.Tensor | None = None,
        earlier: EarlierKeys | None = None,
    ) -> torch.Tensor:
        """See `attention.AttentionBackend`; windows, sinks and parts are for another one."""
        assert window is None and sink is None and earlier is None, "`OneOfTwo` keeps them away"
        if q.shape[0] != layout.num_tokens:
            raise ValueError(f"{q.shape[0]} tokens were given, the layout has {layout.num_tokens}")
        if not layout.ring_slices:
            return self._local((q, k, v), layout.local_segments, scale)
        assert self.takes_rings, "with_float32_rings keeps them away"
        if not layout.local_lengths:
            return self._ring((q, k, v), layout, comm, scale)
        in_ring = self._ring([x[: layout.ring_tokens] for x in (q, k, v)], layout, comm, scale)
        alone = [x[layout.ring_tokens :] for x in (q, k, v)]
        return torch.cat((in_ring, self._local(alone, layout.local_segments, scale)))

    def check(self, shapes: RunShapes) -> tuple[str, ...]:
        """Asks for kernels for the largest micro-batches of a run, after the trial of this backend.

        The trial's groups are forgotten.

        Returns:
            What a user should know of the kernels.

        Raises:
            ValueError: there is none for some micro-batches; it would be known in mid-step.
        """
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        choices = self._choices
        if choices.why_not_kept is not None:
            return (f"it chooses kernels anew in every call: {choices.why_not_kept}",)
        taken = {kind: choices.kernel_of(kind) for kind in ("local", "ring")}
        notes = [", ".join(f"{kind} by {kernel}" for kind, kernel in taken.items() if kernel)]
        if not self.takes_rings and shapes.num_ranks > 1:
            oldest = ".".join(map(str, OLDEST_RINGS))
            notes.append(f"no rings by it, which before {oldest} keep all that passes through them")
        try:
            _require_kernels(choices, "local", 1, shapes)
            if taken["ring"] is not None:
                _require_kernels(choices, "ring", shapes.num_ranks, shapes)
        except TypeError as error:  # its functions take other arguments
            notes.append(f"not asked about the largest micro-batches of the run: {error}")
        if taken["ring"] == "flash-attn":
            notes.append(
                "each layer's backward waits three times for the GPU in every ring, as "
                "TransformerEngine calls flash-attn (--attention-backend fused does not)"
            )
        return tuple(notes)

    def _ring(
        self, qkv: Sequence[torch.Tensor], layout: TokenLayout, comm: RingComm, scale: float
    ) -> torch.Tensor:
        module = self._module("ring", qkv, scale)
        if self._groups is None or self._groups.comm is not comm:
            self._groups = RingGroups(comm)
        group = self._groups.of(layout.ring)
        module.set_context_parallel_group(group, group.members, self._stream, "p2p")
        with self._choices.made_for("ring"):
            return _attend(module, qkv, layout.whole_segments, is_ring=True)

    def _local(self, qkv: Sequence[torch.Tensor], segments: Segments, scale: float) -> torch.Tensor:
        module = self._module("local", qkv, scale)
        with self._choices.made_for("local"):
            return _attend(module, qkv, segments, is_ring=False)

    def _module(self, kind: str, qkv: Sequence[torch.Tensor], scale: float) -> torch.nn.Module:
        (_, heads, head_dim), (_, kv_heads, value_dim) = qkv[0].shape, qkv[2].shape
        key = (kind, heads, kv_heads, head_dim, value_dim, scale)
        if key not in self._modules:
            self._modules[key] = self._new_module(
                heads,
                head_dim if head_dim == value_dim else (head_dim, value_dim),
                num_gqa_groups=kv_heads,
                attention_dropout=0.0,
                qkv_format="thd",
                attn_mask_type="padding_causal",
                softmax_scale=scale,
            )
        return self._modules[key]


def _require_kernels(choices: KernelChoices, kind: str, degree: int, shapes: RunShapes) -> None:
    """Asks for the longest sequence alone and, where kernels are chosen by more, the largest pack.

    Deterministic ones are: cuDNN's want memory by sequences times the square of the longest one.

    Raises:
        ValueError: there is no kernel.
    """
    room = degree * shapes.tokens_per_rank
    asked = [(1, min(shapes.longest, room))]
    is_deterministic = choices.is_deterministic(kind)
    if is_deterministic:
        longest = min(shapes.longest, max(2 * room // 3, 1))  # most sequences times its square
        asked.append((room - longest + 1, longest))
    for num_sequences, longest in asked:
        bound = _bound(longest, is_deterministic)
        # not more tokens than so many sequences of that length have, or it may refuse the sizes
        tokens = min(shapes.tokens_per_rank, num_sequences * -(-longest // degree))
        kernel = choices.kernel_for(
            kind,
            batch_size=num_sequences,
            max_seqlen_q=bound,
            max_seqlen_kv=bound,
            num_tokens_q=tokens,
            num_tokens_kv=tokens,
            cp_size=degree,
        )
        if kernel is None:
            what = "deterministic kernel" if is_deterministic else "kernel"
            where = f" in a ring of {degree}" if degree > 1 else ""
            remedy = (
                "install flash-attn or allow algorithms that are not deterministic"
                if is_deterministic
                else "NVTE_DEBUG=1 and NVTE_DEBUG_LEVEL=2 make it say why"
            )
            raise ValueError(
                f"found no {what} of it for {num_sequences:,} sequences of up to {longest:,} "
                f"tokens{where} with {shapes.heads} heads, expected one for every micro-batch that "
                f"a plan may hold: {remedy}"
            )


def _attend(
    module: torch.nn.Module, qkv: Sequence[torch.Tensor], segments: Segments, is_ring: bool
) -> torch.Tensor:
    """One call; with a ring, `segments` are whole sequences, of which q, k and v hold slices."""
    # it plans anew for every number of sequences; deterministic, it wants memory for each of them
    offsets = segments.offsets if module.deterministic else segments.bucketed_offsets
    longest = _bound(segments.longest, module.deterministic)
    # rings want offsets of padded lengths; the same object tells that there is nothing between
    padded = {"cu_seqlens_q_padded": offsets, "cu_seqlens_kv_padded": offsets} if is_ring else {}
    out = module(
        *map(_canonical, qkv),
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,
        **padded,
    )
    return out.view(*qkv[0].shape[:2], qkv[2].shape[-1])


def _canonical(x: torch.Tensor) -> torch.Tensor:
    """The tensor row by row from its storage's start; a copy only where it lies otherwise.

    TransformerEngine reads strides and offsets to tell one memory layout from another. Those of a
    dimension of size one may be any, and of such tensors it knows none or takes the wrong one.
    """
    if x.storage_offset() or not x.is_contiguous():
        return x.clone(memory_format=torch.contiguous_format)
    is_canonical = x.stride() == (x.shape[1] * x.shape[2], x.shape[2], 1)
    return x if is_canonical else x.view(-1).view(x.shape)  # a view has strides of its own


def _bound(longest: int, is_deterministic: bool) -> int:
    """No less than the longest sequence, and few numbers; near it where memory is by its square."""
    return -(-longest // 64) * 64 if is_deterministic else longest_class(longest)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
