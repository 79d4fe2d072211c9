"""How Sphinx makes the site: MyST pages, tables from declarations, API pages from docstrings."""

import logging
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS.parent)]

import api_pages  # noqa: E402
import declarations  # noqa: E402

import megatron_hdp  # noqa: E402

logging.getLogger("megatron").setLevel(logging.WARNING)  # not what it finds when it is imported

project = "megatron_hdp"
author = "The megatron_hdp authors"
copyright = f"{author}, Apache-2.0"
release = version = megatron_hdp.__version__
html_title = f"megatron_hdp {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_ext"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
highlight_language = "text"
smartquotes = False  # two dashes begin a flag

myst_heading_anchors = 3
add_module_names = False
toc_object_entries = False
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!megatron_hdp\.).*"),  # other packages
    ("py:.*", r".*\._\w+(\.\w+)?|.*\.(T|R|F|Key|Item)"),  # private names and type variables
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True}
napoleon_google_docstring, napoleon_numpy_docstring, napoleon_use_ivar = True, False, True
default_role = "code"


def prepared(page: str) -> str:
    """A page with its tables, and with README and CONTRIBUTING at their place on the site."""
    for name, place in (("README", "index"), ("CONTRIBUTING", "contributing")):
        page = page.replace(f"](../{name}.md", f"]({place}.md")
    return declarations.filled_in(page)


def setup(app):
    """Called by Sphinx."""
    app.connect("builder-inited", _write_api_pages)
    app.connect("source-read", _prepare)
    app.connect("autodoc-process-docstring", _without_types, priority=400)  # napoleon's is 500


def _write_api_pages(app):
    api_pages.write_pages("megatron_hdp", DOCS / "api")


def _prepare(app, name, source):
    source[0] = prepared(source[0])


def _without_types(app, what, name, obj, options, lines):
    """Keep napoleon from reading the words before a colon as an attribute's type."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")
