"""Flags, YAML keys and tables come from one declaration; each mistake names its remedy."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_hdp.megatron.options import (
    GROUPS,
    TrainingArguments,
    build_parser,
    cost_model_of_job,
    expert_domain_size,
    head_sizes,
    job_of,
    markdown_tables,
    num_model_chunks,
    parse_arguments,
)
from megatron_hdp.options import (
    OptionError,
    OptionParser,
    add_options,
    flag_of,
    from_namespace,
    markdown_table,
    option,
    trace_steps,
    yaml_to_argv,
)
from megatron_hdp.options.declaration import declared
from tests.megatron.options.test_refusals import HDP, LAYERS_OF_VPP, PP, REQUIRED, VPP

REPOSITORY = Path(__file__).parents[3]


def _yaml(tmp_path: Path, text: str | bytes) -> list[str]:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return ["--config", str(path)]


def test_required_flags_are_enough_and_derived_defaults_follow_megatron() -> None:
    args = parse_arguments([*REQUIRED, "--metrics-path", "m.jsonl"])  # it needs no HDP
    assert (args.ffn_hidden_size, args.kv_channels, args.num_query_groups) == (256, 16, 4)
    assert (args.max_position_embeddings, args.lr_decay_iters) == (128, 3)
    assert (args.seed, args.hidden_dropout, args.add_bias_linear) == (1234, 0.1, True)
    warm = parse_arguments([*REQUIRED, "--lr-decay-iters", "50", "--lr-warmup-fraction", "0.1"])
    assert warm.lr_warmup_iters == 5
    swiglu = parse_arguments([*REQUIRED, "--swiglu", "--num-query-groups", "2"])
    assert swiglu.ffn_hidden_size == 128
    assert swiglu.group_query_attention
    assert args.num_experts is args.moe_ffn_hidden_size is None
    assert head_sizes(args) == (args.kv_channels, args.kv_channels)
    latent = parse_arguments([*REQUIRED, *HDP, "--multi-latent-attention"])
    assert (latent.q_lora_rank, latent.kv_lora_rank, latent.rope_type) == (None, 32, None)
    assert head_sizes(latent) == (128 + 64, 128)
    assert (latent.rotary_scaling_factor, latent.mscale, latent.mscale_all_dim) == (1.0, 1.0, 0.0)
    experts = [*REQUIRED, "--num-experts", "8", "--disable-bias-linear"]
    args = parse_arguments([*experts, "--ffn-hidden-size", "96"])
    assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (8, 2, 96)
    assert (args.expert_model_parallel_size, args.expert_tensor_parallel_size) == (1, 1)
    assert (args.moe_router_load_balancing_type, args.moe_aux_loss_coeff) == ("aux_loss", 0)
    assert parse_arguments([*experts, "--swiglu"]).moe_ffn_hidden_size == 128


def test_every_field_has_a_flag_a_yaml_key_and_a_row() -> None:
    actions = {action.dest: action for action in build_parser()._actions}
    table = markdown_tables()
    for item in fields(TrainingArguments):
        assert item.name in actions
        assert any(f"`{flag}" in table for flag in _flags(item.name))
    assert len(fields(TrainingArguments)) == sum(len(fields(group)) for group in GROUPS)
    assert len(table.splitlines()) == len(fields(TrainingArguments)) + 5 * len(GROUPS) - 1


def _flags(name: str) -> list[str]:
    actions = build_parser()._actions
    return [flag for action in actions if action.dest == name for flag in action.option_strings]


def test_flags_win_over_yaml_and_later_files_over_earlier(tmp_path) -> None:
    first = _yaml(
        tmp_path,
        "model:\n  swiglu: true\n  num_layers: 7\n  add-bias-linear: false\nlr: 1e-4\nseed: 1\n",
    )
    second = tmp_path / "second.yaml"
    second.write_text("seed: 2\nqk-layernorm: false\ndata-path: [a]\n")
    argv = [*REQUIRED[2:], "--lr", "5e-4", "--config", str(second), "--no-swiglu"]
    args = parse_arguments([*first, *argv])
    assert (args.num_layers, args.lr, args.seed) == (7, 5e-4, 2)
    assert (args.swiglu, args.add_bias_linear, args.qk_layernorm) == (False, False, False)
    assert args.data_path == ("prefix",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hdp-token-per-rank: 5\n", "unknown key 'hdp-token-per-rank': did you mean 'hdp-tokens-"),
        ("model:\n  num_layer: 5\n", "unknown key 'num_layer': did you mean 'num-layers'"),
        ("xyzzy: 5\n", "unknown key 'xyzzy': see --help"),
        ("help: true\n", "unknown key 'help'"),
        ("num-layers: many\n", "num-layers: found 'many', expected a value of type int"),
        ("num-layers: true\n", "num-layers: found 'true', expected a value of type int"),
        ("num-layers:\n", "num-layers: found nothing, expected a value of type int"),
        ("num-layers: [1, 2]\n", "num-layers: found a list, expected one int"),
        ("swiglu: 1\n", "swiglu: found '1', expected true or false"),
        *((f"swiglu: {word}\n", "expected true or false") for word in ("yes", "on", "'true'", "")),
        ("hdp-strategy: best\n", "hdp-strategy: found 'best', expected auto or static or naive"),
        ("a:\n  seed: 1\nb:\n  seed: 2\n", "'seed' repeats 'seed'"),
        ("swiglu: true\nno-swiglu: true\n", "'no-swiglu' repeats 'swiglu'"),
        ("- 1\n", "found a list, expected keys and values"),
        ("a: [\n", "not valid YAML"),
        ("config: other.yaml\n", "other.yaml: No such file or directory: give the path"),
        ("config: run.yaml\n", "includes itself"),
        ("config: 5\n", "5: No such file or directory"),
        ("config: {a: b}\n", "found keys and values, expected a file or a list of files"),
        ("config: [[a]]\n", "found a list, expected a file or a list of files"),
        ("config: [a, true]\n", "found a list, expected a file or a list of files"),
        ("seed: 1\nseed: 2\n", "'seed' repeats 'seed'"),
        ("num-layers: 1\nnum_layers: 2\n", "'num_layers' repeats 'num-layers'"),
        ("model:\n  lr: 1\n  lr: 2\n", "'lr' repeats 'lr'"),
        ("model:\n  lr: 1\nmodel:\n  seed: 2\n", "'model' repeats 'model'"),
        ("config: run.yaml\nconfig: run.yaml\n", "'config' repeats 'config'"),
        ("num-layers: 1:30\n", "num-layers: found '1:30', expected a value of type int"),
        ("num-layers: 0x10\n", "num-layers: found '0x10', expected a value of type int"),
        ("num-layers: 2024-01-01\n", "found '2024-01-01', expected a value of type int"),
        ("lr: .inf\n", "lr: found '.inf', expected a value of type float"),
        ("lr: !!float 1e-3\n", "found the tag tag:yaml.org,2002:float"),
        ("save: true\n", "save: found 'true', expected a value of type path"),
        ('save: "a\\0b"\n', "save: found 'a\\x00b', expected a value of type path"),
        ("data-path: [--seed, '5']\n", "found '--seed', which looks like a flag"),
        ("data-path: []\n", "data-path: found an empty list, expected at least one str"),
        ("data-path: [[a]]\n", "data-path: found a list, expected a value of type str"),
        ("[a, b]: 1\n", "line 1: found a list as a key, expected a flag's name"),
        ("a: &a {lr: 1}\nb: *a\n", "'b' repeats another section by an alias"),
        ("a: &a {b: *a}\n", "repeats another section by an alias"),
        ("[" * 5000, "nested hundreds of levels deep"),
        ("{a: " * 5000, "nested hundreds of levels deep"),
        ("seed: 1\n---\nseed: 2\n", "expected a single document"),
        ("data:\n  config: other.yaml\n", "'config' is inside a section"),
        (b"seed: \xff\xfe\n", "unacceptable character #x00ff"),
        (b"seed: 1\x00\n", "special characters are not allowed"),
        (b"\xff\xfes\x00e\x00e", "not valid YAML"),
        (b"\x1f\x8b\x08\x00", "not valid YAML"),
        (b'seed: "\\UFFFFFFFF"\n', "not valid YAML"),
    ],
)
def test_a_bad_yaml_file_is_named_with_the_remedy(tmp_path, text, message: str) -> None:
    with pytest.raises(OptionError) as error:
        parse_arguments([*REQUIRED, *_yaml(tmp_path, text)])
    assert message in str(error.value)
    assert "run.yaml" in str(error.value) or "config" in str(text)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("num-layers: 010\n", "num_layers", 10),
        ("num-layers: 1_000\n", "num_layers", 1000),
        ("seed: '7'\n", "seed", 7),
        ("save: 007\n", "save", Path("007")),
        ("save: no\n", "save", Path("no")),
        ("save: 1:30\n", "save", Path("1:30")),
        ("save: 2024-01-01\n", "save", Path("2024-01-01")),
        ("save: 'true'\n", "save", Path("true")),
        ("save: -x\n", "save", Path("-x")),
        ("save: a=b --seed 5\n", "save", Path("a=b --seed 5")),
        ("lr: 1e-3\n", "lr", 1e-3),
        ("lr: .5\n", "lr", 0.5),
        ("swiglu: TRUE\n", "swiglu", True),
        ("\ufeffseed: 3\n", "seed", 3),
    ],
)
def test_values_are_read_as_they_are_written(tmp_path, text: str, field: str, value) -> None:
    """As on a command line, and not as YAML 1.1 has it: 8, 90, False, a date, another number."""
    flags = [
        one for pair in _pairs(REQUIRED) for one in pair if pair[0][2:] != field.replace("_", "-")
    ]
    assert getattr(parse_arguments([*_yaml(tmp_path, text), *flags]), field) == value


def _pairs(argv: list[str]) -> list[tuple[str, str]]:
    return list(zip(argv[::2], argv[1::2], strict=True))


def test_utf_16_with_its_mark_and_an_empty_file_are_read(tmp_path) -> None:
    for text, seed in (("seed: 3\n".encode("utf-16"), 3), ("", 1234)):
        assert parse_arguments([*REQUIRED, *_yaml(tmp_path, text)]).seed == seed


def test_files_that_lead_to_one_another_without_end_are_refused(tmp_path) -> None:
    for number in range(300):
        (tmp_path / f"{number}.yaml").write_text(f"config: {number + 1}.yaml\n")
    with pytest.raises(OptionError, match="more than 50 files that lead to one another"):
        parse_arguments([*REQUIRED, "--config", str(tmp_path / "0.yaml")])


def test_sections_that_share_one_another_by_aliases_end_at_once(tmp_path) -> None:
    levels = [f"s{i}: &s{i} {{a: *s{i - 1}, b: *s{i - 1}}}" for i in range(1, 60)]
    text = "\n".join(["s0: &s0 {}", *levels])
    with pytest.raises(OptionError, match="repeats another section by an alias"):
        parse_arguments([*REQUIRED, *_yaml(tmp_path, text)])


def test_a_file_names_its_parts(tmp_path) -> None:
    """Relative to itself; later parts win over earlier ones, the file over its parts."""
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "base.yaml").write_text("seed: 1\nlr: 1e-4\nmin-lr: 1e-5\nswiglu: true\n")
    (folder / "first.yaml").write_text("config: base.yaml\nseed: 2\nlr: 2e-4\n")
    (folder / "second.yaml").write_text("seed: 3\n")
    run = _yaml(tmp_path, "config: [parts/first.yaml, parts/second.yaml]\nmin-lr: 2e-5\n")
    args = parse_arguments([*REQUIRED[:-4], "--data-path", "prefix", *run])
    assert (args.seed, args.lr, args.min_lr, args.swiglu) == (3, 2e-4, 2e-5, True)
    (folder / "base.yaml").write_text("config: first.yaml\n")
    with pytest.raises(OptionError, match=r"base\.yaml: config: .*includes itself"):
        parse_arguments([*REQUIRED, *run])


def test_traced_steps() -> None:
    flags = ["--hdp-trace", "traces", "--hdp-trace-steps", "2-3"]
    assert parse_arguments([*REQUIRED, *HDP, *flags]).hdp_trace_steps == "2-3"
    assert (trace_steps("2-3"), trace_steps("7")) == (range(2, 4), range(7, 8))


@pytest.mark.parametrize(
    ("flags", "expected"), [("", 1), (f"{VPP} 2", 2), (f"{LAYERS_OF_VPP} 1", 4)]
)
def test_virtual_stages_are_named_in_two_ways(flags: str, expected: int) -> None:
    flags = f"--num-layers 8 {PP} {flags}"
    assert num_model_chunks(parse_arguments([*REQUIRED, *HDP, *flags.split()])) == expected


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ("", 1),
        (f"{PP} --num-layers 8", 16),
        (f"{PP} --num-layers 8 --hdp-strategy static", 16),
        (f"{PP} --num-layers 8 --hdp-strategy naive", 1),  # does not plan for stages
    ],
)
def test_auto_as_a_number_of_parts(flags: str, most: int, tmp_path: Path) -> None:
    given = [*REQUIRED, *HDP, *flags.split()]
    for auto in (["--hdp-sequence-parts", "auto"], _yaml(tmp_path, "hdp-sequence-parts: auto")):
        assert parse_arguments([*given, *auto]).sequence_parts == most
    assert parse_arguments(given).sequence_parts == 1


@pytest.mark.parametrize(
    ("flags", "are_double", "take_room"),
    [
        ("", False, False),
        ("--hdp-double-rings on", True, True),
        ("--hdp-sequence-parts auto", True, True),
        ("--hdp-sequence-parts 4 --hdp-double-rings off", False, False),
        ("--hdp-sequence-parts 4 --tensor-model-parallel-size 8", True, False),  # one a node
    ],
)
def test_rings_are_double_with_parts(flags: str, are_double: bool, take_room: bool) -> None:
    model = f"{PP} --num-layers 8 --num-attention-heads 8"
    arguments = parse_arguments([*REQUIRED, *HDP, *model.split(), *flags.split()])
    job = job_of(arguments, 64, 512)
    assert arguments.double_rings == cost_model_of_job(arguments, job).double_rings == are_double
    assert job.double_rings == take_room


@pytest.mark.parametrize(
    ("tensor", "expert", "expert_tensor", "size"),
    [(1, 1, 1, 1), (1, 4, 1, 4), (2, 2, 1, 1), (2, 2, 2, 2), (4, 2, 1, 1), (2, 8, 1, 4)],
)
def test_size_of_an_expert_domain(tensor: int, expert: int, expert_tensor: int, size: int) -> None:
    args = SimpleNamespace(
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    assert expert_domain_size(args) == size


def test_the_shipped_configuration_is_valid() -> None:
    argv = ["--config", str(REPOSITORY / "configs" / "tiny-cpu.yaml"), "--hybrid-data-parallel"]
    args = parse_arguments([*argv, "--data-path", "prefix"])
    assert args.hdp_tokens_per_rank
    assert args.seq_length


def test_any_dataclass_and_parser_can_be_used(tmp_path) -> None:
    @dataclass(frozen=True)
    class Knobs:
        """Knobs."""

        ratios: tuple[float, ...] = option((), help="Shares of 100%.")
        fast: bool = option(True, off_flag="--slow", help="Do it at once.")

    parser = OptionParser()
    add_options(parser, Knobs)
    path = tmp_path / "k.yaml"
    path.write_text("ratios: [1, -2.5]\nslow: true\n")
    assert yaml_to_argv(path, parser) == ["--ratios", "1", "-2.5", "--slow"]
    knobs = from_namespace(Knobs, parser.parse_args(yaml_to_argv(path, parser)))
    assert knobs == Knobs(ratios=(1.0, -2.5), fast=False)
    shown = "Turn this off: do it at once."
    assert f"| `--slow` | {shown} In YAML: `fast: false`. |" in markdown_table(Knobs)
    assert "100%" in parser.format_help() and f"--slow {shown}" in " ".join(
        parser.format_help().split()
    )


def test_the_help_says_what_the_shown_flag_does() -> None:
    """A switch that is on by default is shown as the flag that turns it off."""
    actions = {one.dest: one for one in build_parser()._actions if one.help != argparse.SUPPRESS}
    switches = [item for item, kind in declared(TrainingArguments) if kind is bool]
    shown = {item.name: actions[item.name] for item in switches if item.default}
    assert "hdp_fused_loss" in shown and "checkpoint_checksums" in shown
    for name, action in shown.items():
        assert isinstance(action, argparse._StoreFalseAction), name
        assert action.help.startswith("Turn this off: "), name
        row = (
            f"| `{action.option_strings[0]}` | {action.help} In YAML: `{flag_of(name)[2:]}: false`."
        )
        assert row in markdown_tables(), name
    negations = {"do", "leave", "no", "not", "remove", "without"}
    for item in switches:  # so that "turn this off" tells the truth
        assert item.metadata["help"].split()[0].lower() not in negations, item.name
        if not item.default:
            assert isinstance(actions[item.name], argparse._StoreTrueAction), item.name


def test_a_field_without_help_is_a_programming_error() -> None:
    @dataclass(frozen=True)
    class Bare:
        size: int = 1

    with pytest.raises(TypeError, match="Bare.size is no option"):
        add_options(argparse.ArgumentParser(), Bare)
