"""Off means off: without the flag a run is plain Megatron-Core's, bit for bit.

The plain run below is written against megatron.core alone, as a user of Megatron-Core would.
"""

import math
import subprocess
import sys
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.model import building as hdp_model
from megatron_hdp.megatron.model.attention import HdpCoreAttention
from megatron_hdp.megatron.model.rotary import OwnPositionRotaryEmbedding
from megatron_hdp.training import loop, training_job
from tests.support.gradients import tiny_arguments, write_corpus
from tests.support.ranks import RankError

NUM_RANKS = 2
STEPS = 5
SEQ_LENGTH = 24
BATCH = 8
MICRO_BATCH = 2
VOCABULARY = 257
PADDED_VOCABULARY = 384
LR, MIN_LR, WARMUP = 5e-3, 1e-3, 2
SEED = 77
EXPERTS = {  # losses of routers that HDP refuses
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "expert_model_parallel_size": 2,
}
SHAPE = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 64, "num_attention_heads": 4}
SHAPE |= {"init_method_std": 0.1, "attention_dropout": 0.1, "hidden_dropout": 0.1}


def plain_run(prefix, bf16=False, distributed_optimizer=False, experts=False):
    """Trains with megatron.core alone; returns every step's loss and the final weights."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2 if experts else 1)
    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)
    dtype = {"bf16": bf16, "params_dtype": torch.bfloat16 if bf16 else torch.float32}
    sharded = {"use_distributed_optimizer": distributed_optimizer}
    gpt, config = plain_model(dtype, EXPERTS | {"num_moe_experts": 4} if experts else {})
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=bf16, overlap_grad_reduce=distributed_optimizer, **sharded
    )
    model = DistributedDataParallel(config, ddp_config, gpt)
    adam = {"optimizer": "adam", "lr": LR, "min_lr": MIN_LR, "weight_decay": 0.01, "clip_grad": 1.0}
    optimizer = get_megatron_optimizer(OptimizerConfig(**adam, **dtype, **sharded), [model])
    scheduler = plain_scheduler(optimizer)
    batches = plain_batches(plain_dataset(prefix))
    config.no_sync_func = model.no_sync
    losses = []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward_no_pipelining(
            forward_step_func=plain_forward_step,
            data_iterator=batches,
            model=[model],
            num_microbatches=BATCH // MICRO_BATCH // NUM_RANKS,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH,
        )
        optimizer.step()
        scheduler.step(increment=1)
        total = torch.stack(reports).sum(0)
        dist.all_reduce(total)
        losses.append(float(total[0]) / float(total[1]))
    parallel_state.destroy_model_parallel()
    return losses, weights_of(model)


def plain_model(dtype, experts):
    unfused = ("gradient_accumulation", "masked_softmax", "bias_activation", "bias_dropout")
    config = TransformerConfig(
        **SHAPE,
        **dtype,
        pipeline_dtype=dtype["params_dtype"],
        use_cpu_initialization=True,
        **{f"{name}_fusion": False for name in unfused},
        finalize_model_grads_func=finalize_model_grads,
        **experts,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
        vocab_size=PADDED_VOCABULARY,
        max_sequence_length=SEQ_LENGTH,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    ).to(config.params_dtype)
    return (Float16Module(config, gpt) if config.bf16 else gpt), config


def plain_scheduler(optimizer):
    weight_decay = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_style": "constant"}
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=MIN_LR,
        lr_warmup_steps=WARMUP,
        lr_decay_steps=STEPS,
        lr_decay_style="cosine",
        wd_incr_steps=STEPS,
        **weight_decay,
    )


def plain_dataset(prefix):
    tokenizer = SimpleNamespace(
        eod=256, pad=-1, vocab_size=VOCABULARY, unique_identifiers=OrderedDict(name="plain")
    )
    unchanged = dict.fromkeys(
        ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False
    )
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LENGTH,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=tokenizer,
        **unchanged,
    )
    sizes = [BATCH * STEPS, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def plain_batches(dataset):
    """Micro-batches of this rank: ranks take turns, in the order of the samples."""
    first = dist.get_rank() * MICRO_BATCH
    for start in range(first, BATCH * STEPS, MICRO_BATCH * NUM_RANKS):
        samples = [dataset[i] for i in range(start, start + MICRO_BATCH)]
        yield {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def plain_forward_step(batches, model):
    batch = next(batches)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(plain_loss, batch["loss_mask"])


def plain_loss(loss_mask, losses):
    loss, num_tokens = (losses.float() * loss_mask).sum(), loss_mask.sum().int()
    return loss, num_tokens, torch.stack([loss.detach(), num_tokens.float()])


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def stock_arguments(prefix, bf16=False, distributed_optimizer=False, experts=False):
    """The same run in the training command's words."""
    settings = {"hybrid_data_parallel": False, "hdp_tokens_per_rank": None, "seed": SEED}
    settings |= {"fp64": False, "bf16": bf16, "normalization": "LayerNorm", "swiglu": False}
    settings |= {"num_query_groups": 4, "group_query_attention": False}
    settings |= {"seq_length": SEQ_LENGTH, "max_position_embeddings": SEQ_LENGTH}
    settings |= {"untie_embeddings_and_output_weights": False, "lr": LR, "min_lr": MIN_LR}
    settings |= {"use_distributed_optimizer": distributed_optimizer}
    settings |= {"overlap_grad_reduce": distributed_optimizer}
    settings |= {"micro_batch_size": MICRO_BATCH, "global_batch_size": BATCH}
    settings |= {"train_iters": STEPS, "lr_decay_iters": STEPS, "lr_warmup_iters": WARMUP}
    settings |= EXPERTS | {"num_experts": 4} if experts else {}
    return tiny_arguments(prefix, **SHAPE, **settings, lr_decay_style="cosine")


def our_run(arguments):
    """Trains with `pretrain`; returns losses, weights, and the model itself."""
    models = []

    def build_and_keep(*args):
        chunks = hdp_model.build_chunks(*args)
        models.extend(chunks)
        return chunks

    with mock.patch.object(training_job, "build_chunks", build_and_keep):
        losses = [metrics.loss for metrics in loop.pretrain(arguments)]
    (model,) = models
    return losses, weights_of(model), model


def differences(prefix, settings, fault=None):
    """Body of a rank: what differs between the plain run and ours, planted fault included."""
    with shim.applied():
        plain_losses, plain_weights = plain_run(prefix, **settings)
    assert not shim.is_active()
    with mock.patch(*fault) if fault else nullcontext():
        losses, weights, model = our_run(stock_arguments(prefix, **settings))
    if not fault:
        require_nothing_of_hdp(model)
    assert plain_weights.keys() == weights.keys()
    assert len(losses) == STEPS and len(set(losses)) == STEPS and math.isfinite(sum(losses))
    found = [name for name in weights if not torch.equal(weights[name], plain_weights[name])]
    return found + [f"loss {i}" for i in range(STEPS) if losses[i] != plain_losses[i]]


def require_nothing_of_hdp(model):
    kinds = {type(module) for module in model.modules()}
    foreign = [kind for kind in kinds if kind.__module__.startswith("megatron_hdp")]
    assert not foreign, foreign
    assert not kinds & {HdpCoreAttention, OwnPositionRotaryEmbedding}
    finalize = model.config.finalize_model_grads_func
    assert finalize.__module__.startswith("megatron.core."), finalize


@pytest.fixture
def prefix(tmp_path):
    return write_corpus(tmp_path, [5, 60, 200, 1, 33, 90, 150, 40])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"distributed_optimizer": True}, marks=pytest.mark.slow),
        {"bf16": True, "distributed_optimizer": True},
        {"experts": True},
    ],
    ids=["float32", "distributed-optimizer", "bfloat16", "experts"],
)
def test_a_stock_run_is_plain_megatron_bit_for_bit(run_ranks, prefix, settings):
    for found in run_ranks(NUM_RANKS, differences, prefix, settings):
        assert found == []


def seed_one_more(seed):
    SET_SEEDS(seed + 1)


def spec_with_hdp_attention(arguments, has_experts):
    spec = LAYER_SPEC(arguments, has_experts)
    spec.submodules.self_attention.submodules.core_attention = HdpCoreAttention
    return spec


def config_with_a_bit_more_epsilon(arguments):
    config = TRANSFORMER_CONFIG(arguments)
    config.layernorm_epsilon *= 1.01
    return config


SET_SEEDS = loop.parallel.set_seeds
LAYER_SPEC = hdp_model.layer_spec
TRANSFORMER_CONFIG = hdp_model.transformer_config
MODEL = "megatron_hdp.megatron.model.building"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            ("megatron_hdp.megatron.parallel.set_seeds", seed_one_more), marks=pytest.mark.slow
        ),
        (f"{MODEL}.transformer_config", config_with_a_bit_more_epsilon),
    ],
    ids=["seed", "epsilon"],
)
def test_the_comparison_sees_a_small_difference(run_ranks, prefix, fault):
    found = run_ranks(NUM_RANKS, differences, prefix, {}, fault)
    assert all(len(names) > STEPS for names in found), found


def test_hdp_attention_in_a_stock_run_refuses(run_ranks, prefix):
    fault = (f"{MODEL}.layer_spec", spec_with_hdp_attention)
    with pytest.raises(RankError, match="attention dropout|HdpPackedSeqParams"):
        run_ranks(NUM_RANKS, differences, prefix, {}, fault)


UNTOUCHED = """
import sys
import torch
import megatron.core.optimizer, megatron.core.models.gpt, megatron.core.datasets.gpt_dataset
import megatron.core.pipeline_parallel.schedules, megatron.core.distributed

def snapshot():
    owners = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "megatron"}
    owners |= {"Tensor": torch.Tensor, "Module": torch.nn.Module, "torch": torch}
    for module in list(owners.values()):
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__.startswith("megatron."):
                owners[value.__module__ + "." + value.__qualname__] = value
    return {(o, n): v for o, owner in owners.items() for n, v in list(vars(owner).items())}

def changed():
    after = snapshot()
    new = {key for key in after if key[0] in ("Tensor", "Module") and key not in before}
    return new | {key for key in before if before[key] is not after.get(key)}

before, finders = snapshot(), list(sys.meta_path)
assert len(before) > 5000, len(before)
import megatron_hdp.training.loop
assert not changed() and sys.meta_path == finders, changed()

megatron.core.models.gpt.GPTModel.forward = torch.Tensor.cuda = None  # the check sees both
assert len(changed()) == 2, changed()
"""


@pytest.mark.slow
def test_importing_the_loop_leaves_megatron_untouched():
    subprocess.run([sys.executable, "-W", "ignore", "-c", UNTOUCHED], check=True, timeout=570)
