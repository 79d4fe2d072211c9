"""What decides the order of the data; a resumed run must not repeat or skip a sequence."""

from dataclasses import dataclass, fields, replace

from megatron_hdp.data.shuffles import LATEST_ORDER

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
    version: int = 1
    """How HDP makes an epoch's order (`data.shuffles`); a checkpoint that says none has the first.
    Not compared: a run goes on in the version that it began with. Without HDP the order is
    Megatron's, and this stays 1."""

    def continuing(self, saved: "DataOrder", source: str) -> "DataOrder":
        """Return this order as the run that had the order `saved` goes on in it.

        Args:
            saved: the order that a checkpoint holds.
            source: the checkpoint, for the message.

        Raises:
            ValueError: they differ in more than the version, or this release does not know that.
        """
        self.require_same(saved, source)
        if not 1 <= saved.version <= LATEST_ORDER:
            raise ValueError(
                f"{source} has version {saved.version} of the order of the data, expected 1 to "
                f"{LATEST_ORDER}: a newer release of megatron_hdp saved it. Install that one, or "
                "add --finetune to start at step 0 from its weights alone"
            )
        return replace(self, version=saved.version)

    @property
    def announcement(self) -> str:
        """What the log says where a run goes on in an older version."""
        return (
            f"the checkpoint's run began with version {self.version} of the order of the data "
            f"(now {LATEST_ORDER}): it goes on in that one, so nothing is repeated or skipped"
        )

    def require_same(self, saved: "DataOrder", source: str) -> None:
        """Refuse to continue, in this order, a run that had the order `saved`, of any version.

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
            if item.name != "version"
            and getattr(self, item.name) != getattr(saved, item.name)
            and not (item.name == "contents" and None in (self.contents, saved.contents))
        ]
        if differences:
            raise ValueError(
                f"{source} was saved by a run with another order of the data, so sequences would "
                f"be repeated and skipped: {'; '.join(differences)}. Give the flags of that run, "
                "or add --finetune to start at step 0 from its weights alone"
            )
