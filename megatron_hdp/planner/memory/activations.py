"""What one transformer layer keeps of a token until its backward, tensor by tensor.

The layers are Megatron's local ones under HDP's attention, without biases and dropout. `b` is the
bytes of a value (2 in BF16), `p` the tensor-parallel ranks, `s` the share of the tokens outside of
the linear layers (``1/p`` with sequence parallelism, else 1), `h` the hidden size, `f` the MLP's:

- input of a norm ``b h s`` and its statistics ``4 s``; output of a norm (input of a linear layer)
  ``b h s``; twice a layer
- sine and cosine of the token's angles, for queries and for keys: ``4 b d``, on every tensor rank
  (TransformerEngine's kernel keeps the angles instead, once for all layers: counted all the same)
- queries and keys after rotation ``b (q + k) / p``, without it queries alone, if several share a
  key, as they are gathered (else views); what the QKV layer put out, because values are
  a view into it, ``b (q + 2 k) / p``
- output of attention ``b q / p`` and log-sum-exp ``4 heads / p``
- of multi-latent attention: what goes into a latent's norm, its statistics and what comes out
  (without norms the latent once), ``s`` of the tokens; the rotated part of keys beside it, where
  it is a view; sine and cosine once, ``b d``; queries, keys and values ``b (q + k + v) / p``. A
  ring whose latent travels keeps no keys and values: it is counted as if it did
- what the MLP's first layer put out, ``2 b f / p`` if gated, and the activation, ``b f / p``

A linear layer keeps its input for the gradient of its weight: without one, what is kept for nothing
else falls away (outputs of norms, of normed latents, of activations), and the rest stays, since
gradients pass. An adapter needs that input, too, and keeps what is as wide as its rank.

An expert's tokens are those of `k` experts a token, spread evenly over ranks; shared experts are an
MLP beside them, whose gate keeps its output, too. On CPUs Megatron's
unfused functions and PyTorch's norms keep more;
`tests/megatron/model/test_activation_formula.py` says what and holds the rest to autograd.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_hdp.planner.memory.job import Job
from megatron_hdp.planner.shape import EACH_EXPERT, EXPERTS, SPLIT, Attention, Layer, Mlp

_FLOAT32, _INT64 = 4, 8
_ATTENTION, _EXPERTS = "self_attention", f"mlp.experts{EACH_EXPERT}"
_NORMED = (
    tuple(f"{_ATTENTION}.linear_{one}" for one in ("qkv.", "q_proj.", "q_down", "kv_down")),
    ("mlp.linear_fc1.", "mlp.router."),
)
"""Layers that take what a norm puts out."""
_INSIDE = {
    f"{_ATTENTION}.": "attention's adapters",
    _EXPERTS: "experts' adapters",
    "mlp.shared_experts.": "shared experts' adapters",
    "mlp.": "MLP's adapters",
}
_THROWN_AWAY = {
    "core_attn": ("log-sum-exp",),  # the output is the next layer's input and stays
    "layernorm": ("norm statistics", "norm outputs"),
    "mlp": ("MLP inner", "MLP activation", "MLP's adapters"),
    "moe_act": ("experts' activation",),
    "shared_experts": (
        *("shared experts' inner", "shared experts' activation"),
        *("shared experts' output, gate", "shared experts' adapters"),
    ),
}
"""What selective recomputation does not keep, by the module that makes it (Megatron's names)."""


def kept_bytes(job: Job, layer: Layer) -> dict[str, float]:
    """Bytes that a layer keeps of one token of the micro-batch on one GPU, by what they are."""
    b, share, split = job.value_bytes, job.token_share, 1 / job.tensor_ranks
    attention, h = layer.attention, layer.hidden_size
    of_attention = _kept_of_latents if attention.kv_rank else _kept_of_qkv
    return {
        "norm inputs": layer.num_norms * b * h * share,
        "norm statistics": layer.num_norms * _FLOAT32 * share,
        "norm outputs": b * h * share * sum(layer.needs_input(*one) for one in _NORMED),
        **of_attention(job, layer),
        "attention output": b * attention.output_size * split,
        "log-sum-exp": _log_sum_exp(layer) * split,
        **_kept_of_mlp(job, layer),
        **_kept_of_adapters(job, layer),
    }


def _kept_of_adapters(job: Job, layer: Layer) -> dict[str, float]:
    """What is as wide as their rank, between A and B."""
    if layer.adapters is None:
        return {}
    kept = dict.fromkeys(_INSIDE.values(), 0.0)
    for one in layer.tensors:
        if one.name.endswith(".lora_b"):
            # ranks that share B all have the tokens of all of them
            share = 1.0 if one.held == SPLIT else job.token_share
            if one.held == EXPERTS:
                share *= job.expert_tensor_ranks
            name = next(name for stem, name in _INSIDE.items() if one.name.startswith(stem))
            kept[name] += job.value_bytes * one.columns * one.met * share
    return kept


def _kept_of_qkv(job: Job, layer: Layer) -> dict[str, float]:
    b, split, attention = job.value_bytes, 1 / job.tensor_ranks, layer.attention
    return {
        "rotary angles": 4 * b * attention.rotary_channels,
        "projected qkv": b * (attention.query_size + attention.travelling_size) * split,
        "rotated q, k": b * _rotated(attention) * split,
    }


def _kept_of_latents(job: Job, layer: Layer) -> dict[str, float]:
    b, share, attention = job.value_bytes, job.token_share, layer.attention
    latents: float = attention.q_rank + attention.kv_rank
    needs_keys = layer.needs_input(f"{_ATTENTION}.linear_kv_up_proj.")
    needed = attention.q_rank * layer.needs_input(f"{_ATTENTION}.linear_q_up_proj.")
    needed += attention.kv_rank * needs_keys
    # between ranks that share tokens a latent is cut off from what was projected together with it
    beside = 0.0 if share < 1 else b * attention.shared_channels
    if not attention.qk_norm:
        latents, beside = needed, beside * needs_keys
    kept = {"latents": b * latents * share + beside}
    if attention.qk_norm:
        num_norms = 1 + (attention.q_rank > 0)
        kept["normed latents"] = (b * needed + _FLOAT32 * num_norms) * share
    return kept | {
        "rotary angles": b * attention.rotary_channels,
        "queries, keys, values": b
        * (attention.query_size + attention.travelling_size)
        / job.tensor_ranks,
    }


def _rotated(attention: Attention) -> int:
    """Values of queries and keys that are not views into what was projected."""
    if attention.rotary_channels:
        return attention.query_size + attention.key_size
    return attention.query_size if attention.num_heads > attention.num_groups else 0


def _kept_of_mlp(job: Job, layer: Layer) -> dict[str, float]:
    b, share, split, mlp = job.value_bytes, job.token_share, 1 / job.tensor_ranks, layer.mlp
    inner, width = mlp.inner_matrices, mlp.ffn_hidden_size
    if not mlp.num_experts:
        activation = b * width * split * layer.needs_input("mlp.linear_fc2.")
        return {"MLP inner": b * inner * width * split, "MLP activation": activation}
    tokens = mlp.experts_per_token * share
    inputs = tokens * b * layer.hidden_size * layer.needs_input(f"{_EXPERTS}linear_fc1.")
    return {
        "router": _router_bytes(job, mlp) * share,
        # an expert's tensor ranks all get the tokens of all of them, and their weights
        "experts' inputs": inputs * job.expert_tensor_ranks,
        "experts' weights": tokens * _router_value(job, mlp) * job.expert_tensor_ranks,
        "experts' inner": tokens * b * inner * width,
        "experts' activation": tokens * b * width * layer.needs_input(f"{_EXPERTS}linear_fc2."),
    } | _kept_of_shared_experts(job, layer)


def _kept_of_shared_experts(job: Job, layer: Layer) -> dict[str, float]:
    b, mlp = job.value_bytes, layer.mlp
    width = mlp.shared_ffn_hidden_size / job.tensor_ranks
    if not width:
        return {}
    activation = b * width * layer.needs_input("mlp.shared_experts.linear_fc2.")
    kept = {
        "shared experts' inner": b * mlp.inner_matrices * width,
        "shared experts' activation": activation,
    }
    if mlp.shared_gate:
        kept["shared experts' output, gate"] = b * (layer.hidden_size + 1) * job.token_share
    return kept


def _log_sum_exp(layer: Layer) -> float:
    return _FLOAT32 * layer.attention.num_heads


def _router_bytes(job: Job, mlp: Mlp) -> float:
    """Scores, the map and the losses' probabilities; indices and probabilities of the choices."""
    router, value = mlp.router, _router_value(job, mlp)
    an_expert = 2 * _FLOAT32 + value + 1
    a_choice = 2 * _INT64 + _FLOAT32
    a_token = _FLOAT32 + 1  # weight and mask
    if router.sigmoid:  # scores before and after they add up to 1, in the routing and in the loss
        an_expert += 2 * _FLOAT32
        a_choice += value - _FLOAT32
        a_token += value + _FLOAT32
        if router.bias and value < _FLOAT32:
            an_expert += value
    if router.groups and not router.bias:
        an_expert += 1  # which experts could not be chosen
    return an_expert * mlp.num_experts + a_choice * mlp.experts_per_token + a_token


def _router_value(job: Job, mlp: Mlp) -> int:
    return _FLOAT32 if mlp.router.float32 else job.value_bytes


def kept_after_forward(job: Job) -> float:
    """Bytes of one token that a layer holds between forward and backward, mean over the model."""
    return sum(kept_of_part(job, part) for part in job.parts) / job.shape.num_layers


def kept_of_part(job: Job, part: Sequence[Layer]) -> float:
    """Bytes of one token that a part of the model holds between its forward and backward."""
    if job.recompute == "full":
        inputs = [job.value_bytes * layer.hidden_size * job.token_share for layer in part]
        if job.recompute_method == "uniform":
            return sum(inputs) / max(1, min(job.recompute_num_layers, len(part)))
        recomputed = job.recomputed_of(len(part))
        return sum(inputs[:recomputed]) + sum(_whole(job, part[recomputed:]))
    return sum(_whole(job, part))


def input_share(job: Job, num_layers: int) -> float:
    """`CostModel.input_share` for so many layers of a stage: at least what any stage needs.

    What a recomputed micro-batch holds at its fullest, the inputs of its layers and the largest
    layer whole, is less than that and a layer of the mean size then.
    """
    again = replace(job, recompute="full", recompute_method="uniform", recompute_num_layers=1)
    shares = [
        (kept_of_part(again, part) + recomputed_bytes(again, number % job.stages))
        / kept_of_part(job, part)
        for number, part in enumerate(job.parts)
        if part
    ]
    return max(1e-6, max(shares) - 1 / num_layers)


def keys_of_part(job: Job, part: Sequence[Layer]) -> float:
    """Bytes of one token that these layers hold beside it for later parts of its micro-batch.

    K and V, and their float32 gradients, which take the place of what later parts have given back.
    They stay on the device whatever is offloaded, since every later part reads them; 0 where
    micro-batches run whole. A layer with a window keeps less, if parts are longer than the window.
    """
    travelling = sum(layer.attention.travelling_size for layer in part) * job.runs_parts
    return travelling * (job.value_bytes + _FLOAT32) / job.tensor_ranks


def kept_of_stream(job: Job, part_tokens: int | None = None) -> float:
    """Bytes on a GPU of one token of a stream between its first forward and its backward.

    K and V of all layers, or the latents they are made of, and the sums of their gradients, on the
    device or on the host: as the last part goes back, all earlier ones have both. A layer with a
    window keeps what the next part sees of one: of `part_tokens`, a capacity's worth unless given.
    Tokens and labels are not counted, and on stages of a pipeline what parts came with. There it is
    the stage that keeps most, of as many streams as wait for their backward.
    """
    kept = stream_kept_of_parts(job, part_tokens)
    return max(job.most_alive(stage, kept[stage :: job.stages]) for stage in range(job.stages))


def stream_kept_of_parts(job: Job, part_tokens: int | None = None) -> list[float]:
    """The same of the layers of each of the job's parts, of one stream alone."""
    tokens = part_tokens or job.tokens_per_rank
    kept = [sum(_kept_values(job, layer, tokens) for layer in part) for part in job.parts]
    kept[-1] += sum(_kept_values(job, layer, tokens) for layer in job.shape.further)
    return [values * job.value_bytes * (1 + job.stream_sum_ratio) for values in kept]


def stream_inputs(job: Job) -> float:
    """Bytes of one token of a stream that parts came with, of each part of a job with stages."""
    is_staged = job.stages > 1
    return is_staged * job.value_bytes * job.shape.hidden_size * job.token_share


def _kept_values(job: Job, layer: Layer, part_tokens: int) -> float:
    """Of keys and values, a token of a stream in parts of so many."""
    attention = layer.attention
    if job.keeps_latents and attention.latent_size:
        return attention.latent_size  # whole on every tensor rank
    seen = part_tokens if attention.window is None else min(part_tokens, attention.window - 1)
    return attention.travelling_size / job.tensor_ranks * seen / part_tokens


def kept_of_further(job: Job) -> float:
    """Bytes of one token that layers of further tokens hold between forward and backward.

    Besides what a layer keeps: inputs of three norms (the embedding, the hidden states before and
    behind the layer) with their statistics, and what is projected, the first two side by side. With
    full recomputation the embedding and the hidden states alone.
    """
    state = job.value_bytes * job.shape.hidden_size * job.token_share
    if job.recompute == "full":
        return 3 * state * len(job.shape.further)
    beside = 5 * state + 3 * _FLOAT32 * job.token_share
    return sum(kept + beside for kept in _whole(job, job.shape.further))


def _whole(job: Job, layers: Sequence[Layer]) -> list[float]:
    """What layers keep that are not recomputed, each."""
    kept: dict[Layer, float] = {}
    for layer in layers:
        if layer not in kept:
            kept[layer] = sum(kept_bytes(job, layer).values()) - _thrown_away(job, layer)
    return [kept[layer] for layer in layers]


def _thrown_away(job: Job, layer: Layer) -> float:
    """Of that, what selective recomputation makes again, a layer at a time."""
    names = {name for one in job.recomputed_modules for name in _THROWN_AWAY.get(one, ())}
    return sum(size for name, size in kept_bytes(job, layer).items() if name in names)


def recomputed_bytes(job: Job, stage: int) -> float:
    """Bytes a token of the layers that are whole at a time because backward recomputed them."""
    parts = job.parts[stage :: job.stages]
    if job.recompute != "full":
        kinds = {layer for part in parts for layer in part} if job.recomputed_modules else ()
        return max((_thrown_away(job, layer) for layer in kinds), default=0.0)
    unit = job.recompute_num_layers if job.recompute_method == "uniform" else 1
    plain = replace(job, recompute=None)
    return max(_most_of(_whole(plain, part), unit) for part in parts)


def _most_of(values: Sequence[float], length: int) -> float:
    """The greatest sum of `length` neighbours, of all where there are fewer."""
    starts = range(max(1, len(values) - length + 1))
    return max(sum(values[start : start + length]) for start in starts)


def backward_bytes(job: Job, layer: Layer) -> float:
    """Bytes a token that a layer's backward needs at its busiest moment beside what was kept.

    The larger of attention and MLP, each with all that it makes alive at once: an upper bound.
    """
    b, split, h = job.value_bytes, 1 / job.tensor_ranks, layer.hidden_size
    # gradients of output, queries, keys and values, of the block and of the QKV layer's output;
    # the sum for queries is float32 as long as blocks are added
    queries = 3 * layer.attention.query_size + layer.attention.output_size
    keys = 3 * layer.attention.travelling_size
    attention = split * (b * (queries + keys) + _FLOAT32 * layer.attention.query_size)
    inner = layer.mlp.inner_matrices + 1
    if layer.mlp.num_experts:
        tokens = layer.mlp.experts_per_token * job.token_share
        # gradients inside the experts and of their inputs, as computed and as sent
        mlp = tokens * b * (inner * layer.mlp.ffn_hidden_size + 3 * h)
        mlp += b * inner * layer.mlp.shared_ffn_hidden_size * split
    else:
        mlp = b * inner * layer.mlp.ffn_hidden_size * split
    gathered = 2 * b * h  # input and its gradient, on all tensor ranks
    return max(attention, mlp) + gathered + b * h * job.token_share


def ring_bytes(job: Job, layer: Layer) -> float:
    """Bytes a token of ring attention's buffers: K and V twice, their float32 gradients twice.

    In a layer with a window, whose keys and values are packed behind their halo, half of that; but
    a ring whose sequences fit into the window runs as without one.

    Those of our own ring, which all layers share. Where micro-batches run in parts, keys of a part
    and of those before it are at most those of the micro-batch; queries travel only where that is
    less. A stream with keys on the device takes room for those of earlier parts from its
    capacity. TransformerEngine's ring uses no more at a time: its forward three and a half times K
    and V and two outputs, its backward K, V and their gradients twice in the type of the values,
    when nothing else of a layer is computed. What it has freed is counted apart
    (`gpu.IN_FLIGHT_BYTES`).
    """
    of_ring = 2 * (job.value_bytes + _FLOAT32)
    if job.double_rings:  # K and V in a group and between groups; gradients there, and our group's
        of_ring = 4 * job.value_bytes + 5 * _FLOAT32
    if job.streams:  # a part and a group of keys from the host go around in one message, and
        of_ring *= 3  # keys and sums of that group and of the next one are on the device
    return layer.attention.travelling_size * of_ring / job.tensor_ranks


def halo_bytes(job: Job, layer: Layer) -> float:
    """Bytes of a window's halo beside the tokens' own, whatever their number; 0 without a window.

    Keys and values, their gradients as the kernel gives them and in float32, and as many that come.
    """
    sizes = 2 * (job.value_bytes + _FLOAT32)
    return layer.attention.halo_size * sizes / job.tensor_ranks


def second_stream_bytes(job: Job, layer: Layer, degree: int) -> float:
    """Bytes a token that a ring of TransformerEngine's takes of its second stream's memory.

    Every second step of its forward runs on a stream of its own, and the allocator keeps memory for
    each stream: what one has held, the other cannot have until all of it is given back, which stops
    the device. At the busiest moment of that stream, on a member whose later steps see half of the
    keys (`K` and `V` of a token are ``2 b k / p`` bytes, an output ``b q / p``):

    - ``min(2, (D - 1) // 2)`` times K and V received: of this step and of the one before the last
    - half of K and V: the chunks that this step's queries see
    - ``min(2, D // 2)`` outputs of a step, likewise
    - six log-sum-exps, ``4 heads / p``: of two steps, transposed, and what adding them up takes

    Backward runs on the stream that computes alone.
    """
    if degree < 2:
        return 0.0
    kv = job.value_bytes * layer.attention.travelling_size
    output = job.value_bytes * layer.attention.output_size
    received, outputs = min(2, (degree - 1) // 2), min(2, degree // 2)
    log_sum_exps = 6 * _log_sum_exp(layer)
    return ((received + 0.5) * kv + outputs * output + log_sum_exps) / job.tensor_ranks


def second_stream_kept_of_part(job: Job, part: Sequence[Layer]) -> float:
    """Bytes of a token that these layers of a part keep in that stream's memory until backward.

    The K and V that a ring of TransformerEngine's received last, if its degree is odd: they came in
    a step of the second stream. Other micro-batches keep theirs in the memory of the stream that
    computes, and neither can have the other's.
    """
    if job.hdp_ranks < 3 or "core_attn" in job.recomputed_modules:
        return 0.0
    kept = part[job.recomputed_of(len(part)) :]
    sizes = (layer.attention.travelling_size for layer in kept)
    return job.value_bytes * sum(sizes) / job.tensor_ranks
