"""Initial weights that depend on the seed and a weight's name only, never on the parallel layout.

Megatron draws one weight after another on each rank, so pipelines of other lengths start from other
weights. Here each weight has its own seed: every layout begins with the same model, and the loss
curves of two layouts can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_hdp.megatron import parallel
from megatron_hdp.runtime.health import fingerprint

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_FURTHER = "mtp.layers."  # numbered alike on every rank that holds them
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_DRAWN_VECTORS = (".softmax_offset", ".mlp.router.bias")
_INTO_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight")


def initialise_by_name(model: GPTModel, seed: int) -> None:
    """Draws every matrix, sink and router's bias anew; norms, other biases, ones and zeros, stay.

    Each is drawn on the device that holds it: a GPU's generator gives other numbers than a CPU's.
    """
    config = model.config
    gpus = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=gpus), torch.no_grad():
        for name, parameter in global_parameters(model):
            if parameter.dim() < 2 and not name.endswith(_DRAWN_VECTORS):
                continue
            into_residual = name.endswith(_INTO_RESIDUAL)
            draw = config.output_layer_init_method if into_residual else config.init_method
            seed_drawing(fingerprint(seed, name) % 2**63, gpus)
            shape, device = whole_shape(parameter), parameter.device
            whole = torch.empty(shape, dtype=torch.float32, device=device)
            draw(whole)
            parameter.copy_(own_part(parameter, whole))


def seed_drawing(seed: int, gpus: set[torch.device]) -> None:
    """Seeds the CPU's generator and those of `gpus`, which hold something.

    ``torch.manual_seed`` does the same, and keeps a stack for GPUs that there might be later.
    """
    torch.default_generator.manual_seed(seed)
    for gpu in gpus:
        torch.cuda.default_generators[gpu.index].manual_seed(seed)


def global_parameters(model: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter of this rank, named as if the rank held the whole model.

    A tied output layer, which the last stage holds as a copy, has the embedding's name.
    """
    tied = model.share_embeddings_and_output_weights
    first_expert = _first_expert(model)
    for name, parameter in model.named_parameters():
        match = _LAYER.match(name)
        if match:
            number = model.decoder.layers[int(match[1])].layer_number - 1
            name = f"decoder.layers.{number}.{name[match.end() :]}"
        if match or name.startswith(_FURTHER):
            name = _EXPERT.sub(lambda m: f".local_experts.{first_expert + int(m[1])}.", name)
        elif tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def _first_expert(model: GPTModel) -> int:
    """The global number of this rank's first expert in each layer; 0 where there is none."""
    experts: int = model.config.num_moe_experts or 0
    ranks: int = parallel_state.get_expert_model_parallel_world_size()
    rank: int = parallel_state.get_expert_model_parallel_rank()
    return rank * (experts // ranks)


def whole_shape(parameter: torch.nn.Parameter) -> list[int]:
    """The shape of the parameter over all tensor-parallel ranks."""
    shape = list(parameter.shape)
    if _is_shared(parameter):
        shape[parameter.partition_dim] *= tensor_group(parameter).size()
    return shape


def own_part(parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """What this tensor-parallel rank holds of the whole parameter."""
    if not _is_shared(parameter):
        return whole
    group, dim = tensor_group(parameter), parameter.partition_dim
    # with a stride (gated MLPs), a rank holds a piece of each of that many parts
    parts = whole.chunk(parameter.partition_stride, dim)
    return torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in parts], dim)


def _is_shared(parameter: torch.nn.Parameter) -> bool:
    several = tensor_group(parameter).size() > 1
    return several and getattr(parameter, "tensor_model_parallel", False)


def tensor_group(parameter: torch.nn.Parameter) -> torch.distributed.ProcessGroup:
    """The ranks that may each hold a part of this parameter."""
    if parallel.is_spread_expert(parameter):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()
