"""Runs of the training command over pictures, videos or sounds, with an encoder in the model."""

import json
from dataclasses import replace

import safetensors.torch
import torch

from megatron_hdp.megatron import parallel
from megatron_hdp.options import OptionError
from megatron_hdp.training.loop import pretrain
from tests.training.runs import largest_difference, run

HIDDEN, HF = 24, "HuggingFaceTokenizer"
ALONE = {"hdp_tokens_per_rank": 400}


def write_encoder(folder, kind, config):
    """A model's folder with the weights of an encoder."""
    torch.manual_seed(3)
    encoder = kind(config).double()
    for weight in encoder.parameters():
        torch.nn.init.normal_(weight, std=0.5 / max(1, weight[0].numel()) ** 0.5)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    named = {theirs(kind, name): one.detach() for name, one in encoder.state_dict().items()}
    safetensors.torch.save_file(named, folder / "model.safetensors")
    return folder


def theirs(kind, name):
    """What an encoder's tensor is called in a model's files."""
    return next(
        begin + name.removeprefix(ours)
        for begin, ours in kind.prefixes.items()
        if name.startswith(ours)
    )


def media_run(folder, data, encoder, **overrides):
    """A run over a file of --hdp-data."""
    settings = {
        **{"hidden_size": HIDDEN, "kv_channels": 12, "num_attention_heads": 2, "num_layers": 4},
        **{"num_query_groups": 1, "seq_length": 200, "max_position_embeddings": 200},
        **{"data_path": (), "split": None, "hdp_data": data},
        **{"tokenizer_type": HF, "tokenizer_model": folder / "hf"},
        **{"hdp_tokens_per_rank": 100, "global_batch_size": 5, "weight_decay": 0.1},
        "hdp_encoder": encoder,
    }
    return run(None, **(settings | overrides))


def losses(arguments):
    """Body of a rank: what steps show, and the pictures of each."""
    found = pretrain(arguments)
    for one in found:
        encoded = 0 < (one.encoder_ms or 0) < 1000 * one.seconds
        assert encoded if one.media_items else not one.encoder_ms
    return [(one.step, one.loss, one.grad_norm, one.media_items, one.media_rows) for one in found]


def trained(run_ranks, arguments, num_ranks=1, **overrides):
    return run_ranks(num_ranks, losses, replace(arguments, **overrides))[0]


def require_damage_left_out(run_ranks, whole, path, damaged, healthy=None):
    """A file that is damaged once its source is prepared leaves with its sequence, on any ranks.

    Args:
        run_ranks: the fixture.
        whole: arguments of a run whose first steps draw the file.
        path: of the file.
        damaged: its bytes, by those that it had.
        healthy: steps of the run on one rank; None: they are run.
    """
    healthy = healthy or trained(run_ranks, whole, **ALONE)  # prepares while all are whole
    path.write_bytes(damaged(path.read_bytes()))
    expected = trained(run_ranks, whole, hdp_corrupt_limit=20, **ALONE)
    assert largest_difference(healthy, expected) > 1e-3
    assert largest_difference(trained(run_ranks, whole, 2, hdp_corrupt_limit=20), expected) <= 1e-10


def one_sentence(arguments):
    """Body of a rank: what the run is refused with."""
    try:
        pretrain(arguments)
    except (ValueError, OptionError) as error:
        parallel.finish()
        return str(error)
    return None
