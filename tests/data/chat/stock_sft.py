"""What a stock Megatron-LM makes of rows under ``--sft``: a program, run where its code is found.

Reads JSON (``folders`` of tokenizers, ``formats``, ``rows``) and prints JSON: its release and, by
folder and format, a row's tokens and loss mask, or null where it knows no such format or fails over
the row.
"""

import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import transformers
from megatron.core import __version__

LENGTH = 512


def tokenizer_class():
    """The class of this release."""
    try:
        from megatron.core.tokenizers.text.libraries.sft_tokenizer import SFTTokenizer
    except ImportError:
        from megatron.training.tokenizer.sft_tokenizer import SFTTokenizer
    return SFTTokenizer


def dataset_class():
    """The class of this release, from its file: what lies around it wants much more."""
    (folder,) = importlib.util.find_spec("megatron.training").submodule_search_locations
    path = Path(folder, "datasets", "sft_dataset.py")
    spec = importlib.util.spec_from_file_location("sft_dataset", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SFTDataset


def dataset(tokenizer, rows):
    """The dataset of these rows, without what builds it from a file."""
    made = object.__new__(dataset_class())
    pad = tokenizer.pad if hasattr(tokenizer, "pad") else tokenizer.pad_id
    convert = tokenizer.tokenize_conversation
    made.config = SimpleNamespace(
        tokenizer=SimpleNamespace(tokenize_conversation=convert, eod=tokenizer.eod, pad=pad),
        sequence_length=LENGTH,
        context_parallel_size=1,
        reset_position_ids=False,
        reset_attention_mask=False,
        create_attention_mask=False,
    )
    made.dataset, made.indices, made.num_samples = rows, np.arange(len(rows)), len(rows)
    return made


def sample(rows, number):
    """Tokens and loss mask of a row; null if the release fails over it."""
    try:
        found = rows[number]
    except (AssertionError, ValueError):
        return None
    return {"tokens": found["tokens"].tolist(), "loss_mask": found["loss_mask"].tolist()}


def main():
    """Read, convert, print."""
    given = json.load(sys.stdin)
    # Releases before 0.18 were written for transformers 4, which returned ids by default.
    base = transformers.PreTrainedTokenizerBase
    base.apply_chat_template = functools.partialmethod(base.apply_chat_template, return_dict=False)
    samples = [
        {name: of_format(folder, name, given["rows"]) for name in given["formats"]}
        for folder in given["folders"]
    ]
    print(json.dumps({"release": __version__, "samples": samples}))


def of_format(folder, name, rows):
    """Samples of all rows; null if the release does not know the format."""
    try:
        tokenizer = tokenizer_class()(folder, name)
    except NotImplementedError:
        return None
    found = dataset(tokenizer, rows)
    return [sample(found, number) for number in range(len(rows))]


if __name__ == "__main__":
    main()
