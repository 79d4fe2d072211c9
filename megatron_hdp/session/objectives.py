"""What the last stage makes of a micro-batch: weighted sums, losses of the caller's, log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_hdp.arrays import AnyArray, Int64Array
from megatron_hdp.data.steps import RankMicroBatch
from megatron_hdp.megatron.model import LastStage
from megatron_hdp.runtime.gathering import on_every_rank
from megatron_hdp.session.batch import CheckedBatch
from megatron_hdp.session.losses import FromHidden, FromLogProbs, FromValues, Loss, TokenFunction

Arrays = dict[str, AnyArray]
Tensors = Mapping[str, torch.Tensor]

_ROWS, _TARGETS, _WEIGHTS, _ARRAY = "own rows", "own targets", "own weights", "own array "
_TEMPERATURES = "own temperatures"


def tokens_with_loss(
    batch: CheckedBatch, micro_batch: RankMicroBatch, shift: int
) -> tuple[Int64Array, Int64Array]:
    """(rows of the micro-batch, places among the batch's tokens) of what carries loss, ``[n]``.

    Args:
        batch: of all ranks.
        micro_batch: of this one.
        shift: 1 where a row predicts the token behind it, 0 where it is about its own.
    """
    ids = np.array([*micro_batch.sequence_ids, 0])[micro_batch.sequence_index]
    at = micro_batch.positions + shift
    is_there = (micro_batch.sequence_index >= 0) & (at < batch.lengths[ids])
    places = np.where(is_there, batch.offsets[ids] + at, 0)
    rows = np.flatnonzero(is_there & batch.loss_mask[places])
    return rows, places[rows]


class _OfTokens:
    """An `OwnLoss` of the tokens of a batch that carry loss."""

    shift = 1

    def __init__(self, batch: CheckedBatch) -> None:
        self._batch = batch

    def arrays(self, micro_batch: RankMicroBatch) -> Arrays:
        """See `OwnLoss.arrays`."""
        rows, places = tokens_with_loss(self._batch, micro_batch, self.shift)
        of_kind = self._of_places(places)
        return {_ROWS: rows, _TARGETS: self._batch.token_ids[places], **of_kind}

    def _of_places(self, places: Int64Array) -> Arrays:
        """What else it is given of these tokens."""
        return {}


class _AtTemperature(_OfTokens):
    """Of log-probabilities at a temperature, or at one of each sequence."""

    def __init__(
        self, batch: CheckedBatch, temperature: float | Sequence[float], with_entropies: bool
    ) -> None:
        super().__init__(batch)
        self._with_entropies = with_entropies
        self._temperature, self._of_each = 1.0, None
        if isinstance(temperature, Sequence):
            self._of_each = np.repeat(np.array(temperature, dtype=np.float64), batch.lengths)
        else:
            self._temperature = float(temperature)

    def _of_places(self, places: Int64Array) -> Arrays:
        return {} if self._of_each is None else {_TEMPERATURES: self._of_each[places]}

    def _log_probs(self, tensors: Tensors, last: LastStage) -> torch.Tensor:
        temperature = tensors.get(_TEMPERATURES, self._temperature)
        return last.log_probs(tensors[_ROWS], tensors[_TARGETS], temperature, self._with_entropies)


class WeightedNll(_OfTokens):
    """Sum of the tokens' negative log-probabilities, each times its weight."""

    def _of_places(self, places: Int64Array) -> Arrays:
        weights = self._batch.weights
        return {_WEIGHTS: np.ones(len(places)) if weights is None else weights[places]}

    def of(self, micro_batch: RankMicroBatch, tensors: Tensors, last: LastStage) -> torch.Tensor:
        """See `OwnLoss.of`."""
        return last.weighted_nll(tensors[_ROWS], tensors[_TARGETS], tensors[_WEIGHTS])


class LogProbs(_AtTemperature):
    """Keeps the tokens' log-probabilities, and entropies; nothing to learn from."""

    def __init__(
        self, batch: CheckedBatch, temperature: float | Sequence[float], with_entropies: bool
    ) -> None:
        super().__init__(batch, temperature, with_entropies)
        self._shape = (2,) * with_entropies + (len(batch.token_ids),)
        self._found: list[tuple[Int64Array, torch.Tensor]] = []

    def of(self, micro_batch: RankMicroBatch, tensors: Tensors, last: LastStage) -> torch.Tensor:
        """See `OwnLoss.of`."""
        found = self._log_probs(tensors, last)
        _, places = tokens_with_loss(self._batch, micro_batch, self.shift)
        self._found.append((places, found))
        return found.sum()

    def none(self, dtype: torch.dtype) -> torch.Tensor:
        """0 for all tokens of the batch, ``[tokens]``, with entropies ``[2, tokens]``."""
        return torch.zeros(self._shape, dtype=dtype)

    def all(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's among `none`."""
        found = self.none(dtype)
        for places, values in self._found:
            found[..., torch.from_numpy(places)] = values.to("cpu", dtype)
        return found


class Values(LogProbs):
    """Keeps what a head of one output says of the tokens."""

    shift = 0

    def __init__(self, batch: CheckedBatch) -> None:
        super().__init__(batch, 1.0, False)

    def _log_probs(self, tensors: Tensors, last: LastStage) -> torch.Tensor:
        return last.values(tensors[_ROWS])


class _WrongLosses(ValueError):
    pass


class OwnFunction(_AtTemperature):
    """What a function of the caller's makes of the tokens with loss."""

    def __init__(self, batch: CheckedBatch, loss: Loss) -> None:
        temperature = loss.temperature if isinstance(loss, FromLogProbs) else 1.0
        super().__init__(batch, temperature, _has_entropies(loss))
        self._loss = loss
        self.shift = 1 if isinstance(loss, FromLogProbs) else 0
        self._sums: dict[str, torch.Tensor] = {}
        self._failure: Exception | None = None

    def _of_places(self, places: Int64Array) -> Arrays:
        arrays = {f"{_ARRAY}{name}": one[places] for name, one in self._batch.arrays.items()}
        return arrays | super()._of_places(places)

    def of(self, micro_batch: RankMicroBatch, tensors: Tensors, last: LastStage) -> torch.Tensor:
        """See `OwnLoss.of`."""
        rows = tensors[_ROWS]
        if isinstance(self._loss, FromLogProbs):
            given = self._log_probs(tensors, last)
        elif isinstance(self._loss, FromValues):
            given = last.values(rows)
        else:
            given = last.hidden(rows)
        if not len(rows) or self._failure is not None:  # a mean of nothing would be NaN
            return 0 * given.sum()
        try:
            return self._of_function(given.T if _has_entropies(self._loss) else given, tensors)
        # others wait for this rank's part of the step: all learn of it behind the step
        except Exception as error:
            self._failure = error
            return 0 * given.sum()

    def require_run(self, device: torch.device) -> None:
        """Raises on every rank if the function did on any; every rank must call this.

        Raises:
            ValueError: names the rank, and what it raised.
        """

        def require() -> None:
            if isinstance(self._failure, _WrongLosses):
                raise self._failure
            if self._failure is not None:
                kind, function = type(self._failure).__name__, name_of(self._loss.function)
                raise ValueError(f"{function} raised {kind}: {self._failure}")

        try:
            on_every_rank(require, device)
        except ValueError as error:
            raise error from self._failure

    def _of_function(self, given: torch.Tensor, tensors: Tensors) -> torch.Tensor:
        arrays = {name: tensors[f"{_ARRAY}{name}"] for name in self._batch.arrays}
        given_back = self._loss.function(given, arrays)
        losses, figures = given_back if isinstance(given_back, tuple) else (given_back, {})
        self._require(losses, len(given))
        for name, one in figures.items():
            if not isinstance(one, torch.Tensor) or one.shape not in ((len(given),), ()):
                found = f"of shape {tuple(one.shape)}" if torch.is_tensor(one) else repr(one)
                raise _WrongLosses(
                    f"{name_of(self._loss.function)} returned the figure {name!r} {found}, "
                    f"expected a tensor of shape ({len(given)},) or ()"
                )
            total = one.detach().sum().double()
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))

    def sums(self) -> dict[str, float]:
        """The figures that the function returned, summed over this rank's micro-batches."""
        return {name: float(one) for name, one in self._sums.items()}

    def _require(self, losses: object, num: int) -> None:
        what = _GIVEN[type(self._loss)]
        if not isinstance(losses, torch.Tensor):
            raise _WrongLosses(
                f"{name_of(self._loss.function)} returned {type(losses).__name__}, expected a "
                "tensor of losses, or a pair of it and figures by name"
            )
        if losses.shape not in ((num,), ()):
            raise _WrongLosses(
                f"{name_of(self._loss.function)} returned losses of shape {tuple(losses.shape)}, "
                f"expected one for each of the {num} {what} that it was given, or their sum"
            )
        if torch.is_grad_enabled() and not losses.requires_grad:
            raise _WrongLosses(
                f"{name_of(self._loss.function)} returned losses without a gradient, expected them "
                f"to depend on the {what} that it was given: detach nothing of these"
            )


_GIVEN: dict[type, str] = {
    FromLogProbs: "log-probabilities",
    FromHidden: "hidden states",
    FromValues: "values",
}


def _has_entropies(loss: Loss) -> bool:
    return isinstance(loss, FromLogProbs) and loss.with_entropies


def name_of(function: TokenFunction) -> str:
    """What messages call a function."""
    return getattr(function, "__qualname__", type(function).__name__)
