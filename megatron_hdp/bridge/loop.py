"""A step of Megatron-Bridge's loop: its micro-batches become one batch of a session.

Loop, data, optimizer, learning rate, logs and checkpoints stay Bridge's, and so does what a rank
reads: its share of the global batch. The shares are gathered, planned over all ranks and run; the
loop gets the sum of losses and the number of tokens that it would have added up itself.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_hdp.bridge.refusals import require_known
from megatron_hdp.bridge.rows import Rows
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.runtime.gathering import on_every_rank
from megatron_hdp.session import HdpSession, TokenBatch

_SKIPPED = "skip_getting_attention_mask_from_dataset"


class HdpLoop:
    """What a process keeps of a run: the session over Bridge's model, from its first step on.

    Attributes:
        session: of the run, None before its first step.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        """With HDP's options by name, ``hdp_tokens_per_rank`` among them."""
        self.options = options
        self.session: HdpSession | None = None

    def forward_backward(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: list[Any],
        num_microbatches: int,
        pg_collection: Any,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        **_: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """One global batch, in the place of Megatron's schedule.

        Returns:
            What Bridge wants of one micro-batch: float64 ``[2]``, the sum of losses in nats and the
            tokens with loss, each divided by the ranks over which Bridge adds them up.

        Raises:
            ValueError: on every rank: a configuration or a batch that HDP does not know.
        """

        def read() -> Rows:
            if collect_non_loss_data:
                raise ValueError(
                    "found a process_non_loss_data_func, expected none, because HDP collects the "
                    "loss alone: leave it out"
                )
            require_known(state.cfg, forward_step_func)
            if data_iterator is None:
                raise ValueError(
                    "found a rank without a data iterator, expected one on every rank, as Bridge's "
                    "own data sets have it"
                )
            rows = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
            found = [next(rows) for _ in range(num_microbatches)]
            if getattr(state.cfg.dataset, _SKIPPED, True):  # as in Bridge's step: it is not read
                found = [{**one, "attention_mask": None} for one in found]
            return Rows.of(found)

        state, device = forward_step_func.args[0], compute_device()
        mine = on_every_rank(read, device)
        if self.session is None:
            self.session = HdpSession.of_model(
                model,
                vocab_size=state.cfg.model.vocab_size,
                seq_length=state.cfg.model.seq_length + 1,  # the last label, too
                **self.options,
            )
        rows = mine.gathered(pg_collection.dp, device)
        batch = TokenBatch(rows.tokens, loss_mask=rows.trained)
        report = self.session.step(batch, forward_only=forward_only)
        if not forward_only:
            _count_operations(state, mine)
        sums = torch.tensor(
            [report.loss * report.divisor, report.loss_tokens], dtype=torch.float64, device=device
        )
        return [{"lm loss": sums / pg_collection.dp_cp.size()}]

    def end(self) -> None:
        """Gives the model back as Bridge made it; another run makes another session."""
        session, self.session = self.session, None
        if session is not None:
            session.release()
            session.close()


def _count_operations(state: Any, rows: Rows) -> None:
    """Has Bridge count each sequence at its own length in its throughput."""
    inputs = rows.lengths() - 1
    state._flops_seqlen_sum += int(inputs.sum())
    state._flops_seqlen_sq_sum += int((inputs**2).sum())
    state._flops_requires_global_reduce = True
