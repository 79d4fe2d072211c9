"""Megatron's router of experts, told which token is whose.

Megatron's own balancing losses count padding, know no rings and depend on how tokens fell into
micro-batches; so does what moves an expert bias. Here the router leaves them out and adds its
own, exact for every plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hdp.megatron.model.attention import HdpPackedSeqParams
from megatron_hdp.megatron.model.taking import take_over_class
from megatron_hdp.runtime.loss import (
    RouterTokens,
    balancing_scores,
    count_routed,
    sequence_balance_loss,
    z_loss,
)

_REPLACED = ("routing", "apply_z_loss", "_apply_expert_bias")
SCORE_FUNCTIONS = ("softmax", "sigmoid")
"""By which HDP's router knows to balance."""


class HdpRouter(TopKRouter):
    """Megatron's router with balancing and z-loss over sequences instead of micro-batches.

    Raises:
        ValueError: an option whose effect would depend on the plan.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        **of_release: Any,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **of_release)
        self._take_over_losses()

    @classmethod
    def adopt(cls, stock: TopKRouter) -> None:
        """Makes a router that Megatron has built one of this class; its parameters stay."""
        take_over_class(stock, TopKRouter, cls, _REPLACED)
        stock._take_over_losses()

    def _take_over_losses(self) -> None:
        config = self.config
        for kind in ("aux_loss", "global_aux_loss"):
            _refuse(self.get_aux_loss_coeff(kind) > 0, kind, "seq_aux_loss")
        kind, scores = config.moe_router_load_balancing_type, self.score_function
        is_other = kind in ("sinkhorn", "quantile_balancing")
        _refuse(is_other, f"{kind} routing", "seq_aux_loss or none")
        is_other = scores not in SCORE_FUNCTIONS
        _refuse(is_other, f"scores by {scores}", " or ".join(SCORE_FUNCTIONS))
        has_capacity = config.moe_expert_capacity_factor is not None
        _refuse(has_capacity, "a capacity of experts", "no capacity")
        self._balance_coeff = self.get_aux_loss_coeff("seq_aux_loss")
        self.routing_type = "none"  # Megatron's own losses stay out
        if self.enable_expert_bias:
            # whole numbers, whose sum over ranks knows no order; a model in BF16 would round others
            counts = torch.zeros(
                self.config.num_moe_experts, dtype=torch.int64, device=self.expert_bias.device
            )
            self.local_tokens_per_expert = counts
        self._tokens: RouterTokens | None = None
        self.losses: dict[str, torch.Tensor] = {}
        """Sums over this rank's real tokens, without coefficients, by Megatron's names, once
        backward has run; whoever logs them clears them."""

    @contextmanager
    def routes(self, params: HdpPackedSeqParams) -> Iterator[None]:
        """Within the block, the router sees the tokens of this micro-batch.

        Held no longer than the layer runs: recomputation enters again with the micro-batch it
        reruns, and a router outside of any block fails instead of taking another one's.
        """
        self._tokens = self._seen_here(params)
        try:
            yield
        finally:
            self._tokens = None

    def _seen_here(self, params: HdpPackedSeqParams) -> RouterTokens:
        """All tokens, or with sequence parallelism this tensor-parallel rank's run of them."""
        index, group = params.sequence_index, None
        if self.config.sequence_parallel and self.tp_group.size() > 1:
            group = self.tp_group
            index = index.chunk(group.size())[group.rank()]
        return RouterTokens(
            index, params.layout, params.comm, group, counts=params.routed, router=self
        )

    @property
    def tokens(self) -> RouterTokens:
        """Whose the tokens are that are routed now."""
        if self._tokens is None:
            raise RuntimeError("the router runs outside of its layer and knows no micro-batch")
        return self._tokens

    def apply_z_loss(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attaches the z-loss of this rank's real tokens to `logits` ``[t, E]``."""
        coeff = self.config.moe_z_loss_coeff
        if not coeff or not self._is_learning():
            return logits
        loss = z_loss(logits, self.tokens)
        self._note("z_loss", loss)
        return MoEAuxLossAutoScaler.apply(logits, coeff * loss)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron's choice of experts by logits ``[t, 1, E]``, the balancing loss attached.

        Returns:
            Weights ``[t, E]``, zero where a token does not go, and where it goes, bool ``[t, E]``.
        """
        probs, routing_map = super().routing(logits)
        if self._balance_coeff and self.training:
            logits = logits.view(routing_map.shape)
            count_routed(self._preferred(logits, routing_map), self.tokens)
        if self._balance_coeff and self._is_learning():
            scores = balancing_scores(logits, self.score_function)
            note = partial(self._note, "seq_load_balancing_loss")
            loss = sequence_balance_loss(scores, self.tokens, note)
            probs = MoEAuxLossAutoScaler.apply(probs, self._balance_coeff * loss)
        return probs, routing_map

    def _preferred(self, logits: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        """The experts of greatest scores, which the balancing loss counts, bool ``[t, E]``.

        A bias, or a choice of groups, may send a token elsewhere.
        """
        if self.expert_bias is None and not self.config.moe_router_group_topk:
            return routing_map
        chosen = logits.detach().topk(self.topk, dim=1).indices
        return torch.zeros_like(routing_map).scatter_(1, chosen, True)

    def _apply_expert_bias(
        self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        """Counts this rank's real tokens of each expert, once a step; Megatron moves the bias."""
        if self.enable_expert_bias and self._is_learning():
            is_real = self.tokens.is_real[:, None]
            self.local_tokens_per_expert += (routing_map & is_real).sum(dim=0)

    def _note(self, name: str, loss: torch.Tensor) -> None:
        self.losses[name] = self.losses.get(name, 0.0) + loss.detach()

    def _is_learning(self) -> bool:
        """False in evaluation and in the pass that recomputation repeats."""
        return bool(self.training) and torch.is_grad_enabled()


def _refuse(condition: bool, found: str, expected: str) -> None:
    if condition:
        raise ValueError(
            f"hybrid data parallelism does not support {found}, whose effect depends on the plan; "
            f"use {expected}"
        )
