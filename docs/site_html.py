"""What the site's HTML has beyond Sphinx: equations as MathML, and tables that a phone shows as cards.

docs/conf.py registers both. Neither needs a script in the reader's browser.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

from bs4 import BeautifulSoup, Tag
from docutils import nodes
from latex2mathml.converter import convert

ANCHORED = ("reference/experiment", "reference/commands")  # pages whose tables have an anchor a row


def visit_math(self: Any, node: nodes.math) -> None:
    """An equation within a sentence."""
    self.body.append(convert(node.astext(), display="inline"))
    raise nodes.SkipNode


def visit_math_block(self: Any, node: nodes.math_block) -> None:
    """An equation on a line of its own. One that is wider than the page can be scrolled."""
    self.body.append(f'<div class="equation">{convert(node.astext(), display="block")}</div>\n')
    raise nodes.SkipNode


def adapt_tables(body: str, page: str) -> str:
    """The page's HTML with a label for each cell of a table, and on reference pages with an anchor for each key.

    Args:
        body: HTML of one page.
        page: its name, such as ``reference/experiment``.
    """
    if "<table" not in body:
        return body
    soup = BeautifulSoup(body, "html.parser")
    ids = {str(tag["id"]) for tag in soup.find_all(id=True)}
    for table in soup.find_all("table"):
        heads = [cell.get_text(" ", strip=True) for cell in table.select("thead th")]
        for row in table.select("tbody tr") if heads else ():
            cells = row.find_all(["td", "th"], recursive=False)
            for head, cell in zip(heads, cells, strict=False):
                cell["data-label"] = head if cell.get_text(strip=True) else ""  # an empty cell needs no name
            if page in ANCHORED and heads[0] in ("key", "argument"):
                _anchor(soup, row, cells[0], _place(table), ids)
    return str(soup)


def _place(table: Tag) -> str:
    """Where the keys of a table belong, by the headings above it: ``data.partition``, ``method.fedavg``, ``run``."""
    titles: list[str] = []
    for section in (s for s in table.parents if s.name == "section"):
        heading = section.find(re.compile("^h[1-6]$"))
        if heading is not None and heading.name != "h1":
            text = "".join(t for t in heading.find_all(string=True) if t.find_parent("a", "headerlink") is None)
            titles.insert(0, text.strip().removeprefix("fedfm ").replace("’", "'"))
    if titles and (of := re.fullmatch(r"\[(\w+)\] of a silo.s file", titles[-1])):
        titles = ["silo", of[1]]
    named = {"A silo's file": "silo", "A federation's file": "federation"}
    return ".".join(re.sub(r"[^\w.-]+", "-", named.get(t, t).strip("[]")) for t in titles)


def _anchor(soup: BeautifulSoup, row: Tag, cell: Tag, place: str, ids: set[str]) -> None:
    key = cell.find("code")
    name = key.get_text().strip() if key is not None else ""
    name = re.split(r"[\s=]", name)[0].strip("[]").lstrip("-")
    if not name:
        return
    wanted = anchor = f"{place}.{name}"
    while anchor in ids:  # a key of several variants, such as optimisers of [method.local]
        anchor = f"{wanted}-{len([i for i in ids if i.startswith(wanted)]) + 1}"
    ids.add(anchor)
    row["id"] = anchor
    link = soup.new_tag("a", attrs={"class": "headerlink", "href": f"#{escape(anchor)}", "title": f"Link to {name}"})
    link.string = "¶"
    (cell.p or cell).append(link)
