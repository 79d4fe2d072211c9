"""A run in Megatron's loop: validation losses, parameters gathered, routers' losses."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_hdp.megatron.lm import replacements
from megatron_hdp.megatron.lm.run import LmRun, RouterLosses
from megatron_hdp.megatron.lm.validation_sets import ValidationSets
from megatron_hdp.megatron.model import HdpRouter
from megatron_hdp.megatron.step import EvaluationLoss
from megatron_hdp.training import step_outputs
from megatron_hdp.training.metrics import MetricsLogger
from tests.training.test_metrics import REPORT, replace


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose steps are what the test says; it validates every second one, by three batches."""
    monkeypatch.setattr(step_outputs.dist, "get_world_size", lambda: 1)
    outputs = step_outputs.StepOutputs.__new__(step_outputs.StepOutputs)
    outputs.__dict__ |= {"_to_validate": None, "_tracer": None, "_writes": True, "_first_step": 2}
    outputs._arguments = SimpleNamespace(hdp_plot_step=None)
    outputs._shape = SimpleNamespace(flops_of_sums=lambda *amounts: 1.0)
    outputs._logger = MetricsLogger(tmp_path / "metrics.jsonl")
    run = LmRun.__new__(LmRun)
    run.args = SimpleNamespace(do_valid=1, eval_interval=2, eval_iters=3)
    run._job = SimpleNamespace(timeline=SimpleNamespace(settle=lambda: None))
    run.log = SimpleNamespace(latest=REPORT)
    run.specs = {"valid": SimpleNamespace(sources=[SimpleNamespace(name="held out")])}
    run.__dict__ |= {"_outputs": outputs, "_validated": [], "_began_at": 0.0, "_evaluation": None}
    run._steps = {"train": SimpleNamespace(is_over=lambda position: False)}
    return run


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_the_mean_over_an_evaluation_goes_to_the_step_before(run, tmp_path):
    batches = [replace(REPORT, loss=loss, loss_tokens=n) for loss, n in ((1, 10), (2, 30), (5, 60))]
    for step in range(1, 5):
        run.end_step(step, None, 0.1)
        assert [line["step"] for line in lines(tmp_path)] == list(range(1, step + 1))
        if step % 2 == 0:
            for number, batch in enumerate(batches):
                assert lines(tmp_path)[-1]["validation_loss"] is None, number
                run._add_validation(replace(batch, loss=batch.loss * step))
    for batch in batches:  # once more, when training is over
        run._add_validation(batch)
    found = [line["validation_loss"] for line in lines(tmp_path)]
    assert found == [None, pytest.approx(2 * 3.7), None, pytest.approx(4 * 3.7)]


def test_the_first_step_says_what_cuda_and_nccl_hold(run, monkeypatch):
    said = []
    monkeypatch.setattr(step_outputs.parallel, "say", said.append)
    monkeypatch.setattr(step_outputs, "runtime_bytes", lambda device: 5_230_000_000)
    for step in (2, 3):
        run.end_step(step, None, 0.1)
    (line,) = said
    assert "check --runtime-memory 5.23GB" in line


def test_without_validation_lines_are_written_as_they_are(run, tmp_path):
    run.args.do_valid = 0
    run.end_step(2, None, 0.1)
    assert b" \n" not in (tmp_path / "metrics.jsonl").read_bytes()


FOUND = EvaluationLoss(2.5, {"web": 2.0, "code": 30.0})


def test_each_validation_set_has_a_line_of_its_own():
    sets = ValidationSets(["web", "chat", "code"], [])
    web, chat, code = sets.lines(FOUND, "iteration 4 on validation set")
    assert web == (
        " validation-0 loss at iteration 4 on validation set | lm loss value: 2.000000E+00 | "
        "lm loss PPL: 7.389056E+00 | source: web | "
    )
    assert "none of its sequences was drawn" in chat and chat.endswith("source: chat | ")
    assert "PPL: 4.851652E+08" in code  # Megatron's limit: of a loss of 20
    assert sets.losses(FOUND) == {"lm loss validation-0": 2.0, "lm loss validation-2": 30.0}


@pytest.mark.parametrize("ppl", [False, True])
def test_scalars_of_validation_sets(ppl):
    args = SimpleNamespace(log_validation_ppl_to_tensorboard=ppl, consumed_train_samples=32)
    found = ValidationSets(["web", "code"], ["w", "c"]).scalars(FOUND, 4, args)
    assert ("lm loss validation-w", 2.0, 4) in found
    assert ("lm loss validation-c vs samples", 30.0, 32) in found
    assert len(found) == (8 if ppl else 4)
    assert (("lm loss validation-w ppl", pytest.approx(7.389056), 4) in found) == ppl


def test_as_many_names_as_validation_sets():
    with pytest.raises(ValueError, match="found 1 names .a., expected 2, one for each .*: web, c"):
        ValidationSets(["web", "code"], ["a"])


def test_all_model_chunks_have_one_run(monkeypatch):
    """With virtual stages Megatron asks for data iterators once for each."""
    made = []

    class Run:
        def __init__(self, *_):
            made.append(self)

        def data_iterators(self):
            return ["train", "valid", "test"]

    args = SimpleNamespace(hybrid_data_parallel=True)
    theirs = SimpleNamespace(
        get_args=lambda: args, get_tokenizer=lambda: SimpleNamespace(vocab_size=5)
    )
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", theirs)
    monkeypatch.setattr("megatron_hdp.megatron.lm.run.LmRun", Run)
    monkeypatch.setattr(replacements, "_run", None)
    for _ in range(2):
        found = replacements.build_iterators(lambda provider: None, "of a chunk")
        assert found == ("train", "valid", "test")
    assert made == [replacements._run]


def test_an_evaluation_is_taken_once(run):
    assert run.take_evaluation() is None
    for _ in range(3):
        run._add_validation(REPORT)
    assert run.take_evaluation().loss == pytest.approx(REPORT.loss)
    assert run.take_evaluation() is None


def test_routers_of_all_model_chunks_forget_what_they_noted():
    routers = [HdpRouter.__new__(HdpRouter) for _ in range(3)]
    for router in routers:
        torch.nn.Module.__init__(router)
        router.losses = {"z_loss": torch.ones(())}
    chunks = [torch.nn.Sequential(*routers[:2]), torch.nn.Sequential(routers[2])]
    RouterLosses(chunks).begin_step()
    assert [one.losses for one in routers] == [{}, {}, {}]
