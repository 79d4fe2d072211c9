"""What megatron-core warns of in every run and no user can act on: not shown by our command.

Which packages are missing, and what is slower or off without them, ``megatron-hdp doctor`` says and
a run's line on its attention. Names no Megatron module, so that it comes before their import.
"""

import warnings

_TEXTS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",  # of CUDA graphs: megatron-core's own default
)


def leave_out() -> None:
    """Ignores these warnings of megatron-core's, unless Python's flag ``-W`` says otherwise."""
    for text in _TEXTS:
        warnings.filterwarnings(
            "ignore", message=text, category=UserWarning, module=r"megatron\.core\.", append=True
        )
