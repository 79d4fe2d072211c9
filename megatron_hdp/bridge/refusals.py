"""What Megatron-Bridge can be told to do and HDP does not know under it, refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_STEP = ("megatron.bridge.training.gpt_step", "forward_step")
_UNSUPPORTED = {  # where it stands: values that HDP knows, what to do
    "model.context_parallel_size": ((1,), "set 1: rings are HDP's"),
    "model.calculate_per_token_loss": ((True,), "set True: a step has one divisor"),
    "model.mtp_num_layers": ((None, 0), "use HdpSession in a loop of your own"),
    "model.cuda_graph_impl": (("none", None), "set none"),
    "model.fp16": ((False,), "use bf16"),
    "model.fp8": ((None, False), "use bf16"),
    "model.fp4": ((None, False), "use bf16"),
    "model.qk_clip": ((False, None), "leave it out"),
    "ddp.overlap_param_gather": ((False,), "set False, also in comm_overlap"),
    "ddp.use_megatron_fsdp": ((False,), "use Megatron's DDP"),
    "dist.use_megatron_fsdp": ((False,), "use Megatron's DDP"),
    "dist.use_torch_fsdp2": ((False,), "use Megatron's DDP"),
    "dist.use_decentralized_pg": ((False,), "set False"),
    "rerun_state_machine.check_for_spiky_loss": ((False,), "set False"),
}
_ADAPTERS = ("megatron.bridge.peft.lora", "LoRA")
_ADAPTED = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),  # of latent attention
    *("linear_kv_down_proj", "linear_kv_up_proj"),
)


def require_known(config: Any, forward_step: Any) -> None:
    """Refuses a configuration, or a step of the user's own, that would not run as it says.

    Args:
        config: Bridge's ``ConfigContainer``, after its own checks.
        forward_step: given to Bridge's loop, plain or as a ``functools.partial``.

    Raises:
        ValueError: names all that was found.
    """
    found = list(_found(config, forward_step))
    if found:
        raise ValueError("HDP does not know what Bridge is told:\n  " + "\n  ".join(found))


def _found(config: Any, forward_step: Any) -> Iterator[str]:
    step = getattr(forward_step, "func", forward_step)
    name = (getattr(step, "__module__", ""), getattr(step, "__qualname__", type(step).__name__))
    if name != _STEP:
        yield (
            f"found the forward step {'.'.join(name)}, expected {'.'.join(_STEP)}: HDP does not "
            "call it, so a loss of your own would be left out; use HdpSession for that"
        )
    for path, (known, remedy) in _UNSUPPORTED.items():
        value = config
        for part in path.split("."):
            value = getattr(value, part, known[0])
        if value not in known:
            yield f"found {path} = {value}, expected {known[0]}: {remedy}"
    saves = getattr(config, "checkpoint", None)
    if saves is not None and saves.async_save and saves.async_strategy != "mcore":
        yield (
            f"found checkpoint.async_strategy = {saves.async_strategy} with async_save, expected "
            "mcore: set that"
        )
    if config.peft is not None:
        yield from _found_in_adapters(config.peft, config.model)


def require_known_adapters(peft: Any, model: Any) -> None:
    """Refuses adapters that would not train as they say.

    Args:
        peft: an object of Bridge's.
        model: the provider, or Megatron's configuration, of the model they are put into.

    Raises:
        ValueError: names all that was found.
    """
    found = list(_found_in_adapters(peft, model))
    if found:
        raise ValueError("HDP does not know these adapters:\n  " + "\n  ".join(found))


def _found_in_adapters(peft: Any, model: Any) -> Iterator[str]:
    if (type(peft).__module__, type(peft).__name__) != _ADAPTERS:
        yield (
            f"found peft = {type(peft).__name__}, expected Bridge's LoRA: HDP was not tried with "
            "others"
        )
        return
    if peft.dropout:
        yield (
            f"found peft.dropout = {peft.dropout}, expected 0: what dropout draws would depend on "
            "the plan"
        )
    for one in peft.target_modules or ["exclude_modules"]:
        if one.rpartition(".")[-1] not in _ADAPTED:
            yield (
                f"found peft.target_modules with {one}, expected {', '.join(_ADAPTED)}, plain or "
                "behind a pattern: HDP runs routers, embeddings and the output by other means"
            )
    if getattr(model, "num_moe_experts", None) and getattr(model, "moe_grouped_gemm", False):
        yield (
            "found peft in a model of grouped experts, expected each by itself, because kernels of "
            "groups take the weights of all at once: set moe_grouped_gemm to False"
        )
