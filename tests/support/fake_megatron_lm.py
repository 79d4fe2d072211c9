"""A stand-in for ``megatron.training``, which the wheel of megatron-core 0.16 does not have.

Its functions take what the patches' records say that those of the installed release take.
"""

from pathlib import Path

from megatron_hdp.megatron.lm.patches import PATCHES
from megatron_hdp.megatron.lm.releases import installed_version, release_of

TRAINING = "megatron.training.training"
BUILDER = "megatron.training.models.dist_utils:unimodal_build_distributed_models"
WARM_UP = "megatron.training.initialize:_warmup_jit_function"


def parameters(target: str, num_required: int) -> str:
    """A function's parameters as source, all but the first ones with the default None."""
    (record,) = (one for one in PATCHES.patches if one.target == target)
    names = record.parameters[release_of(installed_version())]
    assert names is not None
    return ", ".join([*names[:num_required], *(f"{name}=None" for name in names[num_required:])])


FILES = {
    "__init__.py": "",
    "global_vars.py": """
_ARGS = None
_GLOBAL_ARGS = None
def get_args(): return _ARGS
def get_tokenizer(): raise AssertionError("not reached")
def get_tensorboard_writer(): return None
def get_wandb_writer(): return None
""",
    "arguments.py": """
def add_megatron_arguments(parser):
    parser.add_argument_group("theirs").add_argument("--theirs", type=int, default=3)
    return parser
def validate_args(args, defaults={}):
    args.validated = True
    return args
""",
    "initialize.py": f"""
import torch
from megatron.training import global_vars
from megatron.training.arguments import validate_args
def _initialize_distributed(store): return None
def set_jit_fusion_options():
    _warmup_jit_function()
def _warmup_jit_function({parameters(WARM_UP, 0)}):
    args = global_vars._GLOBAL_ARGS
    torch.rand(args.seq_length // args.context_parallel_size, 1, args.ffn_hidden_size)
""",
    "checkpointing.py": """
def save_checkpoint(iteration, model): return "saved"
def load_checkpoint(ddp_model, optimizer): return 3, 4
def check_checkpoint_args(checkpoint_args): return None
""",
    "async_utils.py": """
def schedule_async_save(async_request): return async_request
def init_persistent_async_worker(*ranks): return None
""",
    "yaml_arguments.py": """
import types
def load_yaml(yaml_path):
    return types.SimpleNamespace(yaml_cfg=yaml_path)
""",
    "training.py": f"""
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
def pretrain(datasets_provider): return "trained"
def train(model): return "all steps"
def train_step(model): return "a step"
def get_model({parameters(TRAINING + ":get_model", 1)}):
    return [model_provider_func()]
def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider):
    return 1, 2, 3
def num_floating_point_operations({parameters(TRAINING + ":num_floating_point_operations", 2)}):
    return batch_size
def evaluate_and_print_results({parameters(TRAINING + ":evaluate_and_print_results", 7)}):
    return None
def training_log({parameters(TRAINING + ":training_log", 11)}):
    return report_memory_flag
""",
}
if BUILDER in [patch.target for patch in PATCHES.of(installed_version())]:
    FILES["models/dist_utils.py"] = f"""
def unimodal_build_distributed_models({parameters(BUILDER, 3)}):
    return [build_model_func()]
"""


def write(folder: Path, **changed: str) -> Path:
    """Writes the package below `folder`, which goes on Python's path; returns `folder`.

    Args:
        folder: where to.
        changed: other text for a file, by its name without ``.py``.
    """
    package = folder / "megatron" / "training"
    for name, text in FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(changed.get(name.removesuffix(".py"), text))
    return folder
