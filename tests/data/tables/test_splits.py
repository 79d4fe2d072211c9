"""Documents are split as Megatron splits them."""

import pytest
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from megatron_hdp.data.tables import split_documents

SPLITS = ["969,30,1", "100", "99,1", "1,1,1", "0.98,0.02,0", "0,1,0", "949, 50, 1", "7,2,.5"]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("num_documents", [0, 1, 2, 3, 10, 999, 1001, 1_234_567, 10**8 + 3])
def test_split_is_that_of_megatron(split, num_documents):
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for ours, share in zip(split_documents(num_documents, split), matrix, strict=True):
        if share is None:
            assert len(ours) == 0
        else:
            # the arithmetic of BlendedMegatronDatasetBuilder
            begin, end = (int(round(border * float(num_documents))) for border in share)
            assert ours == range(begin, end)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "1;2", "nan"])
def test_bad_split(split):
    with pytest.raises(ValueError, match="expected one to three weights"):
        split_documents(10, split)
