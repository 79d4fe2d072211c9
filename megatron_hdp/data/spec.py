"""One source of data as a user names it: where it lies, what it is, how it becomes sequences."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

FORMATS = ("auto", "tokens", "text", "chat", "pairs", "labelled")
TRAIN_ON = ("assistant", "last", "all")
BACKENDS = ("local", "ray")
TOKENISE = ("ahead", "on-the-fly")
GO_ON_WITHOUT = "go-on-without"
ON_FAILURE = ("error", GO_ON_WITHOUT)


ITEM_KINDS = ("pictures", "videos", "sounds")


@dataclass(frozen=True, kw_only=True)
class MediaSpec:
    """Items of a source, of one kind; the fields are the keys of ``media`` in a source."""

    encoder: str
    """How pictures are resized and cut: ``qwen3-vl``, ``qwen2.5-vl``, ``clip-l-336`` or
    ``siglip-so400m-384``; or how sounds are heard: ``qwen2-audio``."""
    kind: str | None = None
    """``pictures``, ``videos`` (of Qwen's encoders) or ``sounds``; if not given, sounds of
    ``qwen2-audio``, else pictures."""
    folder: str | None = None
    """Where relative paths of items begin; if not given, at the folder of the source."""
    placeholder: str | None = None
    """The token that stands for a picture, two frames or a sound; if not given, ``<|image_pad|>``
    and ``<|video_pad|>`` for Qwen's encoders of them, ``<|AUDIO|>`` for its encoder of sounds,
    ``<image>`` for others."""
    least_pixels: int | None = None
    """A smaller picture, or frame, is enlarged; if not given, as the encoder's. Of Qwen3-VL's
    videos it counts all frames that are seen."""
    most_pixels: int | None = None
    """A larger picture, or frame, is made smaller; likewise."""
    most_file_pixels: int = 2**26
    """A picture whose file has more is bad, and a video of such frames: it is not decoded."""
    frames_per_second: float = 2.0
    """Frames that are seen of a video; of a list of frames all are, and it has so many a second."""
    least_frames: int = 4
    """Of a short video at least so many are seen, if it has them."""
    most_frames: int = 768
    """Of a long video at most so many."""
    most_seconds: int = 30
    """A longer sound is bad. An encoder hears the first 30 seconds, also where this is more."""


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """What is declared of one source; the fields are the keys of a source in ``--hdp-data``.

    In that file ``-`` stands for ``_``.
    """

    name: str
    """What the source is called in weights, metrics and checkpoints; unique."""
    path: str
    """A ``.bin/.idx`` prefix, a file, a folder, or a pattern of names with ``*``."""
    glob: str | None = None
    """Names to take from a folder, such as ``*.txt``; if not given, all."""
    format: str = "auto"
    """``tokens`` (a ``.bin/.idx`` pair), ``text``, ``chat``, ``pairs`` (of a chosen and a rejected
    answer) or ``labelled`` (answers that are desirable or not); ``auto`` distinguishes the first
    two by the files' names."""
    key: str = "text"
    """Key or column of the text; conversations are found by the names that are usual for them."""
    tokenizer: str | None = None
    """``byte``, ``hf:PATH`` or ``tiktoken:NAME``; if not given, the run's."""
    append_eod: bool = True
    """Whether a text ends with the tokenizer's end-of-document token."""
    tokenise: str = "ahead"
    """When text and conversations become tokens: ``ahead``, all of them before the first step, or
    ``on-the-fly``, as they are drawn."""
    template: str | None = None
    """Of conversations: ``chatml``, ``megatron:FORMAT`` (of ``--sft-tokenizer-prompt-format``) or a
    file that holds a Jinja template; if not given, the tokenizer's own, else ChatML."""
    train_on: str = "assistant"
    """Of conversations, the turns that carry loss: ``assistant``, ``last`` or ``all``."""
    media: MediaSpec | None = None
    """Of conversations with pictures or sounds: [its keys](#media)."""
    max_epochs: int | None = None
    """The source ends after this many passes; if not given, never."""
    long_sequence: str | None = None
    """What happens to a longer document: ``error``, ``truncate`` or ``split``; if not given, as
    ``--hdp-long-sequence``, and ``truncate`` where text is tokenised on the fly."""
    bad_limit: float = 0.0
    """Greatest share of bad documents; above it preparing the source fails, or, where text is
    tokenised on the fly, the run ends."""
    on_failure: str = "error"
    """What happens when the data plane cannot read the source any more: the run ends (``error``) or
    continues without it (``go-on-without``)."""

    @property
    def media_folder(self) -> str:
        """Where relative paths of its pictures begin."""
        if self.media is not None and self.media.folder is not None:
            return self.media.folder
        return self.path if os.path.isdir(self.path) else os.path.dirname(self.path) or "."

    @property
    def may_fail(self) -> bool:
        """Whether a run goes on without it."""
        return self.on_failure == GO_ON_WITHOUT


@dataclass(frozen=True, kw_only=True)
class PrimitivesSpec:
    """The user's own functions in the place of primitives, ``MODULE:FUNCTION`` each.

    The fields are the keys of ``primitives`` in ``--hdp-data``; see `data.steps.primitives`.
    """

    mix: str | None = None
    """Weights of the sources at each training step, from those of the schedule, the position and
    the losses by source."""
    cost: str | None = None
    """Seconds that sequences of given lengths take on one rank; planning follows it."""
    balance: str | None = None
    """The plan of a step, from its lengths."""
    distribute: str | None = None
    """The HDP rank that runs each of the plan's ranks."""
    broadcast_at: str | None = None
    """Along which axes one rank reads tokens for the others."""
    plan: str | None = None
    """A whole step: what it draws and how it is planned."""
    losses_behind: int = 4
    """``mix`` for a step knows the losses up to this many steps before; at least 2, so that it is
    decided while the step before runs, and one more for each step that is decided ahead."""

    @property
    def named(self) -> dict[str, str]:
        """The functions that are named, by their keys."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        del found["losses_behind"]
        return {name.replace("_", "-"): place for name, place in found.items() if place}


@dataclass(frozen=True, kw_only=True)
class LoadersSpec:
    """Who loads the data; the fields are the keys of ``loaders`` in ``--hdp-data``."""

    backend: str = "local"
    """``local``: each rank, in its own process; ``ray``: the data plane beside the job."""
    steps_ahead: int = 2
    """Steps that the data plane prepares before a rank needs them."""
    min: int = 1
    """Loaders of a source, at least."""
    max: int = 4
    """Loaders of a source, at most."""
    memory_mb: int = 8192
    """Memory of all loaders of a node; above it no loader is added."""
    shadows: int = 0
    """Standby loaders of a source, which replace one that dies."""
    sources_per_loader: int = 1
    """Sources that share a loader's process; one with ``on-failure: go-on-without`` shares none."""
    timeout_s: int = 120
    """A source that has not answered for this long has failed; so has Ray if it is not up then."""

    def crews(self, sources: Sequence[SourceSpec]) -> list[tuple[str, ...]]:
        """Return the names of the sources that share loaders, in the order of the file.

        A source that may fail, perhaps by reads that hang, is alone: it takes no other with it.
        """
        together = [one.name for one in sources if not one.may_fail]
        size = self.sources_per_loader
        shared = [tuple(together[i : i + size]) for i in range(0, len(together), size)]
        return [*shared, *((one.name,) for one in sources if one.may_fail)]
