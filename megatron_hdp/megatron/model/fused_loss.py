"""The model's last step under HDP: from hidden states to the sum of the loss, without logits.

Megatron's models call their output layer and give the logits to the cross entropy. Here the
output layer itself returns the loss when it is given labels. The seam, the same in megatron-core
0.16.1 to 0.19: a subclass of `GPTModel` overrides `_postprocess`, which ``forward`` calls with
keywords only (a hybrid has none: `FusedLossHybrid`), and puts a subclass of the output layer in the
stock one's place. Weights, their names and what checkpoints hold stay Megatron's. (From 0.18 on
``forward`` takes an `output_processor`, which could replace the override.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import get_attr_wrapped_model

from megatron_hdp.megatron.model.last_stage import LastStage
from megatron_hdp.megatron.model.taking import require_own, take_over_class
from megatron_hdp.runtime.loss import LossSums

_OF_LAYERS = ("input_ids", "position_ids", "attention_mask", "rotary_pos_emb")
"""Which of the model's arguments MTP layers take."""


class EndsInLoss:
    """What a model of Megatron's whose last stage returns the loss's sum has from HDP."""

    config: Any
    output_layer: ColumnParallelLinear
    post_process: bool
    share_embeddings_and_output_weights: bool
    pg_collection: Any
    shared_embedding_or_output_weight: Any
    mtp: Any
    embedding: Any

    def take_over_loss(self) -> None:
        """Puts HDP's output layer in the place of Megatron's, with the same weights.

        Raises:
            ValueError: an option of the output that the fused loss does not know.
        """
        for name in ("use_mup", "defer_embedding_wgrad_compute"):
            if getattr(self.config, name, None):
                raise ValueError(
                    f"the fused loss does not support {name} = {getattr(self.config, name)}: "
                    "leave it out or pass --no-hdp-fused-loss"
                )
        if self.gives_values and getattr(self, "mtp", None) is not None:
            raise ValueError(
                "found multi-token prediction in a model whose head gives values, expected none: "
                "its layers predict tokens; build the critic without them"
            )
        if self.post_process and not self.gives_values:
            self.output_layer = FusedLossOutputLayer.like(self.output_layer)

    @property
    def gives_values(self) -> bool:
        """Whether the last stage ends in a head of one output, as critics do; it stays stock."""
        head = getattr(self, "output_layer", None)
        return isinstance(head, torch.nn.Linear) and head.out_features == 1 and head.bias is None

    def gives_loss(self, labels: torch.Tensor | None, packed_seq_params: Any) -> bool:
        """Whether a forward pass ends in `loss_of` here."""
        has_head = getattr(packed_seq_params, "loss_head", None) is not None
        return self.post_process and (has_head or labels is not None)

    def loss_of(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        loss_mask: torch.Tensor | None,
        packed_seq_params: Any,
        behind: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The sum of the loss, a scalar, see `linear_cross_entropy`.

        With a loss of the caller's own: what it makes of the hidden states.

        Args:
            hidden_states: ``[s, 1, h]`` behind the last norm.
            labels: ``[1, s]``.
            loss_mask: ``[1, s]``.
            packed_seq_params: the micro-batch.
            behind: the hidden states and, after them, those of MTP's depths; called where they
                learn.
        """
        further = getattr(packed_seq_params, "further", None)
        states: Sequence[torch.Tensor] = ()
        if further is not None:
            hidden_states, *states = behind(hidden_states).chunk(1 + len(further.mask))
        is_whole_loss = bool(getattr(packed_seq_params, "is_whole_loss", False))
        loss_head = getattr(packed_seq_params, "loss_head", None)
        if loss_head is not None:
            loss = loss_head(self._last_stage(hidden_states, is_whole_loss))
        else:
            loss = self.output_layer(
                hidden_states,
                self._tied(),
                labels=labels,
                loss_mask=loss_mask,
                loss_sums=getattr(packed_seq_params, "loss_sums", None),
                is_whole_loss=is_whole_loss,
            )
        if further is None:
            return loss
        losses = [
            self.output_layer(
                one,
                self._tied(),
                labels=further.labels[depth][None],
                loss_mask=further.weights_of(depth, loss.dtype)[None],
                is_whole_loss=is_whole_loss,
                is_further=True,
            )
            for depth, one in enumerate(states, 1)
        ]
        return further.total(loss, losses)

    def _last_stage(self, states: torch.Tensor, is_whole_loss: bool) -> LastStage:
        """What a loss of the caller's own is given."""
        if self.gives_values:
            group, weight = self.pg_collection.tp, self.output_layer.weight
            return LastStage(states, group, self.config.sequence_parallel, lambda: (weight, None))
        found: LastStage = self.output_layer.last_stage(states, self._tied(), is_whole_loss)
        return found

    def _tied(self) -> torch.Tensor | None:
        """The embedding's weights where the output layer has none of its own."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else None


class FusedLossModel(EndsInLoss, GPTModel):
    """Megatron's GPT; given labels and a loss mask, the last stage returns the loss's sum."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.take_over_loss()

    @classmethod
    def adopt(cls, stock: GPTModel) -> None:
        """Makes a model that Megatron has built one of this class; its parameters stay."""
        take_over_class(stock, GPTModel, cls, ("_postprocess",))
        stock.take_over_loss()

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        *,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """Stock where no loss is asked for; else see `loss_of`."""
        given = {"labels": labels, "loss_mask": loss_mask, "packed_seq_params": packed_seq_params}
        if not self.gives_loss(labels, packed_seq_params):
            return super()._postprocess(hidden_states=hidden_states, **given, **others)

        def behind(states: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.mtp(
                hidden_states=states,
                packed_seq_params=packed_seq_params,
                embedding=self.embedding,
                **{name: others[name] for name in _OF_LAYERS},
            )
            return found

        return self.loss_of(hidden_states, **given, behind=behind)


class FusedLossHybrid(EndsInLoss):
    """The same of Megatron's ``HybridModel``, before which it stands among a model's bases.

    Megatron's forward stops at the hidden states where it believes that other stages come behind.
    """

    mtp_process: bool

    @classmethod
    def adopt(cls, stock: Any, base: type[Any]) -> None:
        """Makes a model that Megatron has built one of this class; its parameters stay.

        Args:
            stock: the model.
            base: Megatron's ``HybridModel``.
        """
        take_over_class(stock, base, cls, ("forward",))
        stock.take_over_loss()

    def forward(
        self,
        *args: Any,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """Stock where no loss is asked for; else see `loss_of`."""
        stock = partial(super().forward, *args, packed_seq_params=packed_seq_params, **others)  # type: ignore[misc]
        if not self.gives_loss(labels, packed_seq_params):
            found: torch.Tensor = stock(labels=labels, loss_mask=loss_mask)
            return found
        has_further = getattr(packed_seq_params, "further", None) is not None
        is_last, has_mtp = self.post_process, self.mtp_process
        self.post_process, self.mtp_process = False, has_mtp and has_further
        try:
            states = stock()
        finally:
            self.post_process, self.mtp_process = is_last, has_mtp
        return self.loss_of(states, labels, loss_mask, packed_seq_params, lambda behind: behind)


def head_gives_values(chunk: Any) -> bool | None:
    """See `EndsInLoss.gives_values`; None of a chunk that is not the last stage.

    None also of a model that its session has released.
    """
    model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    is_last = isinstance(model, EndsInLoss) and model.post_process
    return model.gives_values if is_last else None


class FusedLossOutputLayer(ColumnParallelLinear):
    """Megatron's output layer; given labels, it returns the loss instead of logits."""

    @classmethod
    def like(cls, stock: ColumnParallelLinear) -> FusedLossOutputLayer:
        """One with the weights and settings of `stock`."""
        if not isinstance(stock, ColumnParallelLinear) or stock.bias is not None:
            raise ValueError(
                f"the fused loss: found an output layer {stock}, expected ColumnParallelLinear "
                "without bias: pass --no-hdp-fused-loss"
            )
        require_own(stock, ColumnParallelLinear, ("forward",))
        layer = cls.__new__(cls)
        layer.__dict__.update(stock.__dict__)
        return layer

    def last_stage(
        self,
        states: torch.Tensor,
        weight: torch.Tensor | None,
        is_whole_loss: bool,
        is_further: bool = False,
    ) -> LastStage:
        """What a loss may take from here; arguments as of `forward`."""
        weight = self.weight if weight is None else weight
        take_weight = partial(_taken, weight, is_whole_loss, is_further)
        return LastStage(states, self.tp_group, self.sequence_parallel, take_weight)

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        loss_sums: LossSums | None = None,
        is_whole_loss: bool = False,
        is_further: bool = False,
    ) -> Any:
        """Stock without `labels`.

        Args:
            input_: hidden states ``[s, b, h]``, with sequence parallelism this rank's run of them.
            weight: tied weights, instead of the layer's own.
            runtime_gather_output: whether logits are gathered; the loss has none.
            labels: ``[b, s]``, all tokens on every tensor-parallel rank.
            loss_mask: ``[b, s]`` bool, or each token's weight.
            loss_sums: where losses are added up by group, too.
            is_whole_loss: whether backward follows once and begins at this loss with 1. Then the
                weights' gradient goes into Megatron's buffer of gradients at once, if there is one.
            is_further: whether DDP hears of the weights' gradient from another loss; what is in its
                buffer is all of this one's.
        """
        if labels is None or loss_mask is None:
            return super().forward(input_, weight, runtime_gather_output)
        targets, weights = (one.transpose(0, 1).flatten() for one in (labels, loss_mask))
        stage = self.last_stage(input_, weight, is_whole_loss, is_further)
        return stage.weighted_nll(None, targets, weights, loss_sums)


def _taken(
    weight: torch.Tensor, is_whole_loss: bool, is_further: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights as a fused loss takes them, and the buffer that it adds their gradient to."""
    main_grad = _buffer_of(weight) if is_whole_loss else None
    if main_grad is None:
        return weight, None
    taken = _added_to_main_grad(weight)
    return taken.detach() if is_further else taken, main_grad


def _buffer_of(weight: torch.Tensor) -> torch.Tensor | None:
    """Where Megatron's DDP sums a weight's gradients, if chunks may be added to it unrounded."""
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    if not weight.requires_grad or main_grad is None:
        return None
    exact = torch.promote_types(weight.dtype, torch.float32)
    return main_grad if main_grad.dtype == exact else None


def _added_to_main_grad(weight: torch.Tensor) -> torch.Tensor:
    """The weight whose gradient is in its buffer, such that DDP adds nothing to it again.

    DDP waits for a gradient of every parameter, and is told not to add this one. A weight that is
    the embedding on the same stage too (Megatron marks it ``zero_out_wgrad``) gets the embedding's,
    which DDP must add; from here it gets none.
    """
    if getattr(weight, "zero_out_wgrad", False):
        return weight.detach()
    weight.grad_added_to_main_grad = True
    return weight
