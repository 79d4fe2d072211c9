"""Megatron-Bridge's real training loop on CPUs: its imports, a configuration, sequences."""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import sys
import types
import warnings

import numpy as np
import pytest
import torch

from tests.session.test_bridge import ON_CPU, bridge_of, local_layers

HOW = (
    "Megatron-Bridge's loop is not installed: do as tests/bridge/requirements.txt says, and add "
    "nvidia-modelopt==0.47.0 datasets dill multiprocess pandas scipy pulp"
)
ABSENT = ("nvidia_resiliency_ext", "megatron.energon", "diffusers")
"""What Bridge's loop imports besides TransformerEngine, and these runs do not use."""


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not there: any name in them is an empty class."""

    def find_spec(self, name, path=None, target=None):
        if not any(f"{name}.".startswith(f"{one}.") for one in ABSENT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        def made(name):
            if name.startswith("__"):
                raise AttributeError(name)
            names = {"__class_getitem__": classmethod(lambda cls, item: cls)}
            names["__init__"] = lambda self, *given, **named: None
            names["__call__"] = lambda self, decorated: decorated
            found = vars(module)[name] = type(name, (), names)
            return found

        module.__getattr__ = made


@contextlib.contextmanager
def absent():
    """Within it Bridge's loop can be imported."""
    finder = Absent()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def require_bridge():
    """Skips a test where Bridge is not installed."""
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip(HOW)


def loop():
    """Bridge's `pretrain`, `finetune` and the forward step of its GPTs."""
    warnings.simplefilter("ignore")
    bridge_of()
    with absent():
        from megatron.bridge.training import initialize
        from megatron.bridge.training.finetune import finetune
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain
    initialize.compile_helpers = lambda: None  # the wheel has them compiled
    logging.disable(logging.INFO)
    return pretrain, finetune, forward_step


VOCABULARY, LONGEST, SAMPLES, ROWS = 128, 512, 4, 50


def write_rows(folder):
    """Questions and answers of mixed lengths, made of numbers, and a tokenizer that knows these."""
    import tokenizers
    import transformers

    ids = {**{str(one): one for one in range(VOCABULARY - 2)}, "<unk>": 126, "<eos>": 127}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<eos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    made.save_pretrained(folder)
    draw = np.random.default_rng(5)

    def text(most):
        num = int(min(most, 4 + draw.lognormal(3, 1.2)))
        return " ".join(map(str, draw.integers(1, VOCABULARY - 2, num)))

    for split, num in (("training", ROWS), ("validation", 8)):
        rows = [json.dumps({"input": text(200), "output": text(300)}) for _ in range(num)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


def configuration(
    folder,
    *,
    steps,
    samples=SAMPLES,
    data=None,
    packed=False,
    sharded=False,
    save=None,
    load=None,
    pretrained=None,
    lora=None,
    precision=None,
    beside=False,
    **layout,
):
    """Bridge's, for a LLaMA of two layers on CPUs; `layout` over ranks, and other model options.

    Args:
        folder: of rows.
        steps: at which it ends.
        samples: rows of a step.
        data: makes the configuration of a data set, given `folder`, instead of that of rows.
        packed: whether Bridge packs them.
        sharded: the distributed optimizer.
        save: folder of checkpoints, of every second step.
        load: folder of checkpoints, of which the second step's is taken.
        pretrained: folder of checkpoints whose weights training begins with.
        lora: settings of Bridge's adapters.
        precision: a name of Bridge's, as ``bf16_mixed``; without one float32.
        beside: whether checkpoints are written beside training.
        layout: options of the model.
    """
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.bridge.training import config as of
    from megatron.bridge.training.tokenizers.config import TokenizerConfig

    if lora is not None:
        from megatron.bridge.peft.lora import LoRA

    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
    how = {"normalization": "RMSNorm", "position_embedding_type": "rope", "hidden_dropout": 0.0}
    is_latent = layout.get("multi_latent_attention")
    provider = (MLAModelProvider if is_latent else GPTModelProvider)(
        **{
            **ON_CPU,
            **sizes,
            **how,
            "seq_length": LONGEST,
            "transformer_layer_spec": local_layers,
        }
        | {"num_query_groups": 2, "vocab_size": VOCABULARY, "gated_linear_unit": True}
        | {"activation_func": torch.nn.functional.silu, "add_bias_linear": False}
        | {"attention_dropout": 0.0, "make_vocab_size_divisible_by": 1}
        | {"cross_entropy_loss_fusion": False}  # it rounds gradients to bfloat16
        | {"share_embeddings_and_output_weights": False, **layout}
    )
    validated = not packed and samples % SAMPLES == 0
    rows = {"do_test": False, "num_workers": 0, "pin_memory": False, "do_validation": validated}
    if packed:
        from megatron.bridge.data.packing import PackedSequenceSpecs

        rows["enable_offline_packing"] = True
        rows["offline_packing_specs"] = PackedSequenceSpecs(packed_sequence_size=LONGEST)
    return of.ConfigContainer(
        model=provider,
        mixed_precision=precision,
        peft=None if lora is None else LoRA(**lora),
        train=of.TrainingConfig(
            train_iters=steps, global_batch_size=samples, micro_batch_size=1 if packed else 2
        ),
        validation=of.ValidationConfig(eval_interval=2, eval_iters=int(validated)),
        optimizer=of.OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, use_distributed_optimizer=sharded, bf16=False
        ),
        scheduler=of.SchedulerConfig(
            lr_warmup_iters=0, lr_decay_iters=20, start_weight_decay=0.0, end_weight_decay=0.0
        ),
        ddp=of.DistributedDataParallelConfig(
            use_distributed_optimizer=sharded, overlap_grad_reduce=sharded
        ),
        dataset=GPTSFTDatasetConfig(seq_length=LONGEST, dataset_root=folder, **rows)
        if data is None
        else data(folder),
        logger=of.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)
        ),
        checkpoint=of.CheckpointConfig(
            **{"save": save, "load": load, "save_interval": 2, "ckpt_format": "torch_dist"},
            ckpt_step=2 if load else None,
            async_save=beside,
            async_strategy="mcore",
            pretrained_checkpoint=pretrained,
        ),
        dist=of.DistributedInitConfig(distributed_backend="gloo"),
        rng=of.RNGConfig(seed=11),
    )


def trained(folder, options=None, **how):
    """Body of a rank: `noted` of Bridge's `pretrain`, or `finetune` where weights are given."""
    pretrain, finetune, forward_step = loop()
    run = finetune if how.get("pretrained") else pretrain
    return noted(run, configuration(folder, **how), forward_step, options)


def noted(run, config, forward_step, options=None):
    """Losses and norms by step, losses of validation and numbers of weights of a run.

    With `options` under HDP.
    """
    from megatron.bridge.training.callbacks import Callback

    import megatron_hdp.bridge

    found = {"steps": [], "validation": []}

    class Noted(Callback):
        def on_train_step_end(self, context):
            loss = float(context.loss_dict.get("lm loss", np.nan))  # the last stage has it
            found["steps"].append((context.state.train_state.step, loss, float(context.grad_norm)))

        def on_train_end(self, context):
            weights = [one for chunk in context.model for one in chunk.parameters()]
            parts = [(*one.buffers, *one.expert_parallel_buffers) for one in context.model]
            buffers = [one for part in parts for one in part]
            found["weights"] = sum(one.numel() for one in weights)
            found["trained"] = sum(one.numel() for one in weights if one.requires_grad)
            found["reduced"] = sum(one.numel() for buffer in buffers for one in buffer.params)

        def on_eval_end(self, context):
            found["validation"].append(float(context.total_loss_dict.get("lm loss", np.nan)))

    if options is not None:
        megatron_hdp.bridge.activate(**options)
    run(config, forward_step, callbacks=[Noted()])
    if options is not None:
        megatron_hdp.bridge.deactivate()
    return found
