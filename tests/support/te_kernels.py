"""CPU stand-ins for the compiled kernels that TransformerEngine's attention calls, by definition.

Module `transformer_engine_torch` as far as packed (``thd``) attention in float16 and bfloat16 goes:
names, order of arguments and shapes as the library's own Python passes and expects them; wherever
the library's kernels check or assume something, these raise.
"""

import enum
import itertools
import math
import types

import torch


class DType(enum.IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class NVTE_Fused_Attn_Backend(enum.IntEnum):  # noqa: N801  the library's name
    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class _Numbered(type):
    """An enumeration of which the library's Python says the names."""

    _numbers = itertools.count(1)

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, next(_Numbered._numbers))
        return getattr(cls, name)


def _enumeration(name):
    return _Numbered(name, (), {})


NVTE_Bias_Type = _enumeration("NVTE_Bias_Type")
NVTE_Mask_Type = _enumeration("NVTE_Mask_Type")
NVTE_Softmax_Type = _enumeration("NVTE_Softmax_Type")
NVTE_QKV_Format = _enumeration("NVTE_QKV_Format")
NVTE_QKV_Layout = _enumeration("NVTE_QKV_Layout")

_MASKS = {"NVTE_PADDING_MASK": False, "NVTE_PADDING_CAUSAL_MASK": True}
_LAYOUTS = ("NVTE_THD_THD_THD", "NVTE_T3HD", "NVTE_TH3D", "NVTE_THD_T2HD", "NVTE_THD_TH2D")


def get_cudnn_version():
    """9.18.0."""
    return 91800


def get_fused_attn_backend(params):
    """The sub-backend for a `FusedAttentionParams`, and why there is none."""
    if params.qkv_dtype not in (DType.kFloat16, DType.kBFloat16):
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend, f"no kernel for {params.qkv_dtype}"
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


_LENGTHS = ("max_seqlen_q", "max_seqlen_kv")
_HOW = ("bias_type", "attn_mask_type", "softmax_type", "window_size", "bottom_right_diagonal")
_PACKED = ("cu_seqlens_q", "cu_seqlens_kv")
_PADDED = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_FORWARD = (
    *(*_LENGTHS, "is_training", "attn_scale", "p_dropout", "set_zero", "qkv_layout", "o_format"),
    *("qkv_scale_inv_format", *_HOW, *_PACKED, "q", "k", "v", "fake_dtype", *_PADDED),
    *("page_table_k", "page_table_v", "s_quantizer", "o_quantizer", "bias", "softmax_offset"),
    *("rng_gen", "rng_elts_per_thread", "return_max_logit", "cuda_graph"),
)
_BACKWARD = (
    *(*_LENGTHS, "attn_scale", "p_dropout", "set_zero", "qkv_layout", "o_format", "do_format"),
    *("dqkv_layout", "qkv_scale_inv_format", "do_scale_inv_format", *_HOW, "deterministic"),
    *(*_PACKED, "q", "k", "v", "o", "d_o", "fake_dtype", "aux_ctx_tensors", *_PADDED),
    *("s_quantizer", "dp_quantizer", "dqkv_quantizer", "cuda_graph"),
)
"""The parameters of the library's functions, which its Python passes by position."""


def _named(names, given):
    return types.SimpleNamespace(**dict(zip(names, given, strict=True)))


def fused_attn_fwd(*given):
    """[out ``[t, heads, v]``, log-sum-exp ``[t, heads, 1]``, state of random numbers ``[2]``]."""
    call = _named(_FORWARD, given)
    q, k, v, is_causal = call.q, call.k, call.v, _checked(call)
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    stats = torch.zeros(*q.shape[:2], 1, dtype=torch.float32)
    for rows, columns in _sequences(call):
        _, whole, lse = _attend(q[rows], k[columns], v[columns], call.attn_scale, is_causal)
        out[rows], stats[rows] = whole.to(q.dtype), lse.T.float().unsqueeze(-1)
    return [out, stats, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(*given):
    """(dq, dk, dv, no gradient of a bias, none of the softmax) for merged output and statistics."""
    call = _named(_BACKWARD, given)
    q, k, v, is_causal = call.q, call.k, call.v, _checked(call)
    o, d_o, scale = call.o, call.d_o, call.attn_scale
    assert o.shape == d_o.shape == (*q.shape[:2], v.shape[2]) and d_o.is_contiguous()
    stats = call.aux_ctx_tensors[0]
    assert stats.shape == (*q.shape[:2], 1) and stats.is_contiguous()
    assert stats.dtype == torch.float32
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rows, columns in _sequences(call):
        scores, *_ = _attend(q[rows], k[columns], v[columns], scale, is_causal)
        p = torch.exp(scores - stats[rows].double().permute(1, 0, 2))
        repeated, dout = q.shape[1] // k.shape[1], d_o[rows].double()
        keys, values = (x[columns].double().repeat_interleave(repeated, 1) for x in (k, v))
        row_sums = (dout * o[rows].double()).sum(-1).T.unsqueeze(-1)
        ds = p * (torch.einsum("qhd,khd->hqk", dout, values) - row_sums) * scale
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, keys).to(q.dtype)
        for grad, of_head in (
            (dk, torch.einsum("hqk,qhd->khd", ds, q[rows].double())),
            (dv, torch.einsum("hqk,qhd->khd", p, dout)),
        ):
            shape = (of_head.shape[0], k.shape[1], repeated, of_head.shape[2])
            grad[columns] = of_head.view(shape).sum(2).to(k.dtype)
    return dq, dk, dv, None, None


def _checked(call):
    """Whether the mask is causal; raises for what these stand-ins do not know."""
    assert call.qkv_layout in [getattr(NVTE_QKV_Layout, name) for name in _LAYOUTS]
    assert call.p_dropout == 0.0 and isinstance(call.max_seqlen_kv, int)
    assert all(x.dim() == 3 and x.stride(-1) == 1 for x in (call.q, call.k, call.v))
    names = {getattr(NVTE_Mask_Type, name): is_causal for name, is_causal in _MASKS.items()}
    return names[call.attn_mask_type]


def _sequences(call):
    """Rows of queries and of keys of every sequence that has any."""
    ends = []
    for names in zip(_PACKED, _PADDED, _LENGTHS, strict=True):
        cu_seqlens, padded, longest = (getattr(call, name) for name in names)
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous()
        lengths = cu_seqlens.diff().tolist()
        assert max(lengths) <= longest, (lengths, longest)
        starts = (cu_seqlens if padded is None else padded)[:-1].tolist()
        ends.append([slice(a, a + n) for a, n in zip(starts, lengths, strict=True)])
    return [
        (rows, columns)
        for rows, columns in zip(*ends, strict=True)
        if rows.stop > rows.start and columns.stop > columns.start
    ]


def _attend(q, k, v, scale, is_causal):
    """Scores ``[heads, queries, keys]``, output and log-sum-exp ``[heads, queries]``; float64."""
    repeated = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(repeated, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if is_causal:  # the diagonal begins at the top left
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("hqk,khd->qhd", torch.exp(scores - lse.unsqueeze(-1)), values)
    return scores, out, lse


def thd_read_half_tensor(tensor, cu_seqlens, half_idx):
    """Rows of the first or the second half of every sequence."""
    assert tensor.dim() == 3 and tensor.is_contiguous()
    assert tensor.shape[1] * tensor.shape[2] * tensor.element_size() % 16 == 0
    return tensor[_half(cu_seqlens, half_idx)]


def thd_second_half_lse_correction(lse, lse_per_step, cu_seqlens, lse_packed):
    """Merges another part's log-sum-exp into the rows of second halves; in place."""
    rows = _half_of_lse(lse, cu_seqlens, lse_packed, lse_per_step.shape[-1])
    lse[:, rows] = torch.logaddexp(lse[:, rows], lse_per_step[:, : len(rows)])


def thd_read_second_half_lse(lse, cu_seqlens, lse_packed, second_half_lse_seqlen):
    """Rows of second halves."""
    rows = _half_of_lse(lse, cu_seqlens, lse_packed, second_half_lse_seqlen)
    half = lse.new_zeros(lse.shape[0], second_half_lse_seqlen)
    half[:, : len(rows)] = lse[:, rows]
    return half


def thd_out_correction(
    out, out_per_step, old_lse, lse, lse_per_step, cu_seqlens, only_second_half, lse_packed
):
    """Scales what was summed up so far and adds another part's output; in place."""
    assert lse_packed and out.dtype == out_per_step.dtype
    assert out.is_contiguous() and out_per_step.is_contiguous()
    rows = _half(cu_seqlens, 1) if only_second_half else torch.arange(int(cu_seqlens[-1]))
    scale_old, scale_new = (
        torch.exp(x - lse[:, rows]).T.unsqueeze(-1)
        for x in (old_lse[:, rows], lse_per_step[:, : len(rows)])
    )
    part = out_per_step.view(-1, *out.shape[1:])[: len(rows)].float() * scale_new
    out[rows] = (out[rows].float() * scale_old + part).to(out.dtype)


def thd_grad_correction(grad, grad_per_step, cu_seqlens, first_half, second_half):
    """What becomes of the rows of first and second halves: "none", "copy", "add" or "zero"."""
    assert grad.dtype == grad_per_step.dtype and grad_per_step.is_contiguous()
    halves = [_half(cu_seqlens, 0), _half(cu_seqlens, 1)]
    whole = "none" not in (first_half, second_half)  # else only one half was computed
    for rows, what in zip(halves, (first_half, second_half), strict=True):
        part = grad_per_step[rows] if whole else grad_per_step[: len(rows)]
        if what == "zero":
            grad[rows] = 0
        elif what == "copy":
            grad[rows] = part
        elif what == "add":
            grad[rows] += part
        else:
            assert what == "none", what


def _half(cu_seqlens, half_idx):
    """Rows of a half of every sequence; lengths are even."""
    bounds = cu_seqlens.tolist()
    assert cu_seqlens.dtype == torch.int32 and not any(bound % 2 for bound in bounds)
    rows = []
    for begin, end in itertools.pairwise(bounds):
        middle = (begin + end) // 2
        rows += range(middle, end) if half_idx else range(begin, middle)
    return torch.tensor(rows, dtype=torch.int64)


def _half_of_lse(lse, cu_seqlens, lse_packed, second_half_lse_seqlen):
    assert lse_packed and lse.dim() == 2 and lse.dtype == torch.float32
    assert second_half_lse_seqlen >= lse.shape[1] // 2
    return _half(cu_seqlens, 1)


def as_module():
    """These functions as `transformer_engine_torch`; other names are enumerations never compared.

    Calling one of those raises: they are classes that take no arguments.
    """
    module = types.ModuleType("transformer_engine_torch")
    module.__dict__.update({k: x for k, x in globals().items() if not k.startswith("_")})

    def other(name):
        if name.startswith("__"):
            raise AttributeError(name)
        module.__dict__[name] = _enumeration(name)
        return module.__dict__[name]

    module.__getattr__ = other
    return module
