"""What decides the order of the data; a resumed run must not repeat or skip a sequence."""

from dataclasses import dataclass, fields

_FLAGS = {
    "hybrid_data_parallel": "--hybrid-data-parallel",
    "seed": "--seed",
    "seq_length": "--seq-length",
    "long_sequence": "--hdp-long-sequence",
    "num_sequences": "--data-path and --split (sequences to train on)",
    "corpus": "--data-path and --split (fingerprint of the corpus)",
    "contents": "--data-path (fingerprint of samples of its tokens)",
}


@dataclass(frozen=True, kw_only=True)
class DataOrder:
    """Everything but the consumed count that decides which sequences form a step.

    Never anything of a rank: a run may continue on another number of ranks.
    """

    hybrid_data_parallel: bool
    seed: int
    seq_length: int
    long_sequence: str
    """What happens to a document longer than `seq_length`."""
    num_sequences: int
    """Sequences of an epoch."""
    corpus: int
    """64-bit fingerprint of the sequences' lengths."""
    contents: int | None = None
    """`TokenFile.fingerprint`; None where it is not known, as in a checkpoint of an older release,
    and then not compared."""

    def require_same(self, saved: "DataOrder", source: str) -> None:
        """Refuse to continue, in this order, a run that had the order `saved`.

        Args:
            saved: the order that a checkpoint holds.
            source: the checkpoint, for the message.

        Raises:
            ValueError: they differ; says in what, and the remedy.
        """
        differences = [
            f"{_FLAGS[item.name]}: found {getattr(self, item.name)}, expected "
            f"{getattr(saved, item.name)}"
            for item in fields(self)
            if getattr(self, item.name) != getattr(saved, item.name)
            and not (item.name == "contents" and None in (self.contents, saved.contents))
        ]
        if differences:
            raise ValueError(
                f"{source} was saved by a run with another order of the data, so sequences would "
                f"be repeated and skipped: {'; '.join(differences)}. Give the flags of that run, "
                "or add --finetune to start at step 0 from its weights alone"
            )
