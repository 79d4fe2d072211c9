"""The patches for Megatron-LM checkouts: our lines only, at the right place of their release."""

import os
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "patches" / "megatron-lm"
PATCHES = sorted(FOLDER.glob("*.patch"))
CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
MAIN = 'if __name__ == "__main__":'


def git(folder, *arguments):
    return subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def release_of(script):
    """The release whose patch was made from this very script."""
    blob = git(script.parent, "hash-object", script.name).strip()
    for path in PATCHES:
        (index,) = (line for line in path.read_text().splitlines() if line.startswith("index "))
        if blob.startswith(index.split()[1].split("..")[0]):
            return path
    raise AssertionError(f"no patch in {FOLDER} is for {script} ({blob})")


def patched_script(script, folder):
    """A patched copy of the script, in `folder`."""
    patch = release_of(script)
    copy = folder / script.name
    copy.write_text(script.read_text())
    # git looks for a repository around the folder and would skip a path that is none of its own
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for options in (("--check",), ()):
        subprocess.run(
            ["git", "apply", *options, "--unidiff-zero", str(patch)],
            cwd=folder,
            env=environment,
            check=True,
        )
    return copy


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_adds_our_lines_and_takes_none_away(path):
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.startswith("+++")] == ["+++ b/pretrain_gpt.py"]
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert "    from megatron_hdp.plugin import activate" in added and len(added) <= 5
    assert not [line for line in lines if line.startswith("-") and not line.startswith("---")]
    assert not [line for line in lines if line.startswith(" ")]  # no context


def test_there_are_patches():
    assert PATCHES


@pytest.mark.megatron_lm
@pytest.mark.skipif(not CHECKOUT, reason="set MEGATRON_LM_PATH to a Megatron-LM checkout")
def test_it_applies_and_activates_first_of_all(tmp_path):
    lines = patched_script(Path(CHECKOUT, "pretrain_gpt.py"), tmp_path).read_text().splitlines()
    at = lines.index(MAIN)
    assert lines[at + 1].strip() == "from megatron_hdp.plugin import activate"
    assert lines[at + 3].strip().startswith("activate()")
