"""``--model``: a model's name, or a YAML file of Megatron's flags that gives its shape."""

from pathlib import Path

from megatron_hdp.megatron.options import shape_in
from megatron_hdp.planner.shape import MODELS, Model, model_of
from megatron_hdp.simulator.units import short

_YAML_SUFFIXES = (".yaml", ".yml")


def find_model(name: str) -> Model:
    """Return the model that ``--model`` names.

    Keys of a YAML file that say nothing about the shape are left out.

    Raises:
        ValueError: neither a known name nor a usable file.
    """
    if not name.endswith(_YAML_SUFFIXES):
        try:
            return model_of(name)
        except ValueError as error:
            raise ValueError(f"--model: {error}, or the path of a .yaml file") from None
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"--model {path}: no such file; expected one of {', '.join(MODELS)} or a .yaml file"
        )
    return Model.of_shape(shape_in(path))


def describe(name: str, model: Model) -> str:
    """Return what the model costs, in a few words."""
    in_experts = model.shape.expert_parameters
    experts = f", {short(in_experts)} in experts" if in_experts else ""
    return (
        f"{name}  ({short(model.active_parameters)} parameters a token{experts}, "
        f"{model.kv_bytes_per_token:,} B of K and V a token)"
    )
