"""The doctor: finds what is there, says what to do about what is not, and exits accordingly."""

import json
import socket
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_hdp.cli.main import main
from megatron_hdp.data_plane import left_behind
from megatron_hdp.data_plane.cluster import job_folder
from megatron_hdp.data_plane.cluster.job_folder import folder_of_job
from megatron_hdp.megatron.cpu import shim
from megatron_hdp.megatron.doctor import doctor, surroundings
from megatron_hdp.megatron.doctor.doctor import SEAMS, Seam, check_seam, diagnose
from megatron_hdp.planner.network import Nccl
from megatron_hdp.runtime import ring

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")


def without(*names):
    """As if modules of these names did not import."""
    importable = doctor._importable
    return mock.patch.object(doctor, "_importable", lambda m: m not in names and importable(m))


@on_cpu
def test_training_can_run_here(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.endswith("training can run\n")
    version = torch.__version__.split("+")[0]  # a wheel of the package index leaves the rest out
    for expected in (f"torch              {version}", "cpu (", "torch-sdpa-cpu", "ok"):
        assert expected in text
    assert "not transformer-engine: found device 'cpu'; it needs an NVIDIA GPU" in text
    assert "ring channels      none, this torch knows no NCCL" in text
    for seam in SEAMS:
        assert seam.target in text and seam.why in text
    for what, how in shim.REDIRECTS.items():
        assert f"{what}: {how}" in text


@on_cpu
def test_json_is_one_object_with_the_same_facts(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert list(found["attention_refused"]) == ["transformer-engine", "flash-attn"]
    assert found["cpu_shim_applies"] is True
    assert found["cpu_shim_redirects"] == shim.REDIRECTS
    assert found["versions"]["torch"] and found["versions"]["megatron-core"]
    assert [check["seam"]["target"] for check in found["seams"]] == [s.target for s in SEAMS]
    assert all(check["problem"] is None for check in found["seams"])


def test_looking_changes_nothing():
    before = dict(vars(torch.Tensor)), torch.nn.Module.cuda
    diagnose()
    assert (dict(vars(torch.Tensor)), torch.nn.Module.cuda) == before
    assert not shim.is_active()


@pytest.mark.parametrize(
    "seam, expected",
    [
        (Seam("megatron.core.no_such_room:Thing.part", ""), "found no module"),
        (Seam("megatron.core.models.gpt.gpt_model:GPTModel.fly", ""), "GPTModel has no 'fly'"),
        (
            Seam("megatron.core.models.gpt.gpt_model:GPTModel.forward", "", parameter="ring"),
            "takes no 'ring'",
        ),
    ],
)
def test_a_missing_seam_is_a_problem_with_a_remedy(capsys, monkeypatch, seam, expected):
    problem = check_seam(seam)
    assert seam.target in problem and expected in problem and "install" in problem
    monkeypatch.setattr(doctor, "SEAMS", (seam,))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert f"MISSING {seam.target}" in text and problem in text
    assert "training cannot run" in text


@pytest.mark.parametrize(
    ("room", "extension", "what"),
    [("planner", "_core", "planner"), ("data", "_order", "order of the data")],
)
def test_a_part_that_is_not_built_is_a_problem(capsys, monkeypatch, room, extension, what):
    names = [name for name in sys.modules if name.startswith(f"megatron_hdp.{room}")]
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, f"megatron_hdp.{room}.{extension}", None)
    assert main(["doctor", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert f"needs its compiled {what}" in problem and "-m pip install -e" in problem


def test_without_megatron_one_line_says_so(capsys):
    modules = {seam.target.partition(":")[0] for seam in SEAMS}
    with without("megatron.core", *modules):
        assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "  - megatron.core does not import" in text
    assert text.count("  - ") == 1


def test_channels_of_rings_are_told_by_the_size_of_the_job(capsys, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for nccl, words in (
        (Nccl((2, 27, 7), False, 16), "16 on 8 ranks, 2 from 16 on, 1 from 64 on (of a pair, with"),
        (None, "what NCCL_MAX_P2P_PEERS or NCCL_NCHANNELS_PER_NET_PEER says"),
    ):
        monkeypatch.setattr(ring, "running_nccl", lambda max_ctas, nccl=nccl: nccl)
        main(["doctor"])
        assert f"ring channels      {words}" in capsys.readouterr().out


def test_without_torch_it_still_answers(capsys):
    with without("torch"):
        assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "unknown" and found["attention_kernel"] is None
    assert "torch does not import" in found["problems"][0]


def test_a_device_without_attention_is_a_problem(capsys):
    def refuse(shapes):
        raise ValueError(f"no attention for {shapes.dtype} on device '{shapes.device}'")

    with mock.patch("megatron_hdp.runtime.attention.select_attention", refuse):
        assert main(["doctor"]) == 1
    assert "  - no attention for" in capsys.readouterr().out


def test_missing_optional_packages_are_no_problem(capsys, monkeypatch):
    package = surroundings.OptionalPackage("none", "no_such_package", "no such plots", "pip x")
    monkeypatch.setattr(surroundings, "OPTIONAL_PACKAGES", (package,))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (place,) = [i for i, line in enumerate(lines) if "not found: no such plots" in line]
    assert lines[place + 1].strip() == "to get it: pip x"


def leave(folder, **files):
    """What a job leaves behind that is killed."""
    folder.mkdir()
    for name, text in {"host": socket.gethostname(), **files}.items():
        (folder / name).write_text(text)
    return folder


def test_what_dead_jobs_left_behind_is_shown_and_removed(capsys, monkeypatch, tmp_path):
    """Of a job that lives nothing is; what cannot be removed is told."""
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(job_folder, "_short_folder", lambda: str(tmp_path))
    monkeypatch.setattr(left_behind, "SHARED_MEMORY", shared)
    with folder_of_job(shared) as (living, _):
        dead = [leave(one / "hdp-data-killed") for one in (tmp_path, shared)]
        dead.append(leave(tmp_path / "hdp-data-bad", lost="Ray has ended"))
        assert main(["doctor"]) == 0
        text = capsys.readouterr().out.partition("left behind by data planes of dead jobs (")[2]
        assert text.startswith("`megatron-hdp doctor --clean-up` removes it):")
        assert living not in text
        assert all(f"  {one} (" in text and one.exists() for one in dead)
        assert text.count("    it ended badly, its log is there: Ray has ended\n") == 1

        assert main(["doctor", "--clean-up", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert {one["folder"] for one in found["removed"]} == set(map(str, dead))
        assert found["left_behind"] == [] and not any(one.exists() for one in dead)
        assert Path(living).exists()
    stays = leave(tmp_path / "hdp-data-stays")
    monkeypatch.setattr(doctor, "clean_up", lambda found: found)
    assert main(["doctor", "--clean-up"]) == 0
    text = capsys.readouterr().out
    assert "  nothing, none was there" in text
    assert f"(it cannot be removed: look at its permissions):\n  {stays} (" in text


@on_cpu
def test_fewer_gpus_than_slurm_gave_are_advice_and_no_problem(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "advice:\n" in text and "  - torch sees 0 GPUs, Slurm gave 8: install" in text


def test_an_interface_that_is_not_there_is_a_problem(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-net")
    assert main(["doctor"]) == 1
    assert "  - GLOO_SOCKET_IFNAME names no-such-net" in capsys.readouterr().out


def test_patches_that_do_not_fit_are_advice_and_no_problem(capsys, monkeypatch):
    from megatron_hdp.megatron.lm import patches as lm_patches

    found = surroundings.Checkout("/there", "core_v0.16.1", is_current=True)
    monkeypatch.setattr(doctor, "find_checkout", lambda: found)
    checks = (lm_patches.PatchCheck("m:f", "because", "m:f: expected (a), found (b)"),)
    monkeypatch.setattr(lm_patches, "check_patches", lambda: checks)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "  MISFIT  m:f" in text and "  - 1 patches do not fit this Megatron-LM" in text


def test_a_version_that_was_not_tested_is_a_note(capsys, monkeypatch):
    from megatron_hdp.megatron.lm import releases

    monkeypatch.setattr(releases, "installed_version", lambda: "0.18.1")
    assert main(["doctor"]) == 0
    assert "  - megatron-core 0.18.1 was not tested, only 0.18.0, 0.18.2" in capsys.readouterr().out
