"""HDP under a loop of the caller's own: plan a batch, run it, leave gradients to the optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_hdp.data.steps import RankMicroBatch, RankShare, shares_of
from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.checkpoint.weights import load_weights
from megatron_hdp.megatron.execution import HdpExecutor, OwnLoss, RankOutcome, in_mode
from megatron_hdp.megatron.lm.changes import Changes
from megatron_hdp.megatron.lm.model import take_over
from megatron_hdp.megatron.media import Encoding, JobEncoder, MediaEncoder
from megatron_hdp.megatron.model import build_chunks
from megatron_hdp.megatron.optimizer import build_optimizer
from megatron_hdp.megatron.options import TrainingArguments, parse_arguments
from megatron_hdp.megatron.step import build_executor
from megatron_hdp.megatron.world import World, give_state
from megatron_hdp.planner import Plan
from megatron_hdp.runtime.gathering import EveryRankError, on_every_rank, summed_by_name
from megatron_hdp.runtime.timeline import Timeline
from megatron_hdp.session.batch import CheckedBatch, TokenBatch, num_sequences
from megatron_hdp.session.calls import (
    divisor_of,
    kind_of,
    require_head,
    require_known,
    require_loss,
    require_plan,
    require_result,
    require_same,
)
from megatron_hdp.session.losses import FromHidden, FromValues, Loss
from megatron_hdp.session.media import rows_in_place, with_items
from megatron_hdp.session.model_options import arguments_of_model, built_as
from megatron_hdp.session.moving import SessionPlace, world_of
from megatron_hdp.session.objectives import LogProbs, OwnFunction, Values, WeightedNll
from megatron_hdp.session.outcome import (
    SessionReport,
    added_up,
    clear_gradients,
    finish_gradients,
    require_finite_loss,
    totals_of,
)
from megatron_hdp.session.watch import Watch, watched


class HdpSession:
    """Runs global batches of sequences under HDP; loop, data and optimizer are the caller's.

    Every rank of the job makes one and makes the same calls with the same arguments: whole batches,
    of which each rank reads its part. They are compared before anything is communicated; a
    difference stops all ranks.

    Attributes:
        arguments: of the run.
        chunks: this rank's parts of the model, each in Megatron's DDP.
        place: of this rank.
        cost_model: that plans are made by.
    """

    def __init__(
        self, arguments: TrainingArguments, chunks: Sequence[Any], *, vocab_size: int
    ) -> None:
        """Prepare to run a model, once Megatron's groups are there.

        Args:
            arguments: those of the training command that say what the model is, how it is laid out
                over ranks and how it is planned; what they say of data and batches is not looked
                at.
            chunks: this rank's parts of the model, each in Megatron's DDP; made by `build_chunks`,
                or by Megatron and adapted before they were wrapped.
            vocab_size: token ids must be below this.

        Raises:
            ValueError: options that a session does not know.
            DisagreementError: ranks would plan by different cost models.
        """
        require_known(arguments)
        self.arguments = arguments
        self.chunks = list(chunks)
        self._timeline = Timeline()
        self._vocab_size = vocab_size
        self._media: JobEncoder | None = None
        self._world: World | None = None
        self._optimizer: Any = None
        self._has_joined = self._has_groups = self._is_released = False
        self._changes: Changes | None = None
        self._begin(build_executor(arguments, self.chunks, self._timeline))

    def _begin(self, executor: HdpExecutor) -> None:
        found = SessionPlace.of(self.arguments, executor, self._vocab_size)
        self._executor, self.place = executor, executor.place
        self.cost_model, self._settings = found.cost_model, found.settings
        self._reader, self._further = found.reader, found.further
        self._watch = Watch(self.arguments, self._timeline)
        if self._media is not None:
            self.attach_encoder(self._media.encoder, **vars(self._media.how))

    @classmethod
    def from_flags(cls, flags: Sequence[str], *, vocab_size: int) -> HdpSession:
        """A session with a model of its own, freshly initialised.

        Joins the job that torchrun started and makes Megatron's groups, unless both are there;
        `close` undoes what was done. A second session, of a critic or a reference, has the first
        one's layout.

        Args:
            flags: of the training command, ``--config FILE`` among them.
            vocab_size: entries of the tokenizer.

        Raises:
            OptionError: an unknown, missing or unusable flag.
            ValueError: the ranks do not fit the layout, or do not come.
        """
        arguments = parse_arguments(["--hybrid-data-parallel", *flags], needs_data=False)
        has_joined = not dist.is_initialized()
        if has_joined:
            parallel.join_job(arguments)
        has_groups = not parallel.has_groups(arguments)
        if has_groups:
            parallel.initialise(arguments)
        parallel.set_seeds(arguments.seed)
        session = cls(arguments, build_chunks(arguments, vocab_size), vocab_size=vocab_size)
        session._has_joined, session._has_groups = has_joined, has_groups
        return session

    @classmethod
    def of_model(
        cls,
        chunks: Sequence[Any],
        *,
        vocab_size: int,
        seq_length: int,
        hdp_tokens_per_rank: int,
        stall_timeout_seconds: float | None = None,
        **options: Any,
    ) -> HdpSession:
        """A session over a GPT or a hybrid built by other means from Megatron's classes.

        It is adapted in place: classes of attention, positions, routers and output change; weights,
        their names and the names of classes do not, so exporters of weights know it. Until
        `release` the session runs it, not the framework's own forward.

        Args:
            chunks: this rank's parts of the model, each in Megatron's DDP, built with
                ``context_parallel_size = 1`` and ``calculate_per_token_loss = True``; several with
                virtual stages. Ranks of the data-parallel group are the HDP ranks.
            vocab_size: token ids must be below this.
            seq_length: tokens of the longest sequence.
            hdp_tokens_per_rank: capacity: tokens that a rank can hold in one micro-batch.
            stall_timeout_seconds: for which ranks may wait in a call for one that makes no
                progress; the others end, too, if one fails. Without it no heartbeat runs.
            options: others of HDP's, by the names of `HdpOptions`: ``hdp_strategy="naive"``.

        Raises:
            ValueError: a model or options that HDP does not know; the model is as it was.
        """
        changes = Changes(chunks)
        try:
            first = take_over(chunks)
            arguments = arguments_of_model(
                first.config,
                chunks[0].ddp_config,
                seq_length=seq_length,
                **built_as(first),
                hdp_tokens_per_rank=hdp_tokens_per_rank,
                stall_timeout_seconds=stall_timeout_seconds,
                **options,
            )
            session = cls(arguments, chunks, vocab_size=vocab_size)
        except BaseException:
            changes.end()
            changes.undo()
            raise
        changes.end()
        session._changes = changes
        return session

    def release(self) -> None:
        """Gives the model of `of_model` back as it was, but for weights and gradients.

        The framework's own forward runs again; the session does not. Of sessions over one model,
        release the latest first.
        """
        if self._changes is not None:
            self._watch.end()
            self._changes.undo()
            self._changes, self._is_released = None, True

    @watched(ValueError)
    def load_weights(self, folder: str | os.PathLike[str], optimizer: Any = None) -> None:
        """Loads the weights of the latest checkpoint in a folder, whatever layout saved it.

        Args:
            folder: of checkpoints, as ``--save`` or ``megatron-hdp convert --to`` were given it.
            optimizer: of the model, if it was built before: it may keep weights of its own.

        Raises:
            ValueError: on every rank: there is none, it is damaged, or it is of another model.
        """
        checksums = self.arguments.checkpoint_checksums
        load_weights(self.chunks, Path(folder), checksums=checksums, say=parallel.say)
        if optimizer is not None:
            optimizer.reload_model_params()

    @property
    def is_first_rank(self) -> bool:
        """True on the one rank of the job that prints and writes."""
        return parallel.is_first_rank()

    def build_optimizer(self) -> Any:
        """Megatron's optimizer over the model, as the flags of `from_flags` configure it.

        Raises:
            ValueError: the session was made of a model, without such flags.
        """
        if self.arguments.lr is None:
            raise ValueError(
                "found no flags of an optimizer, expected those of HdpSession.from_flags: make the "
                "optimizer as the framework does that built the model"
            )
        self._optimizer = build_optimizer(self.arguments, self.chunks)
        return self._optimizer

    def attach_encoder(self, encoder: MediaEncoder, **how: Any) -> None:
        """Lets batches have items; a step leaves the encoder's gradients in ``grad``.

        Args:
            encoder: with the same weights on every rank, which all call this.
            how: fields of `Encoding`: ``balance="step"``, ``waves=2``.
        """
        place = self.place, self._settings, self._reader
        self._media = JobEncoder(encoder, self.arguments, self.chunks, *place, Encoding(**how))

    def leave(self) -> None:
        """Leaves the job, and drops all that is bound to its members; waits for no other rank.

        Model, weights and the optimizer of `build_optimizer` stay, the same objects. Nothing may be
        called but `enter`. Call it between two steps, or when a step has raised `RankFailure`,
        behind whose ``except`` block nothing refers to what the step has kept.

        Raises:
            ValueError: the session is not of `from_flags`; or experts, or the optimizer's state,
                lie across HDP ranks. Nothing was changed.
        """
        world = self._world or world_of(self.arguments, self.chunks, self._timeline)
        world.optimizer = self._optimizer
        world.require_movable()
        self._watch.end()
        del self._executor, self._reader, self._settings, self._further
        self._world = world
        world.leave()

    def enter(
        self, store: dist.Store, rank: int, world_size: int, *, state_of: int | None = None
    ) -> None:
        """Enters a job that it has not been in, with any number of ranks that fits the layout.

        Every rank of the job must call it, with the same arguments but `rank`.

        Args:
            store: in which only these ranks find each other, as a ``PrefixStore`` for each job.
            rank: this one's, from 0.
            world_size: ranks of the job.
            state_of: an HDP rank of it whose weights and optimizer all take over; without one all
                must have the same, as ranks have that were together before.

        Raises:
            ValueError: it has not left a job; or the ranks cannot be cut into model replicas.
        """
        if self._world is None:
            raise ValueError("found a session in a job, expected one that has left it: call leave")
        executor = self._world.enter(parallel.JobPlace(store, rank, world_size))
        self._world = None
        self._has_joined = self._has_groups = True
        if state_of is not None:
            give_state(self.chunks, self._optimizer, state_of)
        self._begin(executor)

    def plan(self, batch: TokenBatch | Sequence[Any]) -> Plan:
        """The plan of a batch by its lengths, as `step` makes it; communicates nothing.

        Raises:
            ValueError: a batch that cannot be run, or a sequence that fits on no number of ranks.
        """
        return self._checked(batch).planned(self._settings)

    @watched(EveryRankError)
    def step(
        self,
        batch: TokenBatch | Sequence[Any],
        loss: Loss | None = None,
        *,
        divisor: float | None = None,
        plan: Plan | None = None,
        forward_only: bool = False,
    ) -> SessionReport:
        """Runs a global batch: clears Megatron's gradients, then leaves this batch's in them.

        What is minimised is one sum over all tokens with loss, divided once. Without `loss` it is
        the sum of each one's negative log-probability, in nats, times its weight. The gradient is
        that of one rank that ran each sequence alone, whatever the plan. What routers of experts
        add is summed over tokens and divided likewise; multi-token prediction, a mean, is not.

        Args:
            batch: the sequences; a plain sequence of arrays of token ids will do.
            loss: the caller's own.
            divisor: above 0; by default the number of tokens with loss.
            plan: to run instead of the session's, for the same lengths.
            forward_only: leaves gradients alone, and the model is in evaluation.

        Raises:
            ValueError: on every rank: a batch, loss or plan that cannot be run; a loss that raised
                on any rank.
            DisagreementError: ranks hold different batches, plans, losses or divisors.
            RankFailure: communication failed, or a call before; names the rank to blame.
            NonFiniteError: the loss or a gradient is NaN or infinite.
        """

        def require() -> None:
            require_loss(loss, divisor, num_sequences(batch))
            if not isinstance(loss, FromHidden):
                require_head(self.chunks, isinstance(loss, FromValues))

        call = "step", kind_of(loss), divisor, forward_only
        checked, made, share = self._agreed(batch, plan, require, *call)
        objective = WeightedNll(checked) if loss is None else OwnFunction(checked, loss)
        loss_tokens = int(checked.num_loss_tokens(objective.shift).sum())
        divisor = divisor_of(divisor, loss_tokens)
        parameters = loss.parameters if isinstance(loss, FromHidden) else ()
        if not forward_only:
            clear_gradients(self.chunks, parameters)
        micro_batches, outcome = self._run(checked, share, divisor, objective, forward_only)
        sums = {}
        if isinstance(objective, OwnFunction):
            objective.require_run(parallel.compute_device())
            sums = objective.sums()
        job = totals_of(outcome, self.place, bool(sums))
        require_finite_loss(job["loss"], micro_batches, outcome.losses)
        mine = sums if self.place.tensor_rank == 0 else {}  # tensor-parallel ranks hold the same
        figures = summed_by_name(mine, parallel.compute_device()) if job["ranks with sums"] else {}
        if not forward_only:
            finish_gradients(self.chunks, parameters, self.place, divisor)
        return SessionReport(
            loss=job["loss"] / divisor,
            divisor=divisor,
            sums=figures,
            sequences=len(checked.lengths),
            tokens=len(checked.token_ids),
            loss_tokens=loss_tokens,
            plan=made,
            makespan_s=job["makespan_s"],
            ring_bytes=int(job["ring_bytes"]),
            offloaded_bytes=int(job["offloaded_bytes"]),
            mtp_loss=None if forward_only else self._further.mean(job["further losses"], divisor),
        )

    @watched(EveryRankError)
    def log_probs(
        self,
        batch: TokenBatch | Sequence[Any],
        *,
        temperature: float | Sequence[float] = 1.0,
        dtype: torch.dtype = torch.float32,
        to: Literal["all", "first"] = "all",
        with_entropies: bool = False,
        plan: Plan | None = None,
    ) -> list[torch.Tensor] | None:
        """Log-probabilities of a batch's tokens, each given those before it, in the batch's order.

        Forward only, in evaluation; gradients and weights stay as they are. Logits exist a chunk
        at a time, and only for tokens in the batch's loss mask.

        Args:
            batch: the sequences; weights and arrays are not used.
            temperature: what logits are divided by before the softmax, above 0; one, or one for
                each sequence.
            dtype: of the result: float32 or float64.
            to: which ranks get the result: all of them, or the job's first.
            with_entropies: of the distributions that the tokens were drawn from, too, in nats.
            plan: to run instead of the session's, for the same lengths.

        Returns:
            One tensor a sequence, ``[length]`` nats, on the CPU, with entropies ``[2, length]``; 0
            for a sequence's first token and for those outside the loss mask. None on ranks that
            were to get none.

        Raises:
            ValueError: on every rank: a batch or a plan that cannot be run.
            DisagreementError: ranks hold different batches or plans.
            NonFiniteError: one of them is NaN or infinite.
        """

        def require() -> None:
            require_result(temperature, dtype, to, num_sequences(batch))
            require_head(self.chunks, False)

        call = ("log_probs", temperature, str(dtype), to, with_entropies)
        checked, _, share = self._agreed(batch, plan, require, *call)
        objective = LogProbs(checked, temperature, with_entropies)
        return self._kept(objective, checked, share, dtype, to)

    @watched(EveryRankError)
    def values(self, batch: TokenBatch | Sequence[Any]) -> list[torch.Tensor] | None:
        """What a head of one output says: ``[length]``, 0 outside the loss mask; as `log_probs`."""
        require = partial(require_head, self.chunks, True)
        checked, _, share = self._agreed(batch, None, require, "values")
        return self._kept(Values(checked), checked, share, torch.float32, "all")

    def close(self) -> None:
        """Ends what `from_flags` began, and the heartbeats; the model stays."""
        self._watch.end()
        if self._has_groups:
            parallel.finish()
        if self._has_joined:
            parallel.leave_job()
        self._has_joined = self._has_groups = False

    def _checked(self, batch: TokenBatch | Sequence[Any]) -> CheckedBatch:
        given, longest = TokenBatch.of(batch), self.arguments.seq_length
        checked = CheckedBatch(given, vocab_size=self._vocab_size, max_length=longest)
        return with_items(checked, self._media)

    def _agreed(
        self,
        batch: TokenBatch | Sequence[Any],
        plan: Plan | None,
        require: Callable[[], object],
        *call: object,
    ) -> tuple[CheckedBatch, Plan, RankShare]:
        """Batch, plan and this rank's share, once all ranks hold the same and will do the same.

        `require` raises a ValueError if the call's other arguments are wrong.
        """

        def prepared() -> tuple[CheckedBatch, Plan, RankShare]:
            require()
            if self._is_released:
                raise ValueError(
                    "found a session that has released its model, expected one that has it: make "
                    "another by HdpSession.of_model"
                )
            checked = self._checked(batch)
            made = checked.planned(self._settings) if plan is None else plan
            require_plan(made, self._settings, self.cost_model, self.place.num_hdp_ranks)
            (share,) = shares_of(self._settings, checked.step(), made).of([self.place.hdp_rank])
            if self._media is not None and checked.items is not None:
                checked.step_media = self._media.prepared(checked, checked.items, made, checked)
            return checked, made, share

        checked, made, share = on_every_rank(prepared, parallel.compute_device())
        require_same(call, checked, made, parallel.compute_device())
        checked.decode_media(self.arguments.hdp_corrupt_limit)
        return checked, made, share

    def _kept(
        self, objective: LogProbs, checked: CheckedBatch, share: RankShare, dtype: Any, to: str
    ) -> list[torch.Tensor] | None:
        micro_batches, outcome = self._run(checked, share, 1.0, objective, True)
        total = totals_of(outcome, self.place, False)["loss"]
        require_finite_loss(total, micro_batches, outcome.losses)
        is_mine = self.place.is_last_stage and self.place.tensor_rank == 0
        found = added_up(objective.all(dtype) if is_mine else objective.none(dtype), to)
        return None if found is None else checked.per_sequence(found)

    def _run(
        self,
        checked: CheckedBatch,
        share: RankShare,
        divisor: float,
        objective: OwnLoss,
        forward_only: bool,
    ) -> tuple[tuple[RankMicroBatch, ...], RankOutcome]:
        """This rank's micro-batches, once they have run."""
        micro_batches = checked.micro_batches(share, self._reader)
        weights = () if forward_only else self._further.weights(micro_batches, divisor)
        with (
            in_mode(self.chunks, training=not forward_only),
            rows_in_place(checked, micro_batches, divisor, forward_only) as micro_batches,
        ):
            outcome = self._executor.run(
                micro_batches,
                divisor,
                forward_only,
                ends_together=share.ends_together,
                own_loss=objective,
                further_weights=weights,
            )
        return micro_batches, outcome
