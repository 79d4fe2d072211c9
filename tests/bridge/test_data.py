"""Bridge's loop over other data than its rows: pretraining data, Energon."""

import numpy as np
import pytest

from tests.bridge.loop import LONGEST, VOCABULARY, require_bridge, trained, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
HDP, LONG = {"hdp_tokens_per_rank": 300}, {"timeout_s": 500}


def of_texts(folder, length=LONGEST, eod_mask_loss=False):
    """Configuration of pretraining data, which cuts joined texts into equal samples."""
    from megatron.bridge.training.config import GPTDatasetConfig

    return GPTDatasetConfig(
        seq_length=length,
        data_path=[str(folder / "texts")],
        split="8,2,0",
        random_seed=7,
        path_to_cache=str(folder / "cache"),
        **dict.fromkeys(("reset_position_ids", "reset_attention_mask"), False),
        eod_mask_loss=eod_mask_loss,
        **{"num_workers": 0, "pin_memory": False, "dataloader_type": "single"},
    )


def write_texts(folder, length=None):
    """Of many lengths, or of one, as Megatron's tools write them; each ends with <eos>."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    draw = np.random.default_rng(5)
    builder = IndexedDatasetBuilder(str(folder / "texts.bin"), dtype=np.uint16)
    for _ in range(200):
        num = length or 1 + int(draw.lognormal(4, 1))
        text = draw.integers(1, VOCABULARY - 2, num).astype(np.uint16)
        text[-1] = VOCABULARY - 1
        builder.add_document(text, [len(text)])
    builder.finalize(str(folder / "texts.idx"))


@pytest.fixture
def folder(tmp_path):
    """With a tokenizer."""
    require_bridge()
    write_rows(tmp_path)
    return tmp_path


def test_pretraining_data(run_ranks, folder):
    """In training and in validation, whose samples depend on the number of ranks."""
    write_texts(folder)
    how = {"steps": 4, "data": of_texts, **LONG}
    expected = run_ranks(2, trained, folder, **how)[0]
    assert len(expected["steps"]) == 4 and len(expected["validation"]) == 3
    for found in run_ranks(2, trained, folder, HDP, sharded=True, **how):
        np.testing.assert_allclose(found["steps"], expected["steps"], rtol=2e-5)
        np.testing.assert_allclose(found["validation"], expected["validation"], rtol=1e-5)
