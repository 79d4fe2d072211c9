"""What a gradient-equivalence case is, and the ways to its arguments and data."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_hdp.data.mixture import BatchSize, Position
from megatron_hdp.data.steps import LostSource, read_step
from megatron_hdp.megatron.options import TrainingArguments, parse_arguments
from megatron_hdp.megatron.step import open_split, split_specs
from megatron_hdp.planner import Plan
from tests.support import gradients
from tests.support.drawn import first_rows
from tests.support.gradients import tiny_arguments, write_corpus
from tests.support.random_plans import in_streams, random_plan
from tests.support.sources import data_file, mixed_arguments, write_sources

Settings = dict[str, Any]
CHAT = 1  # its place among the sources of a mixture
TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
ACROSS = {"expert_model_parallel_size": 2}
LENGTHS = (1, 2, 30, 100, 64, 65, 7, 200, 129)
ROOM = {"hdp_tokens_per_rank": 128, "seq_length": 200, "max_position_embeddings": 200}


def joined(*parts: Mapping[str, Any]) -> Settings:
    """Settings of several parts, later ones first."""
    return {name: value for part in parts for name, value in part.items()}


def tiny(folder: Path, case: "Case") -> TrainingArguments:
    """The tiny GPT over one corpus."""
    prefix = write_corpus(folder, case.lengths, corrupt=case.corrupt)
    return tiny_arguments(prefix, **(ROOM | case.settings))


@dataclass(frozen=True)
class Case:
    """A row."""

    ranks: int
    settings: Settings
    """What differs from the tiny GPT of `tests.support.gradients` with the capacity of `ROOM`."""
    strategies: tuple[str, ...] = ("auto",)
    """Whose own plans run."""
    plans: int = 1
    """Plans that no strategy would make: rings of every size, counts that differ."""
    lengths: tuple[int, ...] = LENGTHS
    corrupt: tuple[int, ...] = ()
    """Documents with a token outside the vocabulary."""
    arguments_of: Callable[[Path, "Case"], TrainingArguments] = tiny
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Within it models are built and steps run."""
    patches: tuple[tuple[str, Any], ...] = ()
    """What is replaced during steps, and must change nothing."""
    tolerance: float = 1e-10
    recomputes: bool = False
    """Whether some micro-batches of plans are recomputed, others not."""
    streams: int = 1
    """Capacities that a rank may hold of a micro-batch, which streams if it holds more than one."""

    @property
    def hdp_ranks(self) -> int:
        """Ranks of the HDP dimension."""
        return (
            self.ranks
            // self.settings.get("tensor_model_parallel_size", 1)
            // self.settings.get("pipeline_model_parallel_size", 1)
        )

    def runs(self, folder: Path) -> list[tuple[TrainingArguments, Plan | None]]:
        """Arguments and plans of the steps; a plan of None is the strategy's."""
        arguments = self.arguments_of(folder, self)
        runs: list[tuple[TrainingArguments, Plan | None]] = [
            (replace(arguments, hdp_strategy=one), None) for one in self.strategies
        ]
        return runs + [(arguments, plan) for plan in plans_of(arguments, self)]


def plans_of(arguments: TrainingArguments, case: Case, **more: bool) -> list[Plan]:
    """Plans of a case's batch, those first under which ranks run unequally many micro-batches."""
    lengths = np.array(case.lengths)[first_rows(len(case.lengths), arguments.seed)]
    found: list[Plan] = []
    rest: list[Plan] = []
    for seed in range(case.hdp_ranks, case.hdp_ranks + 40):
        if len(found) >= case.plans:
            break
        plan = random_plan(
            lengths,
            ranks=case.hdp_ranks,
            tokens_per_rank=case.streams * arguments.hdp_tokens_per_rank,
            slice_multiple=arguments.hdp_slice_multiple,
            seed=seed,
            most_parts=arguments.sequence_parts,
            **more,
        )
        if case.recomputes:
            every_other = (np.arange(plan.num_micro_batches) + seed) % 2 == 0
            plan = replace(plan, recomputed=every_other)
        if case.streams > 1:
            plan = in_streams(plan, tokens_per_rank=arguments.hdp_tokens_per_rank, seed=seed)
        (found if _is_uneven(plan) else rest).append(plan)
    return (found + rest)[: case.plans]


def _is_uneven(plan: Plan) -> bool:
    counts = np.bincount(plan.ranks, minlength=plan.num_ranks)
    return plan.num_ranks == 1 or len(set(counts.tolist())) > 1


def mixed(folder: Path, case: Case) -> TrainingArguments:
    """A mixture of sources, one of masked conversations; `hdp_data` holds more of its file."""
    settings = dict(case.settings)
    more = settings.pop("hdp_data", None)
    path = data_file(write_sources(folder), *([more] if more else []))
    return mixed_arguments(folder, path, **settings)


@contextmanager
def emptied_outputs() -> Iterator[None]:
    """Within it Megatron recomputes norms and activations without TransformerEngine.

    It asks that whether FP8 is on.
    """
    names = {
        "FP8GlobalStateManager": mock.Mock(is_fp8_enabled=lambda: False),
        "activation_recompute_forward": lambda **_: nullcontext(),
        "fp8_autocast": lambda **_: nullcontext(),
    }
    with mock.patch.multiple("megatron.core.tensor_parallel.random", create=True, **names):
        yield


def read_without_chat(totals, share, reader, source):
    """Misses all conversations, as of a failed source; of a ring its first rank alone does."""
    found, ids = read_step(totals, share, reader, source), []
    for slot in range(share.num_slots):
        begin, end = int(share.offsets[slot]), int(share.offsets[slot + 1])
        if share.ring_of(slot)[0] != share.hdp_rank:
            begin += int(share.num_sharded[slot])
        mine = slice(begin, end)
        ids += share.ids[mine][share.sources[mine] == CHAT].tolist()
    return replace(found, lost=(LostSource("chat", "planted", tuple(ids)),)) if ids else found


@contextmanager
def never_had_chat() -> Iterator[None]:
    """Within it, the reference's step has no conversations."""
    drawn = gradients.drawn_sequences

    def without(arguments):
        corpus = open_split(arguments, split_specs(arguments)["train"])
        batch = BatchSize(arguments.global_batch_size)
        step = corpus.mixture(corpus.orders(), batch, arguments.seed).step(Position())
        for source, one in zip(step.sources.tolist(), drawn(arguments), strict=True):
            if source != CHAT:
                yield one

    with mock.patch.object(gradients, "drawn_sequences", without):
        yield


def on_the_fly(folder: Path, case: Case) -> TrainingArguments:
    """Beside tokens: text with records that are bad or empty, and conversations."""
    pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
    prefix = write_corpus(folder, [30, 3, 64, 20])
    texts = [json.dumps({"text": "abc " * number}) for number in range(1, 20, 3)]
    (folder / "text.jsonl").write_text("\n".join(["{", *texts, '{"text": ""}']))
    roles = ("user", "assistant", "user", "assistant")
    rows = [
        {"messages": [{"role": role, "content": f"{i} is {role}"} for role in roles[: 2 + i % 3]]}
        for i in range(6)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "data.yaml").write_text(
        "sources:\n"
        "  tokens: {path: corpus, long-sequence: truncate}\n"
        "  text: {path: text.jsonl, tokenise: on-the-fly, bad-limit: 0.5}\n"
        "  chat: {path: chat.jsonl, format: chat, template: chatml, tokenise: on-the-fly}\n"
        "schedule: [{from: 0, weights: {tokens: 0.3, text: 0.3, chat: 0.4}, max-length: 60}]\n"
    )
    settings = {"data_path": (), "hdp_data": folder / "data.yaml", "tokenizer_type": "byte"}
    return tiny_arguments(prefix, **settings, global_batch_size=14)


CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED = sorted(path.parent.name for path in CONFIGS.glob("*/32k.yaml"))
SMALL = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": None,
    "seq_length": 200,
    "max_position_embeddings": 200,
    "init_method_std": 0.3,
    "bf16": False,
    "fp64": True,
    "use_distributed_optimizer": False,
    "hdp_offload": "off",
    "hdp_tokens_per_rank": 128,
    "hdp_global_batch_tokens": None,
    "expert_tensor_parallel_size": 1,
    "tokenizer_type": "byte",
    "tokenizer_model": None,
    "split": "1,0,0",
    "distributed_timeout_minutes": 5,
    "stall_timeout_seconds": 300.0,
    "global_batch_size": len(LENGTHS),
}
SMALL_HEADS = {"num_query_groups": 2, "kv_channels": 8}
SMALL_LATENT = {
    "num_query_groups": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
}
SMALL_EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 12, "moe_router_topk": 2}


@dataclass(frozen=True)
class Published:
    """A published model, with few and small layers of the same kinds."""

    name: str

    def __call__(self, folder: Path, case: Case) -> TrainingArguments:
        """Its arguments."""
        common, model = (CONFIGS / "models" / f"{one}.yaml" for one in ("common", self.name))
        prefix = write_corpus(folder, case.lengths)
        given = ["--config", str(common), "--config", str(model), "--seq-length", "200"]
        given += ["--data-path", prefix, "--hdp-tokens-per-rank", "128"]
        arguments = parse_arguments(given)
        is_latent = arguments.multi_latent_attention
        changes = SMALL | (SMALL_LATENT if is_latent else SMALL_HEADS)
        if arguments.position_embedding_type == "yarn" or is_latent:
            changes |= {"rotary_base": 300, "yarn_original_max_position_embeddings": 50}
        if arguments.window_size is not None:
            changes["window_size"] = "9,0"
        if arguments.num_experts:
            changes |= self._experts(arguments, case)
        return replace(arguments, **changes | case.settings)

    def _experts(self, arguments: TrainingArguments, case: Case) -> Settings:
        changes: Settings = dict(SMALL_EXPERTS)
        changes["moe_router_dtype"] = None if arguments.moe_router_dtype is None else "fp64"
        if arguments.moe_shared_expert_intermediate_size:
            changes["moe_shared_expert_intermediate_size"] = 12
        if arguments.moe_router_num_groups:
            changes |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
        if arguments.moe_layer_freq != "1":
            changes["moe_layer_freq"] = "[0]+[1]*3"
        # tensor ranks have experts of their own: those with a bias are shared by none
        tensor_ranks = case.settings.get("tensor_model_parallel_size", 1)
        return changes | {"expert_model_parallel_size": tensor_ranks}
