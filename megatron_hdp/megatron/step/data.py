"""What the arguments of a run say about its data, and the opened data of a split."""

from __future__ import annotations

from pathlib import Path

from megatron_hdp.data.mixture import (
    BlendFlags,
    Corpus,
    MixtureSpec,
    Opening,
    any_documents,
    open_corpus,
    read_data_file,
    specs_of_flags,
)
from megatron_hdp.megatron.options import TrainingArguments, tokenizer_of
from megatron_hdp.megatron.parallel import say


def split_specs(arguments: TrainingArguments) -> dict[str, MixtureSpec]:
    """What each split draws from, of those that the arguments name: train, valid, test.

    Raises:
        ValueError: the file or the flags of the data cannot be used.
    """
    if arguments.hdp_data is not None:
        found = read_data_file(arguments.hdp_data)
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
        )
    )


def open_split(arguments: TrainingArguments, spec: MixtureSpec) -> Corpus:
    """The opened sources of a split.

    Raises:
        ValueError: one of them cannot be opened, or has no sequence.
    """
    return open_corpus(spec, _opening(arguments))


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
        long_sequence=arguments.hdp_long_sequence,
        tokenizer=tokenizer_of(arguments),
        cache_folder=None if folder is None else Path(folder),
        say=say,
    )
