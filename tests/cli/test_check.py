"""``megatron-hdp check`` passes every configuration that is shipped and refuses planted faults."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hdp.cli.check import memory_bytes
from megatron_hdp.cli.checking import as_text, check, cost_model_of, job_of
from megatron_hdp.cli.main import main
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.planner import CostModel
from megatron_hdp.planner.memory import RESERVE, stage_memory
from megatron_hdp.planner.shape import MODELS

CONFIGS = Path(__file__).parents[2] / "configs"
PAPERS = CONFIGS / "bytescale"
PAGE = (CONFIGS.parent / "docs" / "configurations.md").read_text()
PAPER_GPUS = {
    **{"llama-7b": 1024, "llama-13b": 2048, "llama-30b": 4096, "llama-70b": 8192},
    **{"mistral-8x7b": 8192, "mistral-8x22b": 12288},
}
EXPERTS_ACROSS_RANKS_GPUS = {"mistral-8x7b-ep8": 1024, "moe-30b": 512}
ALL_GPUS = PAPER_GPUS | EXPERTS_ACROSS_RANKS_GPUS
CONTEXTS = {"256k": 2**18, "512k": 2**19, "1m": 2**20, "2m": 2**21}
PARTS = ["common", *PAPER_GPUS, "moe-30b"]
SHIPPED = {
    f"{model}-{context}": gpus for model, gpus in ALL_GPUS.items() for context in CONTEXTS
} | {"small-1gpu": 1, "tiny-cpu": 4, "qwen3-vl-8b": 64}
LONG = {  # seconds each, as their stages are compared; one context of each model is not
    *(f"{model}-{context}" for model in ("llama-70b", "mistral-8x22b") for context in CONTEXTS)
} - {"llama-70b-2m", "mistral-8x22b-1m"}

SOUND = """
num-layers: 8
hidden-size: 1024
num-attention-heads: 8
num-query-groups: 4
ffn-hidden-size: 2816
swiglu: true
disable-bias-linear: true
attention-dropout: 0
hidden-dropout: 0
bf16: true
use-distributed-optimizer: true
seq-length: 16384
train-iters: 10
lr: 1e-4
hdp-tokens-per-rank: 8192
hdp-global-batch-tokens: 262144
"""


OFFLOADED = (
    *("seq-length: 262144", "hdp-tokens-per-rank: 16384", "hdp-global-batch-tokens: 524288"),
    "hdp-offload: auto",
)


def finding(path, gpus, memory=80e9, **others):
    return check([str(path)], num_gpus=gpus, gpu_memory_bytes=memory, preset="github", **others)


def options_of(path, *flags):
    """What training parses of a configuration."""
    return parse_arguments(
        ["--config", str(path), "--hybrid-data-parallel", "--data-path=x", *flags]
    )


def with_lines(tmp_path, *lines):
    """A file with the sound configuration and further lines, which win."""
    base, path = tmp_path / "sound.yaml", tmp_path / "changed.yaml"
    base.write_text(SOUND)
    path.write_text("config: sound.yaml\n" + "\n".join(lines))
    return path


def assert_row(model, context, found):
    """The table of docs/configurations.md says what was found."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {model} |"))
    _, gpus, degrees, tokens, most_gb, *steps = (cell.strip() for cell in row.split("|")[1:-1])
    job = found.job
    assert gpus == f"{job.num_gpus:,}"
    assert degrees == f"{job.tensor_ranks} x {job.stages} x {job.expert_ranks}"
    assert tokens == f"{job.tokens_per_rank:,}"
    assert found.memory.total / 1e9 <= float(most_gb) < found.memory.total / 1e9 + 4
    assert steps[list(CONTEXTS).index(context)] == cell_of(found)


def cell_of(found):
    """What a page's table says of a planned step."""
    chunks = found.job.model_chunks
    virtual = f", V {chunks}" if chunks > 1 else ""
    return f"{found.step.efficiency:.3f}, {found.step.step_s:.1f} s{virtual}"


def test_every_configuration_is_shipped():
    shipped = {path.stem for folder in (CONFIGS, PAPERS) for path in folder.glob("*.yaml")}
    assert shipped == set(SHIPPED)


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.slow if one in LONG else ()) for one in SHIPPED],
)
def test_a_shipped_configuration_is_sound_on_80_gb(name):
    model, _, context = name.rpartition("-")
    gpus = SHIPPED[name]
    path = (PAPERS if model in ALL_GPUS else CONFIGS) / f"{name}.yaml"
    found = finding(path, gpus)
    assert found.refusals == []
    assert found.step.efficiency > 0.7
    assert found.host_bytes < 64e9  # a node of eight GPUs: 512 GB
    # scripts/dev/configurations.py sets what is proposed
    assert found.best_virtual_stages == (found.job.model_chunks if found.job.stages > 1 else None)
    if model in ALL_GPUS:
        assert f"{gpus:,} GPUs of 80 GB" in path.read_text()
        assert_row(model, context, found)
        assert found.context_tokens == CONTEXTS[context]
        assert found.step.num_tokens == 2**25
        assert (found.step.num_positions is not None) == (model in EXPERTS_ACROSS_RANKS_GPUS)
        assert (found.step.exchanged_bytes > 0) == (found.job.shape.has_experts)
    if model in PAPER_GPUS:
        shape = MODELS[model].shape
        assert found.job.shape.num_layers == shape.num_layers
        assert found.job.shape.travelling_size == shape.travelling_size


@pytest.mark.parametrize("name", PARTS)
def test_parts_hold_only_keys_that_training_knows(name):
    path = (CONFIGS if name == "common" else PAPERS) / "models" / f"{name}.yaml"
    rest = "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1"
    rest += " --train-iters 2 --data-path x --hybrid-data-parallel --hdp-tokens-per-rank 8"
    rest += " --num-query-groups 1 --min-lr 0 --disable-bias-linear --attention-dropout 0"
    rest += " --tokenizer-model x --tokenizer-type HuggingFaceTokenizer"
    rest += " --hdp-global-batch-tokens 8 --hdp-offload off"
    parse_arguments(["--config", str(path), *rest.split()])


@pytest.mark.parametrize(
    ("name", "parameters", "vocabulary"),
    [("llama-70b", 70.6e9, 128_256), ("mistral-8x22b", 140.6e9, 32_768)],
)
def test_sizes_of_published_models(name, parameters, vocabulary):
    """Those of LLaMA 3 70B and Mixtral 8x22B, spread over tensor ranks and stages."""
    job = job_of(options_of(PAPERS / f"{name}-256k.yaml"), PAPER_GPUS[name], vocabulary)
    memory = stage_memory(job, 0)
    per_gpu = parameters / (job.tensor_ranks * job.stages)
    assert memory.weights == pytest.approx(2 * per_gpu, rel=0.01)
    assert memory.gradients == pytest.approx(4 * per_gpu, rel=0.01)
    assert memory.optimizer == pytest.approx(12 * per_gpu / job.hdp_ranks, rel=0.01)


TENSOR, STAGES = "tensor-model-parallel-size", "pipeline-model-parallel-size"
ALL_TO_ALL = "moe-token-dispatcher-type: alltoall"


@pytest.mark.parametrize(
    ("lines", "gpus", "memory", "message"),
    [
        (["hdp-token-per-rank: 5"], 8, 80, "unknown key 'hdp-token-per-rank': did you mean"),
        ([f"{TENSOR}: 3"], 8, 80, "must be multiples of --tensor-model-parall"),
        ([f"{STAGES}: 3"], 9, 80, "--num-layers 8 is not a multiple of"),
        ([f"{TENSOR}: 4"], 10, 80, "--gpus 10 is not a multiple .* use 8 GPUs"),
        (
            *([f"{TENSOR}: 2", "sequence-parallel: true", "hdp-tokens-per-rank: 81"], 8, 80),
            "--hdp-tokens-per-rank 81 is not a multiple .* use 80",
        ),
        (
            *([f"{TENSOR}: 4", "ffn-hidden-size: 2818"], 8, 80),
            "--ffn-hidden-size 2818 is not a multiple of --tensor-model-parallel-size 4",
        ),
        (
            *(["num-experts: 8", "expert-model-parallel-size: 8", ALL_TO_ALL], 12, 80),
            "12 GPUs of a stage are not a multiple .* = 8: use other degrees",
        ),
        (
            *(["hdp-tokens-per-rank: 2_000_000"], 8, 80),
            r"of stage 0 needs .* GB, expected at most 76.0 GB .*--hdp-tokens-per-rank \d+,.* fits",
        ),
        (["hidden-size: 16384"], 8, 20, "expected at most 19.0 GB .*: raise --tensor-model"),
        (
            *(["hdp-tokens-per-rank: 1024"], 8, 80),
            r"--seq-length 16,384 on 8 HDP ranks: .*16,?384 tokens .*needs 16 ranks",
        ),
    ],
)
def test_a_planted_fault_is_refused(tmp_path, lines, gpus, memory, message):
    found = finding(with_lines(tmp_path, *lines), gpus, memory * 1e9)
    assert len(found.refusals) == 1
    assert re.search(message, found.refusals[0]), found.refusals[0]


def test_offload_lets_the_long_sequence_fit(tmp_path):
    assert not finding(with_lines(tmp_path, *OFFLOADED[:3]), 8).is_sound
    found = finding(with_lines(tmp_path, *OFFLOADED), 8)
    assert found.is_sound
    assert found.step.most_tokens > 16384
    assert found.host_bytes > 0


def test_what_lockstep_costs_is_reported():
    found = finding(PAPERS / "moe-30b-256k.yaml", 512)
    text = as_text(found)
    assert f"  slots               {found.step.num_positions} at most, padding in 0.0%" in text
    # 65,536 tokens of a GPU: eight experts in 48 layers, 31 of 32 elsewhere, both ways, both passes
    sent = 65_536 * 48 * 8 * 2048 * 2 * 4 * 31 / 32
    assert found.step.exchanged_bytes == pytest.approx(512 * sent)
    assert f"  all-to-all          {sent / 1e9:.1f} GB a GPU go to experts" in text
    alone = as_text(finding(PAPERS / "llama-7b-256k.yaml", 1024))
    assert "slots" not in alone and "all-to-all" not in alone


def test_a_mixture_of_many_experts_has_the_size_of_published_ones():
    """30.5B parameters, 3.3B of them a token's, with its embedding and the output layer."""
    job = job_of(options_of(PAPERS / "moe-30b-256k.yaml"), 512, 151_936)
    whole = replace(job, expert_ranks=1)
    assert stage_memory(whole, 0).weights == pytest.approx(2 * 30.5e9, rel=0.01)
    embedding = job.shape.embedding
    assert job.shape.active_parameters + embedding == pytest.approx(3.35e9, rel=0.01)


def test_experts_are_costed_apart(tmp_path):
    lines = ["num-experts: 8", "moe-ffn-hidden-size: 1408", ALL_TO_ALL]
    recomputed = ["recompute-granularity: full", "recompute-method: uniform"]
    for more, factor in (([], 1), ([*recomputed, "recompute-num-layers: 1"], 4 / 3)):
        options = options_of(with_lines(tmp_path, *lines, *more))
        job = job_of(options, 8)
        costs = cost_model_of(options, job)
        experts = 8 * 2 * 3 * 1024 * 1408
        assert costs.b_experts == pytest.approx(factor * 6 * experts / 400e12)
        output = job.shape.output_parameters  # runs once
        linear = 6 * (factor * (job.shape.active_parameters - output) + output) / 400e12
        assert costs.linear_s_per_token == pytest.approx(linear)


LATENT = [
    *("multi-latent-attention: true", "q-lora-rank: 256"),
    *("kv-lora-rank: 128", "qk-layernorm: true"),
]


def test_latents_travel_where_that_takes_less(tmp_path):
    """A job across nodes plans with the latent's bytes, unless keys and values are to travel."""
    kept = {}
    for way in ("auto", "latent", "kv"):
        path = tmp_path / "latent.yaml"
        lines = [one for one in SOUND.splitlines() if "groups" not in one]
        path.write_text("\n".join([*lines, *LATENT, f"hdp-mla-ring: {way}"]))
        found = finding(path, 16)
        assert found.refusals == []
        options = options_of(path)
        kept[way] = cost_model_of(options, job_of(options, 16)).kv_bytes_per_token
    layer = 8 * (192 + 128)  # heads of keys and of values
    assert kept["kv"] == 8 * layer * 2
    assert kept["auto"] == kept["latent"] == 8 * (128 + 64) * 2


def test_auto_parts_are_planned_and_their_keys_counted(tmp_path):
    stages = ["num-layers: 8", "pipeline-model-parallel-size: 2"]
    whole, auto, named = (
        finding(with_lines(tmp_path, *stages, *more), 8)
        for more in ((), *([f"hdp-sequence-parts: {number}"] for number in ("auto", 16)))
    )
    assert auto.memory == named.memory and auto.memory.keys > whole.memory.keys == 0
    assert auto.step.step_s == named.step.step_s < whole.step.step_s
    alone = finding(with_lines(tmp_path, "hdp-sequence-parts: auto"), 8)
    assert alone.is_sound and alone.memory.keys == 0


def test_virtual_stages_hold_more_and_are_planned_for(tmp_path):
    stages = ["num-layers: 8", "pipeline-model-parallel-size: 2"]
    plain = finding(with_lines(tmp_path, *stages), 8)
    virtual = finding(with_lines(tmp_path, *stages, "num-virtual-stages-per-pipeline-rank: 2"), 8)
    activations = virtual.memory.activations / plain.memory.activations
    assert activations == pytest.approx(1 + 1 / 4)
    assert virtual.step.efficiency > plain.step.efficiency + 0.02
    assert "2.5 full micro-batches of 4 layers" in as_text(virtual)


@pytest.mark.parametrize(
    ("lines", "smaller"),
    [
        (["recompute-granularity: full", "recompute-method: uniform"], "activations"),
        (["tensor-model-parallel-size: 2", "sequence-parallel: true"], "activations"),
        (["tensor-model-parallel-size: 2"], "activations"),
        (["pipeline-model-parallel-size: 2"], "weights"),
        ([], "weights"),
    ],
)
def test_what_saves_memory_saves_memory(tmp_path, lines, smaller):
    """The base has an output layer of its own, which the others share with the embedding."""
    base = finding(with_lines(tmp_path, "untie-embeddings-and-output-weights: true"), 8).memory
    changed = finding(with_lines(tmp_path, *lines), 8).memory
    assert getattr(changed, smaller) < getattr(base, smaller)


def test_the_fused_loss_makes_nothing_that_grows_with_the_vocabulary(tmp_path):
    """Beyond a chunk of logits: the weights' gradient goes into the buffer of gradients."""
    small = finding(with_lines(tmp_path), 8).job
    shape = replace(small.shape, vocab_size=128_000)
    small = replace(small, tokens_per_rank=32768, shape=shape)
    large = replace(small, shape=replace(shape, vocab_size=256_000))
    stages = [stage_memory(job, job.stages - 1) for job in (small, large)]
    assert stages[0].loss == stages[1].loss and stages[0].gradients < stages[1].gradients
    with_logits = [replace(job, fused_loss=False) for job in (small, large)]
    losses = [stage_memory(job, job.stages - 1).loss for job in with_logits]
    assert 1.9 * losses[0] < losses[1]


def test_recomputation_takes_time(tmp_path):
    full = ["recompute-granularity: full", "recompute-method: uniform"]
    without = finding(with_lines(tmp_path), 8)
    again = finding(with_lines(tmp_path, *full), 8)
    assert again.step.step_s == pytest.approx(4 / 3 * without.step.step_s, rel=0.02)
    assert again.step.flops_per_s == pytest.approx(3 / 4 * without.step.flops_per_s, rel=0.02)


def test_exit_code_text_and_json(tmp_path, capsys):
    path = str(with_lines(tmp_path))
    assert main(["check", path, "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert text.endswith("\nsound\n")
    assert main(["check", path, "--gpus", "8", "--json", "--preset", "byted"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["is_sound"] and figures["step"]["preset"] == "byted"
    parts = ("weights", "gradients", "optimizer", "activations", "keys", "recomputed")
    parts += ("backward", "ring_buffers", "second_stream", "in_flight", "loss", "runtime")
    assert figures["needed_bytes"] == pytest.approx(sum(figures["memory"][part] for part in parts))
    assert figures["reserve_bytes"] == RESERVE * 80e9
    assert main(["check", path, "--gpus", "8", "--gpu-memory", "4GB"]) == 1
    assert "refused: --hdp-tokens-per-rank 8,192: a GPU of stage 0" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "absent.yaml"), "--gpus", "8"]) == 1
    assert "refused: --config" in capsys.readouterr().out
    for wrong in (["--gpus", "0"], ["--gpus", "8", "--vocab-size", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(["check", path, *wrong])
        assert f"{wrong[-2]}: found 0, expected at least 1" in capsys.readouterr().err


def test_what_was_measured_of_cuda_and_nccl_is_counted(tmp_path, capsys):
    path, file = with_lines(tmp_path), tmp_path / "cost-model.json"
    file.write_bytes(replace(CostModel(1e-9, 1e-6, 1.0), runtime_bytes=5.5e9).to_json())
    measured = with_lines(tmp_path, f"hdp-cost-model: {file}")
    for argv, line in (
        ([measured], "CUDA, NCCL             5.50  measured"),
        ([measured, "--runtime-memory", "6.1GB"], "CUDA, NCCL             6.10  measured"),
    ):
        assert main(["check", *map(str, argv), "--gpus", "8"]) == 0
        assert line in capsys.readouterr().out
    path = with_lines(tmp_path)
    assert main(["check", str(path), "--gpus", "8"]) == 0
    assert "CUDA, NCCL             3.20  assumed, 3 communicators" in capsys.readouterr().out


def test_several_files(tmp_path):
    later = tmp_path / "later.yaml"
    later.write_text("hdp-tokens-per-rank: 4096\n")
    paths = [str(with_lines(tmp_path)), str(later)]
    found = check(paths, num_gpus=8, gpu_memory_bytes=80e9, preset="github")
    assert found.job.tokens_per_rank == 4096


def test_a_batch_in_sequences(tmp_path):
    path = with_lines(tmp_path)
    path.write_text(SOUND.replace("hdp-global-batch-tokens: 262144", "global-batch-size: 50"))
    assert finding(path, 8).step.num_sequences == 50


def test_sizes():
    sizes = {"80GB": 80e9, "79.6GiB": 79.6 * 2**30, "81559MiB": 81559 * 2**20, "2TB": 2e12}
    for text, size in sizes.items():
        assert memory_bytes("--host-memory", text) == size
    for wrong in ("80", "0GB", "80 gb", "-1GB"):
        with pytest.raises(ValueError, match="--gpu-memory is .* expected a size like 80GB"):
            memory_bytes("--gpu-memory", wrong)


def test_a_node_that_cannot_hold_what_is_offloaded_is_refused(tmp_path, capsys):
    path = with_lines(tmp_path, *OFFLOADED)
    needed = finding(path, 8).node_host_bytes
    assert needed == 8 * finding(path, 8).host_bytes
    assert finding(path, 8, host_memory_bytes=needed / 0.95 + 1).is_sound
    (refusal,) = finding(path, 8, host_memory_bytes=needed / 0.95 - 1e6).refusals
    assert re.search(r"8 GPUs of a node x .* GB = .* GB .* expected at most .* GB \(", refusal)
    (limit,) = re.findall(r"set --hdp-host-memory-gb ([0-9.]+), or --hdp-offload off", refusal)
    assert float(limit) == pytest.approx(needed / 8e9, abs=0.1)
    (refusal,) = finding(with_lines(tmp_path, *OFFLOADED, "hdp-host-memory-gb: 0.1"), 8).refusals
    assert "or raise --hdp-host-memory-gb" in refusal
    path = with_lines(tmp_path, *OFFLOADED)
    assert finding(path, 8, host_memory_bytes=needed / 2, gpus_per_node=2).is_sound
    assert main(["check", str(path), "--gpus", "8"]) == 0
    assert "a node of 8 GPUs, not checked: give --host-memory" in capsys.readouterr().out
    assert main(["check", str(path), "--gpus", "8", "--host-memory", "10GB"]) == 1
    text = capsys.readouterr().out
    assert "a node of 8 GPUs, of 10.0" in text and "refused: --hdp-offload auto: 8 GPUs" in text
    with pytest.raises(SystemExit, match="2"):
        main(["check", str(path), "--gpus", "8", "--gpus-per-node", "0"])
    assert main(["check", str(path), "--gpus", "8", "--host-memory", "much"]) == 2


def test_what_leaves_stays_within_the_host(tmp_path):
    """Sequences that would share ranks by offload run on more of them instead."""
    lines = [OFFLOADED[0].replace("262144", "131072"), *OFFLOADED[1:]]
    free = finding(with_lines(tmp_path, *lines), 8)
    limit = free.host_bytes / 2e9
    found = finding(with_lines(tmp_path, *lines, f"hdp-host-memory-gb: {limit}"), 8)
    assert found.is_sound and 0 < found.host_bytes <= 1e9 * limit


def test_streams_are_as_long_as_what_hosts_hold(tmp_path, capsys):
    """Keys and values of 8 layers, 1,024 values each, and their gradients: 6 bytes a value.

    Or 4, where these are added up in bfloat16. Half of the capacity keeps some on the device.
    """
    lines = ("seq-length: 4194304", "hdp-long-sequence: stream", "hdp-offload: auto")
    lines += ("hdp-global-batch-tokens: 8388608",)
    longest, on_host = [], []
    for sums, of_value in (("float32", 6), ("model", 4)):
        path = with_lines(tmp_path, *lines, f"hdp-stream-sums: {sums}")
        found = finding(path, 8, host_memory_bytes=1e12)
        assert found.is_sound and 2**18 < found.streamed_tokens < 2**19
        assert found.host_bytes >= found.streamed_tokens * 8 * 1024 * of_value
        of_hosts = 0.95e12 / 8 / (8 * 1024 * of_value)
        assert of_hosts < found.longest_stream_tokens / 8 < 1.1 * of_hosts
        longest.append(found.longest_stream_tokens)
        on_host.append(found.streamed_tokens)
    assert longest[1] == pytest.approx(1.5 * longest[0], abs=8) and on_host[1] < on_host[0]
    path = with_lines(tmp_path, *lines)
    (refusal,) = finding(path, 8, host_memory_bytes=100e9).refusals
    assert "lower --seq-length to" in refusal
    assert main(["check", str(path), "--gpus", "8", "--host-memory", "1TB"]) == 0
    said = capsys.readouterr().out
    assert "longest stream" in said and "all three times: streams" in said


@pytest.mark.slow
@pytest.mark.parametrize("virtual_stages", [(), ("num-virtual-stages-per-pipeline-rank: 2",)])
def test_streams_of_stages_are_as_long_as_a_plan_can_hold(tmp_path, virtual_stages):
    """Two stages: the first keeps what waits on it for backward, and what parts came with."""
    lines = ("hdp-long-sequence: stream", "hdp-offload: auto", "hdp-host-memory-gb: 11.8")
    lines += ("hdp-global-batch-tokens: 8388608", "pipeline-model-parallel-size: 2")
    lines += virtual_stages

    def found(length):
        path = with_lines(tmp_path, *lines, f"seq-length: {length}")
        return finding(path, 8, host_memory_bytes=100e9)

    longest = found(2**18).longest_stream_tokens
    assert found(longest).is_sound and not found(2 * longest).is_sound


def test_host_memory_is_no_matter_without_offload(tmp_path):
    assert finding(with_lines(tmp_path), 8, host_memory_bytes=1.0).is_sound


@pytest.mark.parametrize(
    ("num_layers", "offload", "stages", "is_sound"),
    [
        (8, "off", 1, True),
        (4, "auto", 2, True),
        (1, "off", 1, True),  # as files that say nothing of layers
        (1, "auto", 1, False),
        (8, "off", 2, False),
        (32, "off", 1, False),
    ],
)
def test_a_cost_model_of_other_layers_is_refused(tmp_path, num_layers, offload, stages, is_sound):
    figures = {"a": 1e-10, "b": 1e-6, "kv_bytes_per_token": 16384, "num_layers": num_layers}
    (tmp_path / "cost.json").write_text(json.dumps(figures))
    lines = [f"hdp-cost-model: {tmp_path}/cost.json", f"hdp-offload: '{offload}'"]
    found = finding(with_lines(tmp_path, *lines, f"pipeline-model-parallel-size: {stages}"), 8)
    assert found.is_sound is is_sound, found.refusals
    if num_layers == 1 and is_sound:
        (tmp_path / "cost.json").write_text(json.dumps(figures | {"block_s": 1e-5}))
        (refusal,) = finding(with_lines(tmp_path, *lines), 8).refusals
        assert "num_layers 1, expected the 8 layers of a pipeline stage" in refusal
    if not is_sound:
        (refusal,) = found.refusals
        assert f"num_layers {num_layers}, expected the {8 // stages} layers" in refusal
