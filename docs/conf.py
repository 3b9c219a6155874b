"""Sphinx reads this file: `make site` builds docs/ into site/."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from fedfm import __version__

sys.path.insert(0, str(Path(__file__).parent))
import inventories
import notebooks
import site_html

project = "fedfm"
author = "The fedfm authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
intersphinx_mapping = inventories.reachable(inventories.PROJECTS)
myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_digits = False  # a price is not an equation
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["fedfm.css"]
copybutton_prompt_text = "$ "  # a block with prompts is copied without them, and without what the commands print
copybutton_selector = "div:not(.highlight-text) > div.highlight pre"  # blocks of text show what is printed
exclude_patterns = ["results/*.json"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"fedfm {__version__}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

OUTSIDE = {"CONTRIBUTING.md": "/contributing.md", "CHANGELOG.md": "/changelog.md", "README.md": "/index.md"}


def setup(app: Sphinx) -> None:
    """Point links to Markdown files of the project's root at their pages of the site; add notebooks of programs."""
    app.add_html_math_renderer("mathml", (site_html.visit_math, None), (site_html.visit_math_block, None))
    app.connect("source-read", _rewrite_links)
    app.connect("html-page-context", _adapt_tables)
    app.connect("builder-inited", lambda app: [notebooks.write(_notebooks(app))])


def _adapt_tables(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    if "body" in context:
        context["body"] = site_html.adapt_tables(context["body"], page)


def _rewrite_links(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = re.sub(r"\]\((?:\.\./)+([A-Z]+\.md)", lambda found: "](" + OUTSIDE[found[1]], source[0])
    if name == "how-to/gallery":
        where = os.path.relpath(_notebooks(app), Path(app.srcdir) / "how-to")
        program = r"(\[(\w+)\]\(../../examples/gallery/\2\.py\))"
        source[0] = re.sub(program, rf"\1 ([notebook]({where}/\2.ipynb))", source[0])


def _notebooks(app: Sphinx) -> Path:
    return Path(app.doctreedir) / "notebooks"
