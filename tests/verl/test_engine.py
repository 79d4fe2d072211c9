"""verl's own losses, tensors and optimizer over HDP's ranks, against transformers on one."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.func import functional_call

from tests.verl.engines import HOW, engine_of, is_there, save_experts, save_llama

VOCABULARY, TEMPERATURE, BALANCE = 128, 0.9, 5.0
TEMPERATURES = (0.5, 0.9, 1.0, 1.5, 2.0, 0.7)  # of sequences, in one case
LENGTHS = ((200, 100), (30, 10), (500, 200), (100, 50), (1, 199), (60, 30))  # prompts, answers
LOSSES = {  # settings of the actor; None: supervised
    "sft": None,
    "ppo": {"loss_agg_mode": "token-mean"},
    "seq-mean": {"loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "entropy": {"loss_agg_mode": "seq-mean-token-sum", "entropy_coeff": 0.02},
    "temperatures": {"loss_agg_mode": "token-mean"},
    "gspo": {"loss_agg_mode": "seq-mean-token-mean", "policy_loss": "gspo"},
}


LAYOUTS = {  # ranks, the engine's, the model
    "ranks alone": (2, {}, save_llama),
    "tensor": (4, {"tensor": 2}, save_llama),
    "sequence": (4, {"tensor": 2, "sequence": True}, save_llama),
    "pipeline": (4, {"pipeline": 2}, save_llama),
    "virtual": (4, {"pipeline": 2, "virtual": 2}, partial(save_llama, layers=4)),
    "experts": (4, {"experts": 2}, save_experts),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_are_those_of_one_rank(run_ranks, tmp_path, monkeypatch, layout):
    """Also metrics, log-probabilities and entropies, in the batch's order."""
    if not is_there():
        pytest.skip(HOW)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "hdp")
    num_ranks, how, save = LAYOUTS[layout]
    save(tmp_path, vocabulary=VOCABULARY)
    found = run_ranks(num_ranks, trained, str(tmp_path), how, timeout_s=800)
    expected = by_transformers(str(tmp_path))
    for of_rank in found:
        assert max(of_rank["degrees"]) == 2 > min(of_rank["degrees"]), "rings, and ranks alone"
        for name in LOSSES:
            one, wanted = of_rank[name], expected[name]
            assert one["loss"] == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-6), name
            assert one["norm"] == pytest.approx(wanted["norm"], rel=1e-4), name
            assert one["metrics"].keys() == wanted["metrics"].keys()
            for key, value in wanted["metrics"].items():
                assert one["metrics"][key] == pytest.approx(value, rel=1e-3, abs=1e-4), (name, key)
            for key in ("log_probs", "entropy"):
                if key in wanted:
                    assert np.abs(one[key] - wanted[key]).max() < 1e-4, (name, key)


def batch_of(name):
    """A TensorDict of verl's, the same wherever it is made."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    draw = np.random.default_rng(0)

    def nested(rows):
        return torch.nested.as_nested_tensor(list(map(torch.as_tensor, rows)), layout=torch.jagged)

    whole = [draw.integers(0, VOCABULARY, sum(pair)) for pair in LENGTHS]
    answers = [n for _, n in LENGTHS]
    columns = {
        "input_ids": nested(whole),
        "position_ids": nested([np.arange(len(one)) for one in whole]),
        "loss_mask": nested([(np.arange(p + n) >= p).astype(np.int64) for p, n in LENGTHS]),
    }
    if LOSSES[name] is not None:
        columns |= {
            "prompts": nested([one[:p] for one, (p, _) in zip(whole, LENGTHS, strict=True)]),
            "responses": nested([one[p:] for one, (p, _) in zip(whole, LENGTHS, strict=True)]),
            "response_mask": nested([np.ones(n, dtype=np.int64) for n in answers]),
            "old_log_probs": nested([draw.normal(-4.8, 0.3, n).astype("f4") for n in answers]),
            "ref_log_prob": nested([draw.normal(-4.8, 0.3, n).astype("f4") for n in answers]),
            "advantages": nested([draw.normal(0, 1, n).astype("f4") for n in answers]),
        }
    data = TensorDict(columns, batch_size=[len(LENGTHS)])
    if name == "temperatures":
        data["temperature"] = torch.tensor(TEMPERATURES)
    else:
        tu.assign_non_tensor(data, temperature=TEMPERATURE)
    tu.assign_non_tensor(
        data,
        calculate_entropy=name == "entropy",
        pad_mode=DatasetPadMode.NO_PADDING,
        global_batch_size=len(LENGTHS),
    )
    return data


def loss_of(name):
    """verl's own."""
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss, sft_loss

    if LOSSES[name] is None:
        return partial(sft_loss, None)
    settings = dict(LOSSES[name])
    policy = PolicyLossConfig(loss_mode=settings.pop("policy_loss", "vanilla"))
    how = {"strategy": "megatron", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    return partial(ppo_loss, ActorConfig(**how, policy_loss=policy, **settings))


def plain(metrics):
    """Numbers of verl's metrics, each reduced as it says."""
    from verl.utils.metric import Metric

    found = {}
    for name, one in metrics.items():
        value = one.aggregate() if isinstance(one, Metric) else np.mean(one)
        found[name] = float(value)
    return found


def trained(folder, how):
    """Body of a rank: what verl's engine of the vendor hdp gives for each loss."""
    engine = engine_of(folder, **how)
    assert type(engine).__name__ == "HdpEngine"
    assert (engine.get_data_parallel_size(), engine.get_data_parallel_rank()) == (1, 0)
    assert dist.get_world_size(engine.get_data_parallel_group()) == 1
    found = {}
    for name in LOSSES:
        data = batch_of(name)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            out = engine.forward_backward_batch(data, loss_of(name), forward_only=False)
            norm = engine.optimizer_step()
        found[name] = {"loss": sum(out["loss"]), "norm": float(norm)}
        found[name]["metrics"] = plain(out["metrics"])
        for key, one in out["model_output"].items():
            found[name][key] = one.values().numpy()
        with engine.eval_mode():
            again = engine.forward_backward_batch(data, None, forward_only=True)
        for key, one in again["model_output"].items():
            assert torch.equal(one.values(), out["model_output"][key].values())
    tokens = [one.numpy() for one in batch_of("sft")["input_ids"].unbind()]
    found["degrees"] = np.diff(engine.session.plan(tokens).rank_offsets).tolist()
    names = [name for name, _ in engine.get_per_tensor_param()[0]]
    assert "lm_head.weight" in names and len(names) == len(set(names))
    return found


def by_transformers(folder, names=LOSSES, merged=None, balance=0.0):
    """The same by verl's losses over transformers' model in float64.

    Args:
        folder: of the model.
        names: of losses.
        merged: (weights by name in place of the model's, what the gradients are by), if others.
        balance: of experts, the coefficient; `loss` is without.
    """
    from verl.utils import tensordict_utils as tu
    from verl.utils.py_functional import append_to_dict

    how = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    others, parameters = merged or ({}, list(model.parameters()))
    found = {}
    for name in names:
        data, outputs, routed = batch_of(name), {"log_probs": [], "entropy": []}, []
        several = TEMPERATURES if name == "temperatures" else [TEMPERATURE] * len(LENGTHS)
        for tokens, one in zip(data["input_ids"].unbind(), several, strict=True):
            asked = {"output_router_logits": True} if balance else {}
            out = functional_call(model, others, (tokens[None],), asked)
            routed += [balance_of(each) for each in out.router_logits] if balance else []
            logits = out.logits[0, :-1] / one
            log_p = logits.log_softmax(-1)
            wanted = log_p.gather(1, tokens[1:, None])[:, 0]
            entropies = -(log_p.exp() * log_p).sum(-1)
            for key, one in (("log_probs", wanted), ("entropy", entropies)):
                outputs[key].append(torch.nn.functional.pad(one, (0, 1)))
        if name != "entropy":
            del outputs["entropy"]
        ends = np.cumsum([0, *map(sum, LENGTHS)])
        nested = {
            key: torch.nested.nested_tensor_from_jagged(torch.cat(one), torch.as_tensor(ends))
            for key, one in outputs.items()
        }
        num = data["loss_mask"].values().sum().item()
        tu.assign_non_tensor(data, batch_num_tokens=num, dp_size=1, num_micro_batch=1)
        loss, metrics = loss_of(name)(model_output=nested, data=data, dp_group=None)
        whole = loss + balance * sum(routed) / sum(map(sum, LENGTHS))
        gradients = torch.autograd.grad(whole, parameters)
        by_name = {}
        append_to_dict(by_name, metrics)
        norm = torch.stack([one.norm() for one in gradients]).norm().item()
        found[name] = {"loss": loss.item(), "norm": norm, "metrics": plain(by_name)}
        answers = np.concatenate([np.arange(p + n) >= p - 1 for p, n in LENGTHS])
        answers[ends[1:] - 1] = False  # what comes behind a sequence
        for key, one in nested.items():
            values = one.detach().values().numpy()
            found[name][key] = np.where(answers, values, 0) if name != "sft" else values
    return found


def balance_of(logits, chosen=2):
    """``seq_aux_loss`` of one layer and sequence, by its tokens ``[n, experts]``, times n."""
    num, num_experts = logits.shape
    scores = logits.softmax(-1)
    share = torch.zeros_like(scores).scatter(1, scores.topk(chosen).indices, 1).mean(0) / chosen
    return num * num_experts * (share * scores.mean(0)).sum()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_balancing_losses_are_those_of_one_rank(run_ranks, tmp_path, monkeypatch):
    """A mean over tokens beside verl's loss, whatever that is divided by."""
    if not is_there():
        pytest.skip(HOW)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "hdp")
    save_experts(tmp_path, vocabulary=VOCABULARY)
    how = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": BALANCE}
    found = run_ranks(2, trained, str(tmp_path), how, timeout_s=800)
    expected = by_transformers(str(tmp_path), balance=BALANCE)
    without = by_transformers(str(tmp_path))
    apart = [abs(expected[one]["norm"] / without[one]["norm"] - 1) for one in LOSSES]
    assert max(apart) > 1e-2
    for name in LOSSES:
        for one in found:
            assert one[name]["loss"] == pytest.approx(expected[name]["loss"], rel=1e-5, abs=1e-6)
            assert one[name]["norm"] == pytest.approx(expected[name]["norm"], rel=1e-4), name
