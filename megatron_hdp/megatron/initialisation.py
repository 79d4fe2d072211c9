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

from megatron_hdp.runtime.agreement import fingerprint

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_INTO_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight")


def initialise_by_name(model: GPTModel, seed: int) -> None:
    """Draws every matrix of the model anew; norms and biases, ones and zeros, stay.

    Args:
        model: as Megatron built it.
        seed: the run's.
    """
    config = model.config
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, parameter in global_parameters(model):
            if parameter.dim() < 2:
                continue
            into_residual = name.endswith(_INTO_RESIDUAL)
            draw = config.output_layer_init_method if into_residual else config.init_method
            torch.manual_seed(fingerprint(seed, name) % 2**63)
            whole = torch.empty(whole_shape(parameter), dtype=torch.float32)
            draw(whole)
            parameter.copy_(own_part(parameter, whole))


def global_parameters(model: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter of this rank, named as if the rank held the whole model.

    A tied output layer, which the last stage holds as a copy, has the embedding's name.
    """
    tied = model.share_embeddings_and_output_weights
    for name, parameter in model.named_parameters():
        match = _LAYER.match(name)
        if match:
            number = model.decoder.layers[int(match[1])].layer_number - 1
            name = f"decoder.layers.{number}.{name[match.end() :]}"
        elif tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def whole_shape(parameter: torch.nn.Parameter) -> list[int]:
    """The shape of the parameter over all tensor-parallel ranks."""
    shape = list(parameter.shape)
    if _is_shared(parameter):
        shape[parameter.partition_dim] *= _tensor_group().size()
    return shape


def own_part(parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """What this tensor-parallel rank holds of the whole parameter."""
    if not _is_shared(parameter):
        return whole
    group, dim = _tensor_group(), parameter.partition_dim
    # with a stride (gated MLPs), a rank holds a piece of each of that many parts
    parts = whole.chunk(parameter.partition_stride, dim)
    return torch.cat([part.chunk(group.size(), dim)[group.rank()] for part in parts], dim)


def _is_shared(parameter: torch.nn.Parameter) -> bool:
    return _tensor_group().size() > 1 and getattr(parameter, "tensor_model_parallel", False)


def _tensor_group() -> torch.distributed.ProcessGroup:
    return parallel_state.get_tensor_model_parallel_group()
