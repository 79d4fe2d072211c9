"""The Megatron-LM releases that the plugin supports, and what the functions it replaces take there.

A release is a minor version of megatron-core. Of a version with another patch level the parameters
decide; whether it is among `TESTED` is only a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from megatron.core import package_info

TESTED = (
    *("0.16.1", "0.17.1", "0.18.0", "0.18.2"),
    *("0.19.0", "0.19.1", "0.19.2"),  # the checkout of tag core_v0.19.0 is 0.19.1
)
"""Versions of megatron-core with which the plugin was run."""

Parameters = dict[str, tuple[str, ...] | None]
"""For each release that has the function to replace its parameters' names; None: any."""


def installed_version() -> str:
    """The version of megatron-core, without the commit that a git checkout of it adds."""
    return str(package_info.__version__).split("+")[0]


def release_of(version: str) -> str:
    """The release of a version: 0.19 of 0.19.2rc1."""
    found = re.match(r"\d+\.\d+", version)
    return found.group() if found else version


def releases_of(versions: Iterable[str]) -> tuple[str, ...]:
    """The releases of versions, each once."""
    return tuple(dict.fromkeys(map(release_of, versions)))


def untested(
    version: str, tested: Sequence[str] = TESTED, package: str = "megatron-core"
) -> str | None:
    """A note if a version was not tested; None if it was."""
    if version in tested:
        return None
    same = [one for one in tested if release_of(one) == release_of(version)]
    return (
        f"{package} {version} was not tested, only {', '.join(same or tested)}: whether it "
        "fits is decided by the parameters of its functions"
    )


RELEASES = releases_of(TESTED)
_16, _17, _18, _19 = ((release,) for release in RELEASES)


def everywhere(*parameters: str) -> Parameters:
    """The same parameters in every release."""
    return _in(RELEASES, *parameters)


def _in(releases: tuple[str, ...], *parameters: str) -> Parameters:
    return dict.fromkeys(releases, parameters)


_SUMS = ("seqlen_squared_sum_in_batch", "total_real_tokens_in_batch")
_LOGGED = (
    *("loss_dict", "total_loss_dict", "learning_rate", "iteration", "loss_scale"),
    *("report_memory_flag", "skipped_iter", "grad_norm", "params_norm", "num_zeros_in_grad"),
    *("max_attention_logit", "pg_collection", "is_first_iteration"),
)

ANY: Parameters = dict.fromkeys(RELEASES)
"""For replacements that hand all parameters on as they are."""

WARM_UP = {**_in((*_16, *_17, *_18)), **_in(_19, "tp_size")}
GET_MODEL = everywhere(
    "model_provider_func", "model_type", "wrap_with_ddp", "config", "pg_collection"
)
BUILD_MODELS = _in(
    (*_18, *_19),
    *("build_model_func", "transformer_config", "pg_collection", "ddp_config"),
    *("overlap_param_gather_with_optimizer_step", "use_megatron_fsdp", "use_torch_fsdp2"),
    *("wrap_with_ddp", "data_parallel_random_init", "mixed_precision_wrapper"),
    *("pre_wrap_hook", "model_type"),
)
TORCH_NORM = everywhere(
    *("cls", "config", "hidden_size", "eps"),
    *("persist_layer_norm", "zero_centered_gamma", "normalization"),
)
_EVALUATION = (
    *("prefix", "forward_step_func", "data_iterator", "model", "iteration"),
    *("process_non_loss_data_func", "config", "verbose", "write_to_tensorboard"),
    "non_loss_data_func",
)
EVALUATION = {
    **_in((*_16, *_17, *_18), *_EVALUATION),
    **_in(_19, *_EVALUATION, "pg_collection", "p2p_communicator"),
}
SCHEDULE = {
    **_in((*_16, *_17, *_18), "pp_size", "vp_size"),
    **_in(_19, "pp_size", "vp_size", "schedule_pg_collection"),
}
OPERATIONS = {
    **_in((*_16, *_17), "args", "batch_size"),
    **_in((*_18, *_19), "args", "batch_size", *_SUMS),
}
TRAINING_LOG = {**_in((*_16, *_17), *_LOGGED), **_in((*_18, *_19), *_LOGGED, *_SUMS)}
