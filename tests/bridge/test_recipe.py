"""A recipe of Bridge's with the lines that docs/bridge.md adds, of a small model, on CPUs."""

import pytest

from tests.bridge.loop import LONGEST, absent, loop, noted, require_bridge, write_rows
from tests.session.test_bridge import ON_CPU, local_layers
from tests.verl.engines import save_llama


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_by_a_recipe(run_ranks, tmp_path):
    """LLaMA 3.2's recipe for adapters, in bfloat16, over weights of transformers.

    Rows are not packed: without TransformerEngine Bridge itself cannot run them.
    """
    require_bridge()
    write_rows(tmp_path / "rows")
    save_llama(tmp_path / "model")
    (expected,) = run_ranks(1, by_recipe, tmp_path, timeout_s=400)
    options = {"hdp_tokens_per_rank": 256}
    for found in run_ranks(2, by_recipe, tmp_path, options, timeout_s=400):
        assert found["trained"] == found["reduced"] < found["weights"]
        for mine, other in zip(found["steps"], expected["steps"], strict=True):
            assert mine == pytest.approx(other, rel=2e-2)
        assert len(found["steps"]) == 4


def by_recipe(folder, options=None):
    """Body of a rank: losses and norms of `finetune`; with `options` under HDP."""
    _, finetune, forward_step = loop()
    from megatron.bridge import AutoBridge
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig

    with absent():  # recipes of pictures are imported, too
        from megatron.bridge.recipes.llama import llama32_1b_peft_config
        from megatron.bridge.recipes.llama.h100 import llama3

    class OfFolder(AutoBridge):
        @classmethod
        def from_hf_pretrained(cls, path, **how):
            return AutoBridge.from_hf_pretrained(folder / "model", **how)

    llama3.AutoBridge = OfFolder  # of a model that is small, and there
    config = llama32_1b_peft_config()
    assert config.mixed_precision == "bf16_mixed"
    # what docs/bridge.md says
    config.model.calculate_per_token_loss = True
    config.ddp.overlap_param_gather = False
    # a machine without GPUs, and a short run
    for name, value in ON_CPU.items():
        setattr(config.model, name, value)
    config.model.transformer_layer_spec = local_layers
    config.model.seq_length = LONGEST
    config.dist.distributed_backend = "gloo"
    config.tokenizer.tokenizer_model = str(folder / "rows")
    config.dataset = GPTSFTDatasetConfig(
        seq_length=LONGEST,
        dataset_root=folder / "rows",
        **dict.fromkeys(("do_test", "do_validation", "pin_memory"), False),
        num_workers=0,
    )
    config.train.train_iters, config.train.global_batch_size = 4, 8
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 1, 4
    config.checkpoint.pretrained_checkpoint = str(folder / "model")
    config.checkpoint.save = config.checkpoint.load = config.logger.tensorboard_dir = None
    return noted(finetune, config, forward_step, options)
