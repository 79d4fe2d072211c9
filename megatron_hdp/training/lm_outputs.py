"""What a run of Megatron-LM writes of each step besides Megatron's logs: metrics, trace, picture.

The writers are those of HDP's own command.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.arguments import TrainingArguments
from megatron_hdp.megatron.hdp_steps import HdpSteps
from megatron_hdp.megatron.step_report import StepReport
from megatron_hdp.training.flops import ModelFlops
from megatron_hdp.training.metrics import MetricsLogger, StepMetrics
from megatron_hdp.training.tracer import StepTracer


class LmOutputs:
    """Writes as the flags say; every rank makes the same calls.

    Args:
        arguments: of the run.
        steps: what trains.
        vocab_size: entries of the tokenizer.
        first_step: that runs next; what a file of metrics holds of it and later ones is dropped.
    """

    def __init__(
        self, arguments: TrainingArguments, steps: HdpSteps, vocab_size: int, first_step: int
    ) -> None:
        self._arguments = arguments
        self._steps = steps
        self._flops = ModelFlops.of_model(arguments, vocab_size)
        path = arguments.metrics_path if parallel.is_first_rank() else None
        self._logger = MetricsLogger(path, first_step=first_step)
        self._tracer = None
        if arguments.hdp_trace is not None and arguments.hdp_trace_steps is not None:
            self._tracer = StepTracer(arguments.hdp_trace, arguments.hdp_trace_steps, steps)

    def begin_step(self, step: int) -> None:
        """A step begins, counted from 1; a step may begin again."""
        if self._tracer is not None:
            self._tracer.begin(step)

    def end_step(
        self,
        step: int,
        report: StepReport,
        *,
        seconds: float,
        grad_norm: float,
        learning_rate: float,
        consumed_tokens: int,
    ) -> None:
        """It has ended, the optimizer's step included."""
        arguments = self._arguments
        if self._tracer is not None:
            self._tracer.end(step)
        if step == arguments.hdp_plot_step and arguments.hdp_plot_plan and parallel.is_first_rank():
            title = f"step {step}: {arguments.hdp_strategy}"
            self._steps.draw_plan(Path(arguments.hdp_plot_plan), title)
        self._logger.write(
            StepMetrics.of_report(
                report,
                step=step,
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                consumed_tokens=consumed_tokens,
                seconds=seconds,
                model_flops=self._flops.of_batch(report.tokens, report.squared_tokens),
                num_ranks=dist.get_world_size(),
            )
        )

    def close(self) -> None:
        """No step follows."""
        self._logger.close()
