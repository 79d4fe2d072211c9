"""verl's own supervised trainer over HDP's ranks: its configuration, data, logs, validation."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests.bridge.loop import write_rows
from tests.session.test_bridge import bridge_of, local_layers
from tests.verl.engines import HOW, OVERRIDES, is_there, on_cpu, save_llama

STEPS, VOCABULARY = 4, 128
TEMPLATE = (
    "{% for one in messages %}{{ one['role'] }} {{ one['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_are_those_of_one_rank(run_ranks, tmp_path, monkeypatch):
    """The engine is found by the entry point of the installed package."""
    if not is_there() or importlib.util.find_spec("uvicorn") is None:
        pytest.skip(f"{HOW}; and uvicorn fastapi starlette cachetools, which its workers import")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "hdp")
    model = tmp_path / "model"
    save_llama(model, vocabulary=VOCABULARY)
    write_rows(model)
    write_conversations(model, tmp_path / "rows.parquet")
    (expected,) = run_ranks(1, fitted, tmp_path, 1024, timeout_s=400)
    assert [one["step"] for one in expected if "train/loss" in one["data"]] == [1, 2, 3, 4]
    found = run_ranks(2, fitted, tmp_path, 256, timeout_s=400)
    assert found[1] == found[0] and len(found[0]) == len(expected)
    for mine, other in zip(found[0], expected, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/global_tokens", "val/loss"):
            if name in other["data"]:
                assert mine["data"][name] == pytest.approx(other["data"][name], rel=1e-4), name
    losses = [one["data"]["train/loss"] for one in expected if "train/loss" in one["data"]]
    assert losses[-1] < losses[0]


def write_conversations(model, path):
    """Questions and answers of mixed lengths, and a template for them in the tokenizer."""
    import pandas
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, "<eos>"
    tokenizer.save_pretrained(model)
    draw = np.random.default_rng(3)

    def said(role, num):
        return {"role": role, "content": " ".join(map(str, draw.integers(1, 100, num)))}

    lengths = [int(min(300, 5 + draw.lognormal(3, 1.3))) for _ in range(8 * STEPS)]
    rows = [[said("user", 10), said("assistant", num)] for num in lengths]
    pandas.DataFrame({"messages": rows}).to_parquet(path)


def fitted(folder, tokens):
    """Body of a rank: what the first rank's trainer has logged."""
    bridge_of()
    on_cpu()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    log = folder / f"log-{num_ranks}.jsonl"
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # of workers on Ray
    os.environ |= {"VERL_FILE_LOGGER_PATH": str(log), "LOCAL_WORLD_SIZE": str(num_ranks)}
    import hydra
    import verl.trainer.sft_trainer as of_verl

    class OnCpu(of_verl.SFTTrainer):
        """What its configuration cannot say: float32, layers without TransformerEngine."""

        def _build_config(self):
            super()._build_config()
            overrides = OVERRIDES | {"transformer_layer_spec": local_layers}
            changed = {"dtype": "float32", "override_transformer_config": overrides}
            for name, value in changed.items():
                object.__setattr__(self.engine_config, name, value)

    options = [
        *("engine=megatron", "optim=megatron", "engine.sequence_parallel=False"),
        *(f"+engine.max_token_len_per_gpu={tokens}", "optim.lr=1e-2", "optim.lr_decay_steps=100"),
        *(f"model.path={folder}/model", f"data.train_files={folder}/rows.parquet"),
        *(f"data.val_files={folder}/rows.parquet", "data.max_length=512", "data.num_workers=0"),
        *("data.train_batch_size=8", f"data.max_token_len_per_gpu={tokens}"),
        *("trainer.logger=[file]", "trainer.device=cpu", "trainer.total_epochs=1"),
        *("trainer.test_freq=2", "trainer.resume_mode=disable"),
        f"trainer.default_local_dir={folder}/checkpoints-{num_ranks}",
    ]
    configurations = Path(of_verl.__file__).parent / "config"
    with hydra.initialize_config_dir(str(configurations), version_base=None):
        config = hydra.compose("sft_trainer_engine", overrides=options)
    trainer = OnCpu(config)
    assert type(trainer.engine).__module__ == "megatron_hdp.verl.engine"
    worker = trainer.training_client
    worker.device_name, worker.flops_counter = "cpu", None  # it knows the speeds of GPUs
    trainer.fit()
    dist.barrier()
    return [json.loads(line) for line in log.read_text().splitlines()]
