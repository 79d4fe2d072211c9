"""One step without HDP: megatron-core's own dataset, schedule and finalisation, untouched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_hdp.data import DataOrder, SourceOrder
from megatron_hdp.data.mixture import Position
from megatron_hdp.data.order import UNNAMED
from megatron_hdp.data.tokenizers import Tokenizer
from megatron_hdp.megatron.options import TrainingArguments, model_shape
from megatron_hdp.megatron.parallel import compute_device
from megatron_hdp.megatron.step.figures import StepReport
from megatron_hdp.planner.shape import seen_in_window
from megatron_hdp.runtime.health import fingerprint
from megatron_hdp.runtime.host_to_device import to_device


def build_datasets(
    arguments: TrainingArguments, tokenizer: Tokenizer, num_samples: tuple[int, int]
) -> tuple[GPTDataset, GPTDataset | None]:
    """Megatron's GPTDataset for training and validation: documents in a row, cut at seq-length."""
    config = GPTDatasetConfig(
        random_seed=arguments.seed,
        sequence_length=arguments.seq_length,
        **_blend_of(arguments),
        tokenizer=SimpleNamespace(
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            eos=tokenizer.eod,
            pad=-1,
            unique_identifiers=OrderedDict(type=type(tokenizer).__name__),
        ),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [*num_samples, 0], lambda: True, config)
    train, valid, _ = builder.build()
    return train, valid


def _blend_of(arguments: TrainingArguments) -> dict[str, Any]:
    """What Megatron's configuration of a dataset says of its sources.

    Raises:
        ValueError: flags that this command knows under HDP only.
    """
    if arguments.sft or arguments.data_args_path or arguments.per_split_data_args_path:
        raise ValueError(
            "--sft, --data-args-path and --per-split-data-args-path go with "
            "--hybrid-data-parallel in this command: add it, or train with Megatron-LM's script"
        )
    if arguments.data_path:
        return {"blend": get_blend_from_list(list(arguments.data_path)), "split": arguments.split}
    lists = (arguments.train_data_path, arguments.valid_data_path, arguments.test_data_path)
    return {"blend_per_split": [get_blend_from_list(list(one) or None) for one in lists]}


class StockSteps:
    """The steps over one stock dataset; a sample is a sequence of seq-length tokens."""

    def __init__(
        self, arguments: TrainingArguments, model: DistributedDataParallel, dataset: GPTDataset
    ) -> None:
        self.model = model
        self.dataset = dataset
        self.micro_batch_size = arguments.micro_batch_size
        self.seq_length = arguments.seq_length
        self.num_tensor_ranks = arguments.tensor_model_parallel_size
        parallel = parallel_state.get_data_parallel_world_size() * arguments.micro_batch_size
        self.global_batch_size = arguments.global_batch_size or parallel
        if self.global_batch_size % parallel:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of "
                f"--micro-batch-size x data-parallel ranks = {parallel}: change one of them"
            )
        self.num_micro_batches = self.global_batch_size // parallel
        window = model_shape(arguments, vocab_size=0).window
        self._seen_in_window = seen_in_window(arguments.seq_length, window)
        self.order = DataOrder(
            hybrid_data_parallel=False,
            seed=arguments.seed,
            seq_length=arguments.seq_length,
            sources={UNNAMED: _order_of(dataset)},
        )
        config = get_model_config(model)
        config.no_sync_func = model.no_sync
        config.finalize_model_grads_func = finalize_model_grads

    def follow(self, order: DataOrder) -> None:
        """Nothing to do: Megatron's own order has one version."""

    def run(self, position: Position, forward_only: bool = False) -> StepReport:
        """Runs the step that begins at a position; leaves gradients in the DDP buffers."""
        consumed = position.sequences
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=self._batches(consumed),
            model=[self.model],
            num_microbatches=self.num_micro_batches,
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
        )
        sums = torch.zeros(2, device=compute_device())  # only the last stage has any
        for report in reports:
            sums += report["lm loss"]
        dist.all_reduce(sums)
        loss_sum, loss_tokens = sums.tolist()
        return StepReport(
            loss=loss_sum / loss_tokens,
            tokens=self.global_batch_size * self.seq_length,
            squared_tokens=self.global_batch_size * self.seq_length**2,
            seen_in_window=int(self.global_batch_size * self._seen_in_window),
            loss_tokens=round(loss_tokens / self.num_tensor_ranks),
            sequences=self.global_batch_size,
            position_after=Position(
                steps=position.steps + 1,
                sequences=consumed + self.global_batch_size,
                tokens=position.tokens + self.global_batch_size * self.seq_length,
            ),
            micro_batches_min=self.num_micro_batches,
            micro_batches_max=self.num_micro_batches,
        )

    def is_over(self, position: Position) -> bool:
        """Never: Megatron makes as many samples as all steps take."""
        return False

    def non_finite_gradients(self) -> tuple[str, ...]:
        """No micro-batch can be told."""
        return ()

    def close(self) -> None:
        """Nothing is open."""

    def draw_plan(self, path: Path, title: str) -> None:
        """Refuses: without HDP there is no plan."""
        raise ValueError(f"no plan to draw into {path} without --hybrid-data-parallel")

    def _batches(self, consumed: int) -> Iterator[dict[str, torch.Tensor]]:
        ranks = parallel_state.get_data_parallel_world_size()
        for m in range(self.num_micro_batches):
            block = m * ranks + parallel_state.get_data_parallel_rank()
            start = consumed + block * self.micro_batch_size
            samples = [self.dataset[start + i] for i in range(self.micro_batch_size)]
            batch = torch.utils.data.default_collate(samples)
            yield {key: to_device(value, compute_device()) for key, value in batch.items()}


def _order_of(dataset: GPTDataset) -> SourceOrder:
    """Megatron's: one chain of samples, also of a blend."""
    parts, weights = getattr(dataset, "datasets", [dataset]), getattr(dataset, "weights", ())
    return SourceOrder(
        num_sequences=len(dataset),
        corpus=fingerprint(*(one.dataset.sequence_lengths.tobytes() for one in parts), *weights),
        long_sequence="concatenated",
        version=1,
    )


def _forward_step(batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    losses = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return losses, partial(_loss, batch["loss_mask"])


def _loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Masked sum, its tokens and what to report, as Megatron's pretrain_gpt returns them."""
    loss = torch.sum(losses.view(-1).float() * loss_mask.view(-1).float())
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack((loss.detach(), num_tokens.to(loss.dtype)))}
