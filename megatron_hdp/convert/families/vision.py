"""Models of pictures or sound and text: where the language model is in their files.

The language model is of one of the families. What makes rows of items is copied as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron_hdp.convert.families.table import Config

_LANGUAGE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""Architectures that language models of pictures have, by their ``model_type``."""
_KNOWN = {
    "LlavaForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
}
_LLAMA = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "tie_word_embeddings": False},
}
"""What LLaVA's older files leave out."""
_ROPE = ("rope_parameters", "rope_scaling")
_MROPE = ("mrope_section", "mrope_interleaved")
_OF_ALL = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""What stands beside the language model's configuration, not in it."""


@dataclass(frozen=True)
class Naming:
    """How names of tensors begin in a model's files."""

    pictures: tuple[str, ...] = ()
    """Those of what makes rows of pictures."""
    body: str = "model."
    head: str = "lm_head."

    def is_of_pictures(self, name: str) -> bool:
        """Whether a tensor is copied as it is."""
        return name.startswith(self.pictures)

    def of_language_model(self, name: str) -> str:
        """The name that a tensor would have in files of the language model alone."""
        for ours, theirs in self._both():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def in_files(self, name: str) -> str:
        """The name in the files of the whole model."""
        for ours, theirs in self._both():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def _both(self) -> tuple[tuple[str, str], ...]:
        return ("model.", self.body), ("lm_head.", self.head)


_NAMINGS = (  # the first whose pictures are there; new files, then old ones
    Naming(("model.visual.",), "model.language_model."),
    Naming(("visual.",)),
    Naming(
        ("model.vision_tower.", "model.audio_tower.", "model.multi_modal_projector."),
        "model.language_model.",
    ),
    Naming(
        ("vision_tower.", "audio_tower.", "multi_modal_projector."),
        *("language_model.model.", "language_model.lm_head."),
    ),
)


def naming_of(config: Config, tensors: Iterable[str]) -> Naming:
    """How the tensors of a model are called.

    Raises:
        ValueError: it is one of pictures, and none of its tensors is.
    """
    if not has_pictures(config):
        return Naming()
    names = list(tensors)
    for naming in _NAMINGS:
        if any(naming.is_of_pictures(name) for name in names):
            return naming
    begins = ", ".join(name for naming in _NAMINGS for name in naming.pictures)
    raise ValueError(
        f"found {len(names):,} tensors and none of an encoder of pictures, expected names that "
        f"begin with one of {begins}: give the folder of the whole model"
    )


def has_pictures(config: Config) -> bool:
    """Whether a configuration is of a model of pictures and text that is known."""
    return bool({*(config.get("architectures") or ())} & _KNOWN)


def language_of(config: Config) -> dict[str, Any]:
    """The configuration of the language model alone; of one without pictures its own."""
    if not has_pictures(config):
        return dict(config)
    text = dict(config.get("text_config", config))
    kind = text.get("model_type", "llama")
    text["architectures"] = [_LANGUAGE.get(kind, kind)]
    if kind == "llama":
        text = _LLAMA | text
    text |= {key: config[key] for key in _OF_ALL if key in config}
    for key in _ROPE:
        if rope := text.get(key):
            text[key] = {name: one for name, one in rope.items() if name not in _MROPE}
            for word in ("type", "rope_type"):
                if text[key].get(word) == "mrope":
                    text[key][word] = "default"
    return text


def with_language(config: Config, found: Config) -> dict[str, Any]:
    """A whole model's configuration with what differs in that of its language model.

    Args:
        config: of the whole model.
        found: of its language model, changed or not.
    """
    if not has_pictures(config):
        return dict(found)
    before, whole = language_of(config), dict(config)
    text = dict(whole["text_config"]) if "text_config" in whole else whole
    for key in {*found, *before}:
        if found.get(key) == before.get(key):
            continue
        if key in _ROPE:
            kept = {name: one for name, one in (text.get(key) or {}).items() if name in _MROPE}
            text[key] = {**kept, **(found.get(key) or {})}
        elif key in _OF_ALL and key in whole:
            whole[key] = found[key]
        else:
            text[key] = found[key]
    if text is not whole:
        whole["text_config"] = text
    for key in _OF_ALL:
        if key in whole and key not in found:
            del whole[key]
    return whole
