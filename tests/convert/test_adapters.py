"""Adapters of a run as PEFT's files and merged: the same logits as under HDP."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_hdp.cli.main import main
from megatron_hdp.convert.to_hugging_face import to_hugging_face
from megatron_hdp.convert.to_megatron import to_megatron
from megatron_hdp.session import HdpSession
from tests.convert.models import VOCABULARY, logits_of, save_model
from tests.convert.test_families import HDP, documents, largest_difference, losses_of

TRAINING = ["--train-iters=3", "--lr=3e-2", "--split=1,0,0", "--global-batch-size=6"]
ADAPTERS = ["--lora-rank=3", "--lora-alpha=12"]
TENSOR = ["--tensor-model-parallel-size=2", "--hdp-tokens-per-rank=128"]

SHARED = ["--expert-model-parallel-size=2", "--hdp-tokens-per-rank=128"]


def log_probs_of_adapted(flags, base, folder, sequences):
    """Body of a rank: log-probabilities by the base and by its adapters beside it."""
    session = HdpSession.from_flags(flags, vocab_size=VOCABULARY)
    found = []
    for path in (base, folder):
        session.load_weights(path)
        found.append(session.log_probs(sequences))
    session.close()
    return found


@pytest.fixture(scope="module")
def tuned(request, tmp_path_factory):
    """By a model's name: its folder, its checkpoint, one of adapters, documents."""
    run_ranks = request.getfixturevalue("run_ranks")
    made = {}

    def of(name, layout=TENSOR):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model, base = save_model(name, folder / "model"), folder / "base"
            to_megatron(model, base, None, print)
            prefix, sequences = documents(folder)
            argv = [f"--config={base}/model.yaml", f"--pretrained-checkpoint={base}"]
            argv += [f"--data-path={prefix}", f"--save={folder}/adapters"]
            losses = run_ranks(2, losses_of, [*argv, *TRAINING, *HDP, *ADAPTERS, *layout])[0]
            assert losses[-1] < losses[0]
            made[name] = model, base, folder / "adapters", sequences
        return made[name]

    return of


def added(folder, base, scale):
    """A base's tensors and what PEFT's files add to them, by the definition of LoRA."""
    adapters = load_file(folder / "adapter_model.safetensors")
    for name in [one for one in adapters if ".lora_A." in one]:
        weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        product = adapters[name.replace(".lora_A.", ".lora_B.")] @ adapters[name]
        assert product.abs().max() > 0, name
        base[weight] = base[weight] + scale * product
    return base


def converted(tuned, tmp_path):
    """What `tuned` has of a model, after the command has written both ways of its adapters."""
    model, base, folder, sequences = tuned("llama3")
    words = ["convert", "--from", str(folder), "--like", str(model), "--to-hf"]
    assert main([*words, str(tmp_path / "separate")]) == 0
    merge = ["--adapters", "merged", "--base", str(base)]
    assert main([*words, str(tmp_path / "merged"), *merge]) == 0
    return model, base, folder, sequences


def test_separate_and_merged(tuned, tmp_path):
    """Both are the same model; what is not adapted keeps its bits."""
    model, *_ = converted(tuned, tmp_path)
    settings = json.loads((tmp_path / "separate" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (3, 12.0)
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(settings["target_modules"]) == every
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    expected = added(tmp_path / "separate", load_file(model / "model.safetensors"), 4.0)
    assert merged.keys() == expected.keys()
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_what_is_merged_is_what_was_trained(run_ranks, tuned, tmp_path):
    """The same log-probabilities as by the adapters beside their base."""
    model, base, folder, sequences = converted(tuned, tmp_path)
    flags = [f"--config={base}/model.yaml", *TRAINING, *HDP, *ADAPTERS, "--hdp-tokens-per-rank=64"]
    before, after = run_ranks(2, log_probs_of_adapted, flags, base, folder, sequences)[0]
    assert largest_difference(model, before, sequences) < 1e-4
    assert largest_difference(tmp_path / "merged", after, sequences) < 1e-4
    assert largest_difference(model, after, sequences) > 1e-2


@pytest.mark.slow
def test_peft_gives_the_same_logits(tuned, tmp_path):
    """Its real code, where it is installed."""
    peft = pytest.importorskip("peft", reason="not installed: pip install peft")
    import transformers

    model, base, folder, sequences = tuned("llama3")
    to_hugging_face(folder, tmp_path / "separate", print, like=model)
    to_hugging_face(folder, tmp_path / "merged", print, like=model, adapters="merged", base=base)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(loaded, tmp_path / "separate").eval()
    for one in sequences:
        tokens = torch.from_numpy(one)
        with torch.no_grad():
            found = adapted(tokens[None]).logits[0].float()
        expected = logits_of(tmp_path / "merged", tokens)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_experts_are_merged_or_refused(tuned, tmp_path):
    """One tensor of transformers holds all experts; PEFT has no files for that."""
    model, base, folder, _ = tuned("gpt-oss", SHARED)
    with pytest.raises(ValueError, match="add --adapters merged"):
        to_hugging_face(folder, tmp_path / "separate", print, like=model)
    assert not (tmp_path / "separate").exists()
    to_hugging_face(folder, tmp_path / "merged", print, like=model, adapters="merged", base=base)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    before = load_file(model / "model.safetensors")
    changed = {name for name in before if not torch.equal(merged[name], before[name])}
    assert any("experts.gate_up_proj" in name for name in changed)
    assert not any("router" in name or "norm" in name or "embed" in name for name in changed)


def test_what_does_not_fit_together(tuned, tmp_path, capsys):
    """One sentence, and nothing is written."""
    model, base, folder, _ = tuned("llama3")
    target = str(tmp_path / "new")
    cases = {
        "expected --base DIR": ["--from", str(folder), "--adapters", "merged", "--to-hf", target],
        "found a whole model": ["--from", str(base), "--adapters", "separate", "--to-hf", target],
        "--base: found it with --from-hf": [
            *("--from-hf", str(model), "--to", target, "--base", str(base))
        ],
    }
    for sentence, words in cases.items():
        assert main(["convert", *words, *(["--like", str(model)] * ("--from" in words))]) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1
        assert not (tmp_path / "new").exists()
