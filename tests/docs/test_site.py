"""How pages are prepared for the site, and that a fault in one fails the build."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def conf():
    """The configuration of Sphinx, which needs no Sphinx."""
    spec = importlib.util.spec_from_file_location("site_conf", ROOT / "docs" / "conf.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_links_to_the_root_lead_to_pages(conf):
    page = "[a](../README.md#limits) [b](../CONTRIBUTING.md) [c](train.md)\n"
    assert conf.prepared(page) == "[a](index.md#limits) [b](contributing.md) [c](train.md)\n"
    assert "| `0` | Done" in conf.prepared("# Codes\n\n<!-- declared: exit-codes -->\n")


def test_words_before_a_colon_are_no_type(conf):
    """Napoleon would take them for one in the docstring of an attribute."""
    for what, expected in (("attribute", ["", "Nats: a mean."]), ("class", ["Nats: a mean."])):
        lines = ["Nats: a mean."]
        conf._without_types(None, what, "x", None, None, lines)
        assert lines == expected


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None, reason="./scripts/docs.sh installs Sphinx"
)
def test_a_warning_fails_the_build():
    """Without anchors, links into pages lead nowhere."""
    done = subprocess.run(
        [ROOT / "scripts" / "docs.sh", "-D", "myst_heading_anchors=0"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode != 0
    assert "WARNING" in done.stderr and "train.md" in done.stderr
    assert "the start page" not in done.stdout
