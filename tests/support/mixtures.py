"""Sources made of lengths alone, and mixtures of them."""

import numpy as np

from megatron_hdp.data.mixture.draw import BatchSize, MixedSource, Mixture
from megatron_hdp.data.mixture.schedule import Phase, Schedule
from megatron_hdp.data.mixture.stream import SourceStream
from megatron_hdp.data.shuffles import Feistel


class TableOrder:
    """No shuffling: the order of the table in every epoch."""

    def rows(self, epoch, first, count):
        return np.arange(first, first + count)


class Lengths:
    """Rows of which one knows the lengths; of each, every `untrained`-th label is not trained."""

    def __init__(self, lengths, untrained=None):
        self.table = np.asarray(lengths, dtype=np.int64)
        self.num_rows = len(self.table)
        self.untrained = untrained

    def lengths(self, rows):
        return self.table[rows]

    def num_labels(self, rows, lengths):
        return lengths - 1

    def num_trained(self, rows, starts, stops):
        if self.untrained is None:
            return stops - starts
        return stops - starts - ((stops // self.untrained) - (starts // self.untrained))


def mixture(
    lengths,
    *,
    weights=None,
    phases=None,
    unit="steps",
    batch=None,
    weight_unit="tokens",
    splits_long=True,
    max_epochs=None,
    shuffle=True,
    seed=1,
    max_length=2**30,
    untrained=None,
):
    """Of ``{name: lengths}``, a batch of 16 sequences unless given."""
    phases = phases or (Phase(weights=weights),)
    sources = []
    for key, (name, values) in enumerate(lengths.items()):
        rows = Lengths(values, untrained)
        order = Feistel(rows.num_rows, seed, key) if shuffle else TableOrder()
        epochs = (max_epochs or {}).get(name)
        stream = SourceStream(rows, order, splits_long=splits_long, max_epochs=epochs)
        sources.append(MixedSource(name, stream, float(np.mean(values))))
    sizes = {name: float(np.sum(values)) for name, values in lengths.items()}
    resolved = Schedule(unit, tuple(phases)).resolved(sizes, max_length)
    return Mixture(sources, resolved, batch or BatchSize(sequences=16), weight_unit)
