"""A run's data as its arguments say, opened, and who loads it: each rank, or a data plane."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megatron_hdp.data import sides
from megatron_hdp.data.mixture import (
    BlendFlags,
    Corpus,
    DataFile,
    MediaSource,
    MixtureSpec,
    Opening,
    any_documents,
    open_corpus,
    read_data_file,
    specs_of_flags,
)
from megatron_hdp.data.spec import GO_ON_WITHOUT, LoadersSpec
from megatron_hdp.data.steps import Loaders, LocalLoaders, PlanSettings, Reader
from megatron_hdp.data_plane.loaders import RayLoaders
from megatron_hdp.data_plane.meanwhile import LocalUntilPlane
from megatron_hdp.data_plane.setup import SplitSetup
from megatron_hdp.data_plane.starting import SOCKET, PlanePlace, node_of_plane
from megatron_hdp.megatron.options import TrainingArguments, tokenizer_of
from megatron_hdp.megatron.parallel import say
from megatron_hdp.runtime.gathering import from_first_rank, gathered

_LOOPBACK = "127.0.0.1"
_MOST_SPARES = 32  # of many sources, some are started when they are known


def split_specs(arguments: TrainingArguments) -> dict[str, MixtureSpec]:
    """What each split draws from, of those that the arguments name: train, valid, test.

    Raises:
        ValueError: the file or the flags of the data cannot be used.
    """
    if arguments.hdp_data is not None:
        found = _data_file(arguments, arguments.hdp_data)
        specs = {"train": found.training}
        return specs if found.validation is None else {**specs, "valid": found.validation}
    return specs_of_flags(
        BlendFlags(
            data_path=arguments.data_path or (),
            data_args_path=arguments.data_args_path,
            train_data_path=arguments.train_data_path or (),
            valid_data_path=arguments.valid_data_path or (),
            test_data_path=arguments.test_data_path or (),
            per_split_data_args_path=arguments.per_split_data_args_path,
            split=arguments.split,
            sft=arguments.sft,
            sft_tokenizer_prompt_format=arguments.sft_tokenizer_prompt_format,
            preferences=_preferences_of(arguments.hdp_objective),
        )
    )


def _preferences_of(objective: str | None) -> str | None:
    """The format of rows that flags of data name; None of other ones than preferences."""
    return None if objective is None else sides.LABELLED if objective == "kto" else sides.PAIRS


def _data_file(arguments: TrainingArguments, path: Path) -> DataFile:
    return read_data_file(path, may_name_code=arguments.hdp_primitives)


def open_split(arguments: TrainingArguments, spec: MixtureSpec) -> Corpus:
    """The opened sources of a split.

    Raises:
        ValueError: one of them cannot be opened, or has no sequence.
    """
    corpus = open_corpus(spec, _opening(arguments))
    with_media = [one for one in corpus.sources if isinstance(one, MediaSource)]
    if with_media and arguments.hdp_encoder is None:
        raise ValueError(
            f"{spec.origin}: found a source with {with_media[0].item_names} and nothing to encode "
            "them, expected --hdp-encoder, of python -m megatron_hdp.pretrain_gpt, or text alone"
        )
    for one in with_media:
        if one.spec.may_fail:
            raise ValueError(
                f"{spec.origin}: found on-failure: {GO_ON_WITHOUT} of source '{one.name}', which "
                f"has {one.item_names}, expected it of sources of text alone: leave it out"
            )
    return corpus


def has_documents(arguments: TrainingArguments, spec: MixtureSpec) -> bool:
    """Whether a split has a document at all.

    Raises:
        ValueError: one of its sources cannot be opened.
    """
    return any_documents(spec, _opening(arguments))


def _opening(arguments: TrainingArguments) -> Opening:
    folder = arguments.data_cache_path
    return Opening(
        max_length=arguments.seq_length,
        long_sequence=arguments.long_documents,
        tokenizer=tokenizer_of(arguments),
        cache_folder=None if folder is None else Path(folder),
        say=say,
    )


@dataclass(frozen=True)
class DataPlane:
    """This rank's end of the data plane; the first rank of a node holds the node's part of it."""

    folder: Path
    spec: LoadersSpec
    ending: ExitStack
    is_late: bool
    """Whether steps are wanted before it can have started."""

    def loaders(
        self,
        arguments: TrainingArguments,
        split: str,
        corpus: Corpus,
        settings: PlanSettings,
        reader: Reader,
        local: LocalLoaders,
    ) -> Loaders:
        """What gives this rank its steps over a split; `local` does while a late plane starts."""
        setup = SplitSetup(
            split=split,
            spec=replace(corpus.spec, sources=tuple(one.spec for one in corpus.sources)),
            max_length=arguments.seq_length,
            long_sequence=arguments.long_documents,
            tokenizer=tokenizer_of(arguments),
            cache_folder=arguments.data_cache_path and str(arguments.data_cache_path),
            settings=settings,
            orders=corpus.orders(),
            loaders=self.spec,
        )
        loaders = RayLoaders(self.folder / SOCKET, setup, reader)
        if not self.is_late or any(source.may_fail for source in setup.spec.sources):
            return loaders  # of such a source a rank cannot know whether it hangs
        return LocalUntilPlane(local, loaders)

    def close(self) -> None:
        """Ends the node's part, if this rank holds it."""
        self.ending.close()

    def end(self) -> None:
        """The same beside what follows; Python waits for it before the process ends."""
        threading.Thread(target=self.close, name="end-of-data-plane").start()


def loaders_spec(arguments: TrainingArguments) -> LoadersSpec:
    """Who loads the data, as the file of --hdp-data says, or --hdp-loaders above it.

    Raises:
        ValueError: the file cannot be used, or not by these loaders.
    """
    spec, training = LoadersSpec(), None
    if arguments.hdp_data is not None:
        file = _data_file(arguments, arguments.hdp_data)
        spec, training = file.loaders, file.training
    backend = arguments.hdp_loaders
    found = spec if backend is None else replace(spec, backend=backend)
    if training is not None and found.backend != "ray":
        _require_no_policy(training)
    return found


def _require_no_policy(spec: MixtureSpec) -> None:
    names = [f"'{one.name}'" for one in spec.sources if one.may_fail]
    if names:
        raise ValueError(
            f"{spec.origin}: found on-failure: {GO_ON_WITHOUT} of source {', '.join(names)} with "
            "loaders in the ranks, expected the data plane's, for a rank that hangs in its own "
            "read cannot continue: write loaders: {backend: ray} or give --hdp-loaders ray, or "
            "leave on-failure out"
        )


def join_data_plane(arguments: TrainingArguments, *, is_late: bool = False) -> DataPlane | None:
    """The data plane that the arguments ask for, begun; None where ranks load for themselves.

    Every rank of the job must call this. It does not wait until the data plane answers. Where it
    `is_late`, ranks load for themselves until it does.

    Raises:
        ValueError: Ray is not installed.
    """
    spec = loaders_spec(arguments)
    if spec.backend != "ray":
        return None
    _require_ray()
    rank = dist.get_rank()
    here = socket.gethostname(), os.environ.get("GROUP_RANK", "0")
    nodes = gathered(here)
    order = list(dict.fromkeys(nodes))  # by their first ranks
    host = _LOOPBACK
    if len(order) > 1:  # the first rank is on another node than the first when that one is lost
        name = os.environ.get("MASTER_ADDR") if nodes[0][1] == "0" else None
        host = socket.gethostbyname(name or nodes[0][0])
    place = from_first_rank(PlanePlace.make(host, len(order)) if rank == 0 else None)
    assert place is not None
    ending, folder = ExitStack(), None
    if rank == nodes.index(here):
        sources = split_specs(arguments)["train"].sources
        num_crews = len(spec.crews(sources))
        num_loaders = min(num_crews * (spec.min + spec.shadows), _MOST_SPARES)
        part = node_of_plane(place, order.index(here), spec.timeout_s, num_loaders)
        folder = str(ending.enter_context(part))
    mine = gathered(folder)[nodes.index(here)]
    assert mine is not None
    nodes_of_job = "this node" if len(order) == 1 else f"{len(order)} nodes"
    joined = " in the Ray cluster of RAY_ADDRESS" if place.address is None else ""
    say(f"data plane: {place.name} on {nodes_of_job}{joined}, its log is {mine}/log")
    return DataPlane(Path(mine), spec, ending, is_late)


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            "loaders on Ray: found no package ray in this Python, expected Ray 2.60 or newer on "
            "every node: pip install 'megatron-hdp[ray]', or leave out --hdp-loaders ray"
        )
