"""verl's Megatron engine of the vendor ``hdp``: a batch is planned over all ranks and run by HDP.

Model, optimizer, checkpoints and the weights for rollouts stay verl's. What is replaced is one
call, `forward_backward_batch`, and who has which data: every rank gets the whole batch, as one
data-parallel rank would. A loss of verl's looks at whole sequences, of which no rank has all
tokens. So log-probabilities are computed first, on all ranks; the loss is differentiated by them;
and a step with these derivatives as weights has its gradient (`session.weights_of`). That is one
more forward.

Read against verl 0.9.1 (``workers/engine/megatron/transformer_impl.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.py_functional import append_to_dict
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import (
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)

from megatron_hdp.bridge.refusals import require_known_adapters
from megatron_hdp.megatron.optimizer import torch_adam
from megatron_hdp.session import FromLogProbs, FromValues, HdpSession, TokenBatch, weights_of
from megatron_hdp.session.losses import Loss
from megatron_hdp.verl.rows import Rows, require_known, temperature_of

_PREFIX, _CAPACITY = "hdp_", "hdp_tokens_per_rank"


class _OverHdp(MegatronEngineWithLMHead):  # type: ignore[misc]  # verl has no types
    """Runs batches under HDP; an engine for forward passes alone, a reference, as verl does.

    Options of HDP's are keys of ``override_transformer_config``, by their names in `HdpOptions`:
    ``hdp_strategy: naive``. Unless ``hdp_tokens_per_rank`` is among them it is
    ``max_token_len_per_gpu``. ``context_parallel_size`` is taken for 1: rings are HDP's.

    Raises:
        ValueError: a configuration that HDP does not know.
    """

    _gives_values = False

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        self.session: HdpSession | None = None
        self._alone: dist.ProcessGroup | None = None
        self._options: dict[str, Any] = {}
        if not engine_config.forward_only:
            _require_plain(model_config)
            engine_config, self._options = _taken_over(engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _init_device_mesh(self) -> None:
        super()._init_device_mesh()
        if not self.engine_config.forward_only:
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def initialize(self) -> None:
        """Builds all that verl's does, then a session over the model."""
        super().initialize()
        if self.engine_config.forward_only:
            return
        if self.peft_cls is not None:
            require_known_adapters(self.peft_cls, self.tf_config)
        capacity = self._options.pop(_CAPACITY)
        self.session = HdpSession.of_model(
            self.module,
            vocab_size=self.model_config.hf_config.vocab_size,
            seq_length=capacity * int(super().get_data_parallel_size()),
            hdp_tokens_per_rank=capacity,
            **self._options,
        )

    def get_data_parallel_size(self) -> int:
        """1: every rank has the whole batch."""
        return 1 if self._alone is not None else int(super().get_data_parallel_size())

    def get_data_parallel_rank(self) -> int:
        """0: every rank has the whole batch."""
        return 0 if self._alone is not None else int(super().get_data_parallel_rank())

    def get_data_parallel_group(self) -> Any:
        """This rank alone, for what verl gathers over ranks with other data."""
        return self._alone if self._alone is not None else super().get_data_parallel_group()

    def is_mp_src_rank_with_outputs(self) -> bool:
        """True on one rank: all have the same outputs."""
        is_first = self._alone is None or super().get_data_parallel_rank() == 0
        return bool(super().is_mp_src_rank_with_outputs() and is_first)

    def load_checkpoint(self, *given: Any, **by_name: Any) -> None:
        """As verl's; what it loads also reaches torch's Adam, where there is no other."""
        if self.optimizer is None:
            super().load_checkpoint(*given, **by_name)
            return
        with torch_adam.restorable(self.optimizer):
            super().load_checkpoint(*given, **by_name)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Runs the whole batch; see verl's `BaseEngine`.

        Args:
            data: the same on all ranks: ``input_ids`` nested ``[sequences, length]`` and what the
                loss wants.
            loss_function: of verl's; None only with `forward_only`.
            forward_only: leaves gradients alone.

        Returns:
            ``model_output`` (nested ``log_probs``, ``entropy`` where it is asked for, entry t about
            token t + 1; of critics ``values``), ``loss`` and ``metrics``, on every rank.

        Raises:
            ValueError: on every rank: a batch that HDP does not know; or parameters are on the
                host.
        """
        if self.session is None:
            found_by_verl: dict[str, Any] = super().forward_backward_batch(
                data, loss_function, forward_only
            )
            return found_by_verl
        require_known(data)
        _require_on_device(self.module)
        rows, temperature = Rows.of(data), temperature_of(data)
        both = bool(tu.get_non_tensor_data(data, key="calculate_entropy", default=False))
        weighed: Loss = FromValues.weighed()
        if self._gives_values:
            batch = TokenBatch(rows.tokens)
            found = self.session.values(batch)
        else:
            batch = TokenBatch(rows.tokens, loss_mask=rows.wanted)
            weighed = FromLogProbs.weighed(temperature, with_entropies=both)
            found = self.session.log_probs(batch, temperature=temperature, with_entropies=both)
        assert found is not None  # to all ranks
        nested = rows.nested_values if self._gives_values else rows.nested
        by_name: dict[str, Any] = {}
        device, loss = get_device_id(), 1.0  # verl's loss where there is none
        data = data.to(device)

        def of_sequences(given: Sequence[torch.Tensor]) -> torch.Tensor:
            how = {"data": data, "dp_group": self.get_data_parallel_group()}
            assert loss_function is not None
            value, metrics = loss_function(model_output=nested(given, device), **how)
            append_to_dict(by_name, metrics)
            return value

        if loss_function is not None:
            mask = data["loss_mask"]
            num_tokens = (mask.values() if mask.is_nested else mask).sum().item()
            tu.assign_non_tensor(
                data, batch_num_tokens=num_tokens, dp_size=1, num_micro_batch=1, sp_size=1
            )
        if not forward_only:
            loss, weights = weights_of(of_sequences, found)
            # verl's loss is divided already; what routers add is a sum over tokens
            num = sum(map(len, rows.tokens))
            batch = replace(batch, arrays={"weights": [one * num for one in weights]})
            self.session.step(batch, weighed, divisor=num)
        elif loss_function is not None:
            loss = float(of_sequences(found))
        outputs = nested(found, device)
        return {"model_output": outputs, "loss": [loss], "metrics": by_name}


@EngineRegistry.register("language_model", "megatron", device="cuda", vendor="hdp")
class HdpEngine(_OverHdp):
    """Of actors and references; see `_OverHdp`."""


@EngineRegistry.register("value_model", "megatron", device="cuda", vendor="hdp")
class HdpValueEngine(_OverHdp, MegatronEngineWithValueHead):  # type: ignore[misc]
    """Of critics: ``values`` of all tokens, entry t about token t, in ``model_output``."""

    _gives_values = True


def _require_plain(model_config: Any) -> None:
    """Refuses what HDP does not know of a model.

    Raises:
        ValueError: names it.
    """
    if model_config.lora_rank:
        raise ValueError("found lora_rank, which is for FSDP: set the rank of lora")
    if model_config.mtp.enable:
        raise ValueError(
            "found mtp, whose layers HDP would not train as verl's settings say: switch it off"
        )


def _require_on_device(chunks: Sequence[Any]) -> None:
    """Refuses to run while verl has moved parameters to the host.

    Raises:
        ValueError: says so.
    """
    buffers = (one for chunk in chunks for one in (*chunk.buffers, *chunk.expert_parallel_buffers))
    if any(one.param_data is not None and not one.param_data.storage().size() for one in buffers):
        raise ValueError(
            "found parameters on the host, expected them on the device: run within the engine's "
            "train_mode or eval_mode, or call its to"
        )


def _taken_over(engine_config: Any) -> tuple[Any, dict[str, Any]]:
    """(a copy of the configuration as verl's engine needs it under HDP, HDP's own options).

    Raises:
        ValueError: the configuration has no capacity, or what HDP does not know.
    """
    changed = dict(engine_config.override_transformer_config)
    options = {key: changed.pop(key) for key in list(changed) if key.startswith(_PREFIX)}
    options.setdefault(_CAPACITY, engine_config.max_token_len_per_gpu)
    if not options[_CAPACITY]:
        raise ValueError(
            "found no max_token_len_per_gpu in the engine's configuration, expected the tokens "
            "that a GPU can hold at a time: give it, or hdp_tokens_per_rank in "
            "override_transformer_config"
        )
    for name in ("use_fused_kernels", "dynamic_context_parallel", "use_megatron_fsdp"):
        if getattr(engine_config, name, False):
            raise ValueError(f"found {name}, which HDP does not know: switch it off")
    if getattr(getattr(engine_config, "qat", None), "enable", False):
        raise ValueError("found qat, which HDP does not know: switch it off")
    if engine_config.router_replay.mode != "disabled":
        raise ValueError("found router_replay, which HDP does not know: set its mode to disabled")
    changed["calculate_per_token_loss"] = True
    engine_config = copy.copy(engine_config)  # another engine may be made of the given one
    for name, value in (("context_parallel_size", 1), ("override_transformer_config", changed)):
        object.__setattr__(engine_config, name, value)  # verl's configurations are frozen
    return engine_config, options
