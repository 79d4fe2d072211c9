"""What one transformer layer keeps of a token until its backward, tensor by tensor.

The layers are Megatron's local ones under HDP's attention, without biases and dropout. `b` is the
bytes of a value (2 in BF16), `p` the tensor-parallel ranks, `s` the share of the tokens outside of
the linear layers (``1/p`` with sequence parallelism, else 1), `h` the hidden size, `f` the MLP's:

- input of a norm ``b h s`` and its statistics ``4 s``; output of a norm (input of a linear layer)
  ``b h s``; twice a layer
- sine and cosine of the token's angles, for queries and for keys: ``4 b d``, on every tensor rank
  (TransformerEngine's kernel keeps the angles instead, once for all layers: counted all the same)
- queries and keys after rotation ``b (q + k) / p``; what the QKV layer put out, because values are
  a view into it, ``b (q + 2 k) / p``
- output of attention ``b q / p`` and log-sum-exp ``4 heads / p``
- what the MLP's first layer put out, ``2 b f / p`` if gated, and the activation, ``b f / p``

An expert's tokens are those of `k` experts a token, spread evenly over ranks. On CPUs Megatron's
unfused functions and PyTorch's norms keep more;
`tests/megatron/model/test_activation_formula.py` says what and holds the rest to autograd.
"""

from megatron_hdp.planner.memory.job import Job

_FLOAT32, _INT64 = 4, 8


def kept_bytes(job: Job) -> dict[str, float]:
    """Bytes that a layer keeps of one token of the micro-batch on one GPU, by what they are."""
    b, share, split = job.value_bytes, job.token_share, 1 / job.tensor_ranks
    norms = 2 * (b * job.hidden_size + _FLOAT32) * share
    kept = {
        "norm inputs": norms,
        "norm outputs": 2 * b * job.hidden_size * share,
        "rotary angles": 4 * b * int(job.kv_channels * job.rotary_percent),
        "projected qkv": b * (job.query_size + 2 * job.kv_size) * split,
        "rotated q, k": b * (job.query_size + job.kv_size) * split,
        "attention output": b * job.query_size * split,
        "log-sum-exp": _FLOAT32 * job.num_attention_heads * split,
    }
    inner, width = job.inner_matrices, job.ffn_hidden_size
    if job.num_experts:
        tokens = job.experts_per_token * share
        kept["router"] = _router_bytes(job) * share
        # an expert's tensor ranks all get the tokens of all of them
        kept["experts' inputs"] = tokens * b * job.hidden_size * job.expert_tensor_ranks
        kept["MLP inner"] = tokens * b * inner * width
        kept["MLP activation"] = tokens * b * width
    else:
        kept["MLP inner"] = b * inner * width * split
        kept["MLP activation"] = b * width * split
    return kept


def _router_bytes(job: Job) -> float:
    """Scores, the map and the losses' probabilities; indices and probabilities of the choices."""
    an_expert = 2 * _FLOAT32 + job.value_bytes + 1
    a_choice = 2 * _INT64 + _FLOAT32 + job.value_bytes
    weight_and_mask = _FLOAT32 + 1
    return an_expert * job.num_experts + a_choice * job.experts_per_token + weight_and_mask


def kept_after_forward(job: Job) -> float:
    """Bytes of one token that a layer holds between forward and backward, mean over the model."""
    return sum(kept_of_part(job, layers) for layers in job.split.layers) / job.num_layers


def kept_of_part(job: Job, num_layers: int) -> float:
    """Bytes of one token that a part of the model holds between its forward and backward.

    Args:
        job: what is trained, and how.
        num_layers: of the part, which one forward runs through.
    """
    kept = kept_bytes(job)
    whole = sum(kept.values())
    if job.recompute == "selective":
        # the output is the next layer's input and stays
        return num_layers * (whole - kept["log-sum-exp"])
    if job.recompute == "full":
        layer_input = job.value_bytes * job.hidden_size * job.token_share
        if job.recompute_method == "uniform":
            units = num_layers / max(1, min(job.recompute_num_layers, num_layers))
            return units * layer_input
        recomputed = job.recomputed_of(num_layers)
        return recomputed * layer_input + (num_layers - recomputed) * whole
    return num_layers * whole


def recomputed_layers(job: Job, stage: int) -> int:
    """Layers of a stage that are whole in memory at a time because backward recomputed them."""
    if job.recompute != "full":
        return 0
    unit = job.recompute_num_layers if job.recompute_method == "uniform" else 1
    return min(unit, max(job.split.of_chunks(stage)))


def backward_bytes(job: Job) -> float:
    """Bytes a token that a layer's backward needs at its busiest moment beside what was kept.

    The larger of attention and MLP, each with all that it makes alive at once: an upper bound.
    """
    b, split = job.value_bytes, 1 / job.tensor_ranks
    # gradients of output, queries, keys and values, of the block and of the QKV layer's output;
    # the sum for queries is float32 as long as blocks are added
    attention = split * (b * (4 * job.query_size + 6 * job.kv_size) + _FLOAT32 * job.query_size)
    inner = job.inner_matrices + 1
    if job.num_experts:
        tokens = job.experts_per_token * job.token_share
        # gradients inside the experts and of their inputs, as computed and as sent
        mlp = tokens * b * (inner * job.ffn_hidden_size + 3 * job.hidden_size)
    else:
        mlp = b * inner * job.ffn_hidden_size * split
    gathered = 2 * b * job.hidden_size  # input and its gradient, on all tensor ranks
    return max(attention, mlp) + gathered + b * job.hidden_size * job.token_share


def ring_bytes(job: Job) -> float:
    """Bytes a token of ring attention's buffers: K and V twice, their float32 gradients twice.

    Those of our own ring, all from the memory of the stream that computes: what NCCL's stream works
    on is kept by its handle until it has been waited for. TransformerEngine's ring takes no more of
    that memory: its forward three and a half times K and V and two outputs, its backward K, V and
    their gradients twice in the type of the values, when nothing else of a layer is computed.
    """
    return 2 * 2 * job.kv_size * (job.value_bytes + _FLOAT32) / job.tensor_ranks


def second_stream_bytes(job: Job, degree: int) -> float:
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

    Args:
        job: what is trained, and how.
        degree: of the ring, `D`.
    """
    if degree < 2:
        return 0.0
    kv, output = job.value_bytes * 2 * job.kv_size, job.value_bytes * job.query_size
    received, outputs = min(2, (degree - 1) // 2), min(2, degree // 2)
    log_sum_exps = 6 * _FLOAT32 * job.num_attention_heads
    return ((received + 0.5) * kv + outputs * output + log_sum_exps) / job.tensor_ranks


def second_stream_kept_bytes(job: Job) -> float:
    """Bytes of a token that a layer keeps in that stream's memory until its backward.

    The K and V that a ring of TransformerEngine's received last, if its degree is odd: they came in
    a step of the second stream. Other micro-batches keep theirs in the memory of the stream that
    computes, and neither can have the other's. A mean over the model, as `kept_after_forward`.
    """
    of_parts = (second_stream_kept_of_part(job, layers) for layers in job.split.layers)
    return sum(of_parts) / job.num_layers


def second_stream_kept_of_part(job: Job, num_layers: int) -> float:
    """The same of a part of the model, of so many layers."""
    if job.hdp_ranks < 3 or job.recompute == "selective":
        return 0.0
    whole = job.value_bytes * 2 * job.kv_size / job.tensor_ranks
    return (num_layers - job.recomputed_of(num_layers)) * whole
