"""What megatron-core warns of in every run and no user can act on: not shown by our command.

Which packages are missing, and what is slower or off without them, ``megatron-hdp doctor`` says and
a run's line on its attention. Names no Megatron module, so that it comes before their import.
"""

import re
import warnings

_MEGATRON = r"megatron\.core\."
_CHECKPOINTS = r"torch\.distributed\.checkpoint\."
_COLLECTIVES = r"torch\.distributed\.c10d_logger$"
_KNOWN: tuple[tuple[str, type[Warning], str], ...] = (
    ("Transformer Engine and Apex are not installed", UserWarning, _MEGATRON),
    ("Apex is not installed", UserWarning, _MEGATRON),
    ("full scope is deprecated", UserWarning, _MEGATRON),  # of CUDA graphs: its own default
    # the function of PyTorch and the kind of tensor by which megatron-core loads a checkpoint
    ("`load_state_dict` is deprecated", FutureWarning, _MEGATRON),
    ("Please use DTensor instead and we are deprecating", FutureWarning, _CHECKPOINTS),
    # collectives of the distributed optimizer, by their names of before PyTorch 2.13
    ("`torch.distributed.reduce_scatter_tensor` is deprecated", FutureWarning, _COLLECTIVES),
    ("`torch.distributed.all_gather_into_tensor` is deprecated", FutureWarning, _COLLECTIVES),
)
"""How a warning begins, its category, and how the name of the module begins that it is told of."""


def leave_out() -> None:
    """Ignores these warnings, unless Python's flag ``-W`` says otherwise."""
    for text, category, module in _KNOWN:
        warnings.filterwarnings(
            "ignore", message=re.escape(text), category=category, module=module, append=True
        )
