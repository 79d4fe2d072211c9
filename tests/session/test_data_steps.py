"""Steps of a data file with pictures: the same on any ranks; one of them decodes a picture."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_hdp.data.mixture import BatchSize
from megatron_hdp.media import ItemCostModel
from megatron_hdp.megatron import parallel
from megatron_hdp.runtime.gathering import EveryRankError
from megatron_hdp.session import DataSteps
from tests.data.media import sources
from tests.support.gradients import VOCABULARY
from tests.support.own_loop import HIDDEN, arguments_of, session_of

pytest.importorskip("jinja2", reason="pip install 'megatron-hdp[data]'")
pytest.importorskip("transformers", reason="pip install 'megatron-hdp[tokenizers]'")


class Encoder(torch.nn.Module):
    """A row is what 2 x 2 patches sum up to."""

    cost = ItemCostModel(patch_s=1.0)
    patches_per_row, patches_per_pack = 4, 100

    def __init__(self):
        super().__init__()
        values = torch.randn(3 * 16 * 16, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.matrix = torch.nn.Parameter(values.double() / 4000)

    def patches(self, item):
        return len(item.values)

    def forward(self, items):
        values = np.concatenate([np.asarray(one.values) for one in items])
        return (torch.from_numpy(values).double() @ self.matrix).unflatten(0, (-1, 4)).sum(1)


def write(folder):
    return sources.write_mixture(folder, "some text without pictures")


def steps_of(path, record=None, max_length=200, seed=1234):
    batch = BatchSize(sequences=6)
    how = {"workers": 0, "say": lambda _: None}
    return DataSteps(path, max_length=max_length, batch=batch, seed=seed, record=record, **how)


def losses_of(arguments, path, num_steps):
    """Body of a rank: losses, gradients of the encoder, pictures that were decoded here."""
    parallel.initialise(arguments)
    session, encoder = session_of(arguments), Encoder()
    session.attach_encoder(encoder)
    steps, found = steps_of(path), []
    for _ in range(num_steps):
        batch = steps.step()
        batch = replace(batch, tokens=[one % VOCABULARY for one in batch.tokens])
        report = session.step(batch)
        decoded = [i for i, one in enumerate(batch.media) if one.data.found is not None]
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, decoded)
        found.append((report.loss, encoder.matrix.grad.numpy().copy(), of_ranks, len(batch.media)))
    parallel.finish()
    return found


def test_ranks_share_the_pictures_of_a_step(run_ranks, tmp_path):
    ((_, grad, decoded, items),) = run_ranks(2, losses_of, arguments_of(), write(tmp_path), 1)[0]
    assert items > 4 and np.abs(grad).max() > 0
    assert sorted(i for of_rank in decoded for i in of_rank) == list(range(items))
    assert all(len(of_rank) < items for of_rank in decoded)


@pytest.mark.slow
def test_losses_are_those_of_one_rank(run_ranks, tmp_path):
    path = write(tmp_path)
    one, three = (run_ranks(ranks, losses_of, arguments_of(), path, 2)[0] for ranks in (1, 3))
    for (loss, grad, _, _), (other, other_grad, _, _) in zip(one, three, strict=True):
        assert abs(loss - other) < 1e-10
        assert np.abs(grad - other_grad).max() < 1e-10 * np.abs(grad).max()


def damage(folder, numbers):
    for number in numbers:
        picture = folder / sources.name(number)
        raw = picture.read_bytes()
        picture.write_bytes(raw[: len(raw) // 3].ljust(len(raw), b"\0"))


def damaged_loss(arguments, path, damaged):
    """Body of a rank: of a step, and of one whose sequences with such pictures are masked."""
    parallel.initialise(arguments)
    session = session_of(arguments)
    session.attach_encoder(Encoder())
    steps = steps_of(path)
    batch = steps.step()
    batch = replace(batch, tokens=[one % VOCABULARY for one in batch.tokens])
    found = session.step(batch)
    expected = steps_of(path).step()
    masks = [mask.copy() for mask in expected.loss_mask]
    gone = {one.sequence for one in batch.media if any(f"/{n}.jpg" in repr(one) for n in damaged)}
    for sequence in gone:
        masks[sequence][:] = False
    masked = session.step(replace(batch, loss_mask=masks))
    parallel.finish()
    return found.loss, found.divisor, masked.loss, masked.divisor, len(gone), len(masks)


@pytest.mark.slow
def test_sequences_with_damaged_pictures_are_left_out_on_all_ranks(run_ranks, tmp_path):
    path = write(tmp_path)
    steps_of(path)
    damage(tmp_path, [3])
    loss, divisor, expected, num, gone, of_step = run_ranks(
        2, damaged_loss, arguments_of(), path, [3]
    )[0]
    assert 0 < gone < of_step
    assert (loss, divisor) == (expected, num)


def failure_of(arguments, path):
    """Body of a rank: what a step says of damaged pictures."""
    parallel.initialise(arguments)
    session = session_of(arguments)
    session.attach_encoder(Encoder())
    batch = steps_of(path).step()
    with pytest.raises(EveryRankError) as error:
        session.step(replace(batch, tokens=[one % VOCABULARY for one in batch.tokens]))
    parallel.finish()
    return str(error.value)


@pytest.mark.slow
def test_many_damaged_pictures_end_the_step(run_ranks, tmp_path):
    path = write(tmp_path)
    steps_of(path)
    damage(tmp_path, (0, 3))
    arguments = arguments_of(hdp_corrupt_limit=2)
    for words in run_ranks(2, failure_of, arguments, path):
        assert "3 sequences in a row are damaged" in words and "pictures/" in words
    (tmp_path / sources.name(0)).unlink()
    for words in run_ranks(2, failure_of, arguments, path):
        assert "cannot be read" in words and "0.jpg" in words


def test_a_run_resumes(tmp_path):
    path = write(tmp_path)
    steps = steps_of(path)
    steps.step()
    record = steps.record()
    expected = steps.step()
    found = steps_of(path, record).step()
    assert [one.tolist() for one in found.tokens] == [one.tolist() for one in expected.tokens]
    assert list(map(repr, found.media)) == list(map(repr, expected.media))
    with pytest.raises(ValueError, match="expected 1234"):
        steps_of(path, record, seed=5)
    path.write_text(sources.MIXTURE.replace("9000", "4000"))
    with pytest.raises(ValueError, match="another order of source 'pictures'"):
        steps_of(path, record)


def test_sources_end(tmp_path):
    path = write(tmp_path)
    text = sources.MIXTURE.replace("x.txt,", "x.txt, max-epochs: 1,")
    path.write_text(text.replace("path: x.jsonl", "path: x.jsonl\n    max-epochs: 2"))
    batches = list(steps_of(path))
    assert sum(len(one.tokens) for one in batches) == 2 * len(sources.ROWS) + 1
    assert sum(len(one.media) for one in batches) == 4 * len(sources.ROWS)
