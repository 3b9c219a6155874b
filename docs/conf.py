"""Sphinx reads this file: `make site` builds docs/ into site/."""

import os
import re
import sys
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

from fedfm import __version__

sys.path.insert(0, str(Path(__file__).parent))
import notebooks

project = "fedfm"
author = "The fedfm authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
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
    """Lead links to the Markdown files of the project's root to their pages of the site; add notebooks of programs."""
    app.connect("source-read", _inside)
    app.connect("builder-inited", lambda app: [notebooks.write(_notebooks(app))])
    app.add_lexer("mermaid", TextLexer)  # drawn by whoever shows the Markdown; the site shows its text


def _inside(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = re.sub(r"\]\((?:\.\./)+([A-Z]+\.md)", lambda found: "](" + OUTSIDE[found[1]], source[0])
    if name == "how-to/gallery":
        where = os.path.relpath(_notebooks(app), Path(app.srcdir) / "how-to")
        program = r"(\[(\w+)\]\(../../examples/gallery/\2\.py\))"
        source[0] = re.sub(program, rf"\1 ([notebook]({where}/\2.ipynb))", source[0])


def _notebooks(app: Sphinx) -> Path:
    return Path(app.doctreedir) / "notebooks"
