"""TRL's own trainer and ours make the same steps of the same weights and rows.

Needs ``trl`` 1.16 or newer: ``pip install trl``.
"""

import json

import numpy as np
import pytest
import torch

from megatron_hdp.convert.to_megatron import to_megatron
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.megatron.step import HdpSteps
from megatron_hdp.training.loop import pretrain
from scripts.examples.tutorial.tiny_llama import SPECIAL, write_tokenizer
from tests.convert.models import save_model
from tests.support.preferences import write_rows

pytestmark = pytest.mark.slow
STEPS, BATCH = 5, 8
ADAM = {"lr": 2e-3, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-3}
FIGURES = {  # ours: TRL's
    "loss": "loss",
    "grad_norm": "grad_norm",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "reward_accuracy": "rewards/accuracies",
    "kto_divergence": "kl",
}
OF_PAIRS = [name for name in FIGURES if name != "kto_divergence"]
COMMAND = f"""--tokenizer-type HuggingFaceTokenizer --split 1,0,0 --seq-length 128
--hybrid-data-parallel --hdp-tokens-per-rank 96 --hdp-long-sequence error --hdp-strategy auto
--global-batch-size {BATCH} --train-iters {STEPS} --lr-decay-style constant --clip-grad 1.0"""


def steps_of(argv):
    """Body of a rank: figures of each step, and the documents that it held, in their order."""
    drawn, run = [], HdpSteps.run

    def noted(self, position, **how):
        step = self.planner.mix(position)
        drawn.append(self.corpus.sources[0].documents(step.rows).tolist())
        return run(self, position, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HdpSteps, "run", noted)
        found = pretrain(parse_arguments(argv))
    return [{name: getattr(one, name) for name in FIGURES} for one in found], drawn


@pytest.fixture
def model(tmp_path):
    """A tiny random Llama-3 of transformers, its checkpoint for us beside it."""
    folder = save_model("llama3", tmp_path / "llama")
    write_tokenizer(folder, SPECIAL)
    to_megatron(folder, tmp_path / "base", None, print)
    return folder


def ours(run_ranks, model, rows, ranks, *flags):
    base = model.parent / "base"
    argv = [f"--config={base}/model.yaml", *COMMAND.split(), *flags]
    argv += ["--tokenizer-model", str(model), "--data-path", str(rows)]
    argv += ["--pretrained-checkpoint", str(base), "--hdp-reference-checkpoint", str(base)]
    argv += [f"--{name.replace('_', '-')}={value}" for name, value in ADAM.items()]
    return run_ranks(ranks, steps_of, argv)[0]


def theirs(trainer, options, model, rows, **how):
    """Figures of each step by a trainer of TRL's over rows in their order."""
    datasets = pytest.importorskip("datasets")
    import transformers

    names = {"lr": "learning_rate", "adam_eps": "adam_epsilon"}
    settings = options(
        **{names.get(name, name): value for name, value in ADAM.items()},
        **{"output_dir": str(model.parent / "trl"), "remove_unused_columns": False},
        **{"per_device_train_batch_size": BATCH, "max_steps": STEPS, "max_grad_norm": 1.0},
        **{"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"},
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_length": None},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True},
        **how,
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = SPECIAL[-1]
    made = trainer(
        model=load(model, dtype=torch.float32),
        ref_model=load(model, dtype=torch.float32),
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    made.train()
    return [one for one in made.state.log_history if "loss" in one]


def require_same(found, expected, names):
    """To 1e-5, relative where a figure is above 1; rewards of ipo are means per token, or sums."""
    assert len(found) == len(expected) == STEPS
    mine = np.array([[one[name] for name in names] for one in found])
    other = np.array([[one[FIGURES[name]] for name in names] for one in expected])
    errors = np.abs(mine - other) / np.maximum(1, np.abs(other))
    assert errors.max() <= 1e-5, (mine, other)
    assert np.ptp(other, axis=0).min() > 1e-3, "a figure that never changes shows nothing"


def as_conversation(row):
    prompt = [{"role": "user", "content": f"say {row['prompt']}"}]
    sides = {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
    return {"prompt": prompt, **sides}


@pytest.mark.parametrize(
    ("objective", "loss", "form", "ranks", "flags"),
    [
        ("dpo", "sigmoid", dict, 3, ()),
        ("dpo", "sigmoid", as_conversation, 4, ("--tensor-model-parallel-size=2",)),
        ("ipo", "ipo", dict, 2, ("--pipeline-model-parallel-size=2", "--hdp-tokens-per-rank=256")),
    ],
    ids=["dpo", "dpo-conversations-tp2", "ipo-pp2"],
)
def test_dpo_trainer(run_ranks, tmp_path, model, objective, loss, form, ranks, flags):
    trl = pytest.importorskip("trl", minversion="1.16", reason="not installed: pip install trl")
    path = write_rows(tmp_path / "rows.jsonl", STEPS * BATCH, longest=80)
    rows = [form(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--hdp-objective={objective}", "--hdp-beta=0.3", *flags
    found, drawn = ours(run_ranks, model, path, ranks, *flags)
    given = [rows[document // 2] for step in drawn for document in step[::2]]
    assert sorted(map(json.dumps, given)) == sorted(map(json.dumps, rows))
    expected = theirs(trl.DPOTrainer, trl.DPOConfig, model, given, loss_type=[loss], beta=0.3)
    require_same(found, expected, OF_PAIRS if loss == "sigmoid" else OF_PAIRS[:2])


def test_kto_trainer(run_ranks, tmp_path, model):
    """The divergence is that of the same answers behind prompts of others."""
    trl = pytest.importorskip("trl", minversion="1.16", reason="not installed: pip install trl")
    path = write_rows(tmp_path / "rows.jsonl", STEPS * BATCH, longest=80, labelled=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row | {"prompt": f"say {row['prompt']}"} for row in rows]  # TRL's may be empty
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--hdp-objective=kto", "--hdp-beta=0.3", "--hdp-undesirable-weight=1.5"
    found, drawn = ours(run_ranks, model, path, 3, *flags)
    given = [rows[document] for step in drawn for document in step]
    how = {"beta": 0.3, "undesirable_weight": 1.5}
    expected = theirs(trl.KTOTrainer, trl.KTOConfig, model, given, **how)
    require_same(found, expected, [name for name in FIGURES if name != "reward_accuracy"])
