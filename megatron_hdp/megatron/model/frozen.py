"""Weights that training leaves as they are: neither gradients nor the optimizer know them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.megatron.model.encoder import add_encoder
from megatron_hdp.megatron.model.initialisation import global_parameters
from megatron_hdp.megatron.model.lora import add_adapters, require_adapters
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.runtime.gathering import summed_by_name

_TRAINED = "weights that are trained"


def choose_trained(model: GPTModel, options: Any, encoder: torch.nn.Module | None = None) -> None:
    """Makes a stage train what flags say: all weights, some of them, or adapters alone.

    Args:
        model: before Megatron's DDP wraps it.
        options: our arguments, or Megatron's.
        encoder: becomes a part of the model; it has no adapters, and is frozen beside them.

    Raises:
        ValueError: flags do not fit the model.
    """
    if options.lora_rank is None:
        if encoder is not None:
            add_encoder(model, encoder)
        freeze(model, options.hdp_frozen)
        return
    add_adapters(
        model,
        rank=options.lora_rank,
        alpha=options.lora_alpha,
        targets=options.lora_targets,
        seed=options.seed,
    )
    if encoder is not None:  # behind the adapters: its layers have names of targets, too
        add_encoder(model, encoder.requires_grad_(False))


def require_trained(chunks: Iterable[Any], options: Any) -> None:
    """Refuses flags that name no weight of the whole model; every rank must call this.

    Args:
        chunks: this rank's, each a GPT in whatever wraps it.
        options: as of `choose_trained`.

    Raises:
        ValueError: says which.
    """
    if options.lora_rank is not None:
        require_adapters(chunks, options.lora_targets)
    elif options.hdp_frozen:
        require_frozen(chunks, options.hdp_frozen)


def freeze(model: GPTModel, patterns: Sequence[str]) -> None:
    """Freezes the weights of a stage whose names match; before Megatron's DDP wraps it.

    Args:
        model: of which virtual stage of which pipeline stage it may be.
        patterns: as a shell's, of names in a whole model, as ``decoder.layers.0.*`` for its first
            layer and ``*.mlp.*``. A tied output layer has the embedding's name.
    """
    for name, parameter in global_parameters(model):
        if _matching(name, patterns):
            parameter.requires_grad_(False)
    require_whole_layers(model)


def require_whole_layers(model: torch.nn.Module) -> None:
    """Refuses a linear layer of Megatron's whose bias is trained and whose weight is not.

    Its backward would give the bias no gradient, without a word: Megatron's own layers
    (``LinearWithFrozenWeight``) have none for it, and TransformerEngine's (read in 2.20.2; FP8
    aside) make it together with the weight's.

    Raises:
        ValueError: names it.
    """
    for name, module in model.named_modules():
        if not any(map(_is_linear, type(module).__mro__)):
            continue
        own = dict(module.named_parameters(recurse=False))
        for bias in (one for one in own if one.startswith("bias") and own[one].requires_grad):
            weight = bias.replace("bias", "weight")  # of grouped experts they are numbered
            if weight in own and not own[weight].requires_grad:
                raise ValueError(
                    f"frozen weights: found {name}.{weight} frozen and {name}.{bias} not, expected "
                    "both or only the bias, because Megatron's layers give the bias of a frozen "
                    f"weight no gradient: freeze {name}.*"
                )


def _is_linear(kind: type) -> bool:
    return kind.__name__.endswith("Linear") and kind.__module__.startswith("megatron.core")


def require_frozen(chunks: Iterable[Any], patterns: Sequence[str]) -> None:
    """Refuses patterns that match nothing, and a model that has nothing left to train.

    Every rank must call this, with its own part of the model.

    Args:
        chunks: this rank's, each a GPT in whatever wraps it.
        patterns: as of `freeze`.

    Raises:
        ValueError: says which pattern.
    """
    counts = dict.fromkeys((_TRAINED, *patterns), 0.0)
    for chunk in chunks:
        for name, parameter in global_parameters(
            get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        ):
            counts[_TRAINED] += parameter.requires_grad
            for one in _matching(name, patterns):
                counts[one] += 1
    found = summed_by_name(counts, compute_device())
    for one in patterns:
        if not found[one]:
            raise ValueError(
                f"--hdp-frozen: found no weight whose name matches {one!r}, expected names of "
                "weights as decoder.layers.0.mlp.linear_fc1.weight: quote the pattern, and begin "
                "it with * to match in every layer"
            )
    if not found[_TRAINED]:
        raise ValueError(
            f"--hdp-frozen {' '.join(patterns)}: found every weight frozen, expected some to "
            "train: name fewer"
        )


def _matching(name: str, patterns: Sequence[str]) -> list[str]:
    return [one for one in patterns if fnmatchcase(name, one)]
