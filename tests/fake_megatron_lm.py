"""A stand-in for ``megatron.training``, which the wheel of megatron-core 0.16 does not have."""

from pathlib import Path

FILES = {
    "__init__.py": "",
    "global_vars.py": """
_ARGS = None
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
    "initialize.py": "from megatron.training.arguments import validate_args\n",
    "training.py": """
from megatron.core.pipeline_parallel import get_forward_backward_func
def get_model(model_provider_func, model_type=None, wrap_with_ddp=True, config=None,
              pg_collection=None):
    return [model_provider_func()]
def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider):
    return 1, 2, 3
def num_floating_point_operations(args, batch_size):
    return batch_size
def training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale,
                 report_memory_flag, skipped_iter, grad_norm, params_norm, num_zeros_in_grad,
                 max_attention_logit, pg_collection=None, is_first_iteration=False):
    return report_memory_flag
""",
}


def write(folder: Path, **changed: str) -> Path:
    """Writes the package below `folder`, which goes on Python's path; returns `folder`.

    Args:
        folder: where to.
        changed: other text for a file, by its name without ``.py``.
    """
    package = folder / "megatron" / "training"
    package.mkdir(parents=True)
    for name, text in FILES.items():
        (package / name).write_text(changed.get(name.removesuffix(".py"), text))
    return folder
