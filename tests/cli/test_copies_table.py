"""Host memory of copies: the table of `docs/design/copies.md`, and what `check` says."""

import dataclasses
from pathlib import Path

from megatron_hdp.cli.checking import check, job_of
from megatron_hdp.cli.checking.finding_text import as_text
from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.planner.memory import copies_bytes, shard_bytes

REPOSITORY = Path(__file__).parents[2]
ROWS = (
    ("LLaMA-7B", "configs/bytescale/llama-7b-256k.yaml", 1),
    ("Llama 3.1 70B", "configs/llama-3.1-70b/128k.yaml", 8),
)
NODE_GPUS = 8


def job_of_model(config, tensor_ranks, ranks):
    """Without pipeline stages."""
    argv = ["--config", str(REPOSITORY / config), "--hybrid-data-parallel"]
    job = job_of(parse_arguments(argv, needs_data=False), ranks)
    layout = {"stages": 1, "model_chunks": 1, "stage_layers": (), "tensor_ranks": tensor_ranks}
    return dataclasses.replace(job, num_gpus=ranks * tensor_ranks, **layout)


def rows():
    for model, config, tensor_ranks in ROWS:
        for ranks in (8, 64):
            job = job_of_model(config, tensor_ranks, ranks)
            one = shard_bytes(job)
            of_gpu = copies_bytes(one)
            yield (
                f"| {model}, TP{tensor_ranks} | {ranks} | {ranks * tensor_ranks} | "
                f"{one / 1e9:.2f} GB | {of_gpu / 1e9:.1f} GB | {NODE_GPUS * of_gpu / 1e9:.0f} GB |"
            )


def test_the_page_says_what_the_memory_model_says():
    page = (REPOSITORY / "docs" / "design" / "copies.md").read_text()
    assert [row for row in rows() if row not in page] == []


def test_twelve_bytes_a_parameter_divided_by_the_ranks():
    job = job_of_model(ROWS[0][1], 1, 64)
    # 32 layers of queries and output, keys and values, MLP, norms; two embeddings, the last norm
    hidden, inner, keys = 4096, 11008, 8 * 128
    matrices = 2 * hidden**2 + 2 * hidden * keys + 3 * hidden * inner
    parameters = 32 * (matrices + 2 * hidden) + hidden
    parameters += 2 * hidden * job.shape.vocab_size
    assert shard_bytes(job) == 12 * parameters / 64


def test_check_counts_copies_in_a_nodes_memory(tmp_path):
    def found(copies="on", **more):
        other = tmp_path / "copies.yaml"
        flags = {"hdp-survive": "true", "hdp-optimizer-copies": f'"{copies}"'}
        flags |= {"tensor-model-parallel-size": "1", "sequence-parallel": "false"}
        flags["hdp-offload"] = '"off"'
        other.write_text("\n".join(f"{flag}: {value}" for flag, value in flags.items()))
        files = [str(REPOSITORY / ROWS[0][1]), str(other)]
        return check(files, num_gpus=64, gpu_memory_bytes=1e12, preset="byted", **more)

    one = found()
    assert one.copies_bytes == copies_bytes(shard_bytes(job_of_model(ROWS[0][1], 1, 64)))
    assert one.node_host_bytes == 8 * one.copies_bytes
    assert "two versions of its optimizer shard" in as_text(one)
    assert "copies" not in as_text(found("off"))
    assert found(host_memory_bytes=one.node_host_bytes / 0.95 + 1).is_sound
    (refusal,) = found(host_memory_bytes=one.node_host_bytes / 0.95 - 1e6).refusals
    assert refusal.startswith("--hdp-optimizer-copies on: 8 GPUs of a node x 5.0 GB")
    assert refusal.endswith("use more HDP ranks, or set --hdp-optimizer-copies off")
