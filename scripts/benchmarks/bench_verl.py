"""GRPO steps of verl's on rollouts of long-tailed lengths: a static mesh and HDP, side by side.

Two of verl's engines over the same weights in the same processes (gloo, a thread a rank) take turns
in each step: old log-probabilities, then two updates by verl's loss and optimizer. One plans by
``hdp_strategy: static``, context parallelism of all ranks as the longest rollout wants it, the
other as HDP does. Rollouts are drawn, not sampled from the model; the reward of one is the share of
its tokens in the lower half of the vocabulary. What verl and Megatron-Bridge need on a CPU is told
in ``tests/verl/engines.py``. Run: ``python scripts/benchmarks/bench_verl.py``.
"""

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parents[2]))

VOCABULARY, TEMPERATURE = 256, 1.0
PROMPTS, ANSWERS, EPOCHS = 6, 4, 2  # of a step, of a prompt, over what was rolled out
STRATEGIES = ("static", "auto")


def rollouts(step: int, longest: int) -> Any:
    """A batch of verl's: answers to prompts, their lengths log-normal, with GRPO's advantages."""
    from tensordict import TensorDict
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    draw, whole, cuts = np.random.default_rng(step), [], []
    for _ in range(PROMPTS):
        prompt = draw.integers(0, VOCABULARY, int(draw.integers(16, 64)))
        for _ in range(ANSWERS):
            num = int(np.clip(draw.lognormal(np.log(longest / 16), 1.3), 8, longest - len(prompt)))
            whole.append(np.concatenate([prompt, draw.integers(0, VOCABULARY, num)]))
            cuts.append(len(prompt))
    of_cuts = list(zip(whole, cuts, strict=True))
    answers = [one[cut:] for one, cut in of_cuts]
    mask = torch.arange(longest)[None] < torch.tensor([len(one) for one in answers])[:, None]
    shares = torch.tensor([(one < VOCABULARY / 2).mean() for one in answers], dtype=torch.float32)
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = shares
    groups = np.repeat(np.arange(PROMPTS), ANSWERS)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask.float(), groups)

    def nested(rows: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor(
            [torch.as_tensor(x) for x in rows], layout=torch.jagged
        )

    columns = {
        "input_ids": nested(whole),
        "position_ids": nested([np.arange(len(one)) for one in whole]),
        "loss_mask": nested(
            [(np.arange(len(x)) >= n) * 1 for x, n in zip(whole, cuts, strict=True)]
        ),
        "prompts": nested([one[:cut] for one, cut in of_cuts]),
        "responses": nested(answers),
        "response_mask": nested([np.ones(len(one), dtype=np.int64) for one in answers]),
        "advantages": nested([row[: len(x)] for row, x in zip(advantages, answers, strict=True)]),
    }
    data = TensorDict(columns, batch_size=[len(whole)])
    how = {"temperature": TEMPERATURE, "pad_mode": DatasetPadMode.NO_PADDING}
    tu.assign_non_tensor(data, **how, calculate_entropy=False, global_batch_size=len(whole))
    return data


def stepped(engine: Any, data: Any, loss: Any) -> dict[str, float]:
    """One step of GRPO by an engine: what it found and what it took on this rank."""
    dist.barrier()
    began_s, busy_s = perf_counter(), process_time()
    with engine.eval_mode():
        log_probs = engine.infer_batch(data)["model_output"]["log_probs"].unbind()
    lengths = data["responses"].offsets().diff().tolist()
    old = [one[-n - 1 : -1] for one, n in zip(log_probs, lengths, strict=True)]
    data["old_log_probs"] = torch.nested.as_nested_tensor(old, layout=torch.jagged)
    with engine.train_mode():
        for _ in range(EPOCHS):  # behind the first, ratios are not 1
            out = engine.train_batch(data, loss)
        engine.lr_scheduler_step()
    busy_s = process_time() - busy_s
    dist.barrier()
    taken_s = perf_counter() - began_s
    norm = out["metrics"].get("grad_norm", 0.0)  # on the first rank
    mean = torch.cat(old).mean().item()
    return {
        "loss": sum(out["loss"]),
        "norm": float(norm),
        "s": taken_s,
        "busy": busy_s,
        "old": mean,
    }


def measure(rank: int, settings: argparse.Namespace, folder: str) -> None:
    """Body of a rank; the first prints."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(settings.ranks), "LOCAL_RANK": str(rank)}
    os.environ["VERL_ENGINE_VENDOR"] = "hdp"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=settings.ranks
    )
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    from tests.verl.engines import engine_of

    how = {"strategy": "megatron", "rollout_n": ANSWERS, "ppo_micro_batch_size_per_gpu": 1}
    loss = partial(ppo_loss, ActorConfig(**how, loss_agg_mode="token-mean"))
    sizes = {"lr": 1e-3, "tokens": settings.tokens}
    engines = {name: engine_of(folder, **sizes, hdp_strategy=name) for name in STRATEGIES}
    rows = []
    for step in range(settings.steps + 1):  # the first is not counted
        longest = settings.tokens * settings.ranks
        row: dict[str, Any] = {}
        for name in STRATEGIES[:: 1 if step % 2 else -1]:  # they take turns
            row[name] = stepped(engines[name], rollouts(step, longest), loss)
            busy = torch.tensor(row[name]["busy"])
            dist.all_reduce(busy, dist.ReduceOp.MAX)
            row[name]["busy"] = busy.item()
        rows.append(row)
    if rank == 0:
        tokens = [one.numpy() for one in rollouts(1, longest)["input_ids"].unbind()]
        print(f"lengths of a step: {sorted(map(len, tokens))}")
        told(rows, engines, tokens)
    dist.destroy_process_group()


def told(rows: list[dict[str, Any]], engines: dict[str, Any], tokens: list[Any]) -> None:
    """Prints what was found, a strategy a line, and how far both are apart."""
    for name in STRATEGIES:
        plan = engines[name].session.plan(tokens)
        degrees = np.diff(plan.rank_offsets).tolist()
        of_each = [row[name] for row in rows]
        print(
            f"{name}: {sum(one['s'] for one in of_each[1:]):.1f} s for {len(rows) - 1} steps, "
            f"{median(one['s'] for one in of_each[1:]):.2f} s each, busiest rank "
            f"{median(one['busy'] for one in of_each[1:]):.2f} s; degrees of rings "
            f"{min(degrees)} to {max(degrees)}; mean log-probability {of_each[0]['old']:.4f} to "
            f"{of_each[-1]['old']:.4f}"
        )
    for key in ("loss", "norm", "old"):
        pairs = [[row[name][key] for name in STRATEGIES] for row in rows]
        apart = max(abs(a - b) / max(abs(a), 1e-3) for a, b in pairs)
        print(f"{'log-probability' if key == 'old' else key}: {apart:.1e} apart at most")
    for key, what in (("s", "time"), ("busy", "busiest rank")):
        ratio = median(row["auto"][key] / row["static"][key] for row in rows[1:])
        print(f"auto / static: {ratio:.2f} of the {what}, median of steps")


def main() -> None:
    """Makes the model's folder and starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag, number, of in (
        ("ranks", 2, "processes"),
        ("steps", 20, "steps that are measured"),
        ("tokens", 1024, "tokens that a rank can hold"),
        ("hidden", 128, "width of the model"),
        ("layers", 4, "its layers"),
    ):
        parser.add_argument(f"--{flag}", type=int, default=number, help=f"{of} ({number})")
    settings = parser.parse_args()
    from tests.verl.engines import save_llama

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        save_llama(folder, settings.hidden, settings.layers, VOCABULARY)
        torch.multiprocessing.spawn(measure, (settings, folder), settings.ranks)


if __name__ == "__main__":
    main()
