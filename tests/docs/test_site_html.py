"""The site's HTML: a label for each cell, an anchor for each key, equations as MathML."""

import importlib.util
import types
from pathlib import Path

import pytest

bs4 = pytest.importorskip("bs4", reason="needs the extra docs")
pytest.importorskip("latex2mathml", reason="needs the extra docs")
pytest.importorskip("docutils", reason="needs the extra docs")
ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("site_html", ROOT / "docs" / "site_html.py")
site_html = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(site_html)


def table(keys, head="key"):
    rows = "".join(f"<tr><td><p><code>{key}</code></p></td><td>x</td></tr>" for key in keys)
    return f"<table><thead><tr><th>{head}</th><th>meaning</th></tr></thead><tbody>{rows}</tbody></table>"


def section(title, *inside, level=2):
    sign = '<a class="headerlink" href="#x">¶</a>'
    return f"<section><h{level}>{title}{sign}</h{level}>{''.join(inside)}</section>"


def ids(html):
    return [row.get("id") for row in bs4.BeautifulSoup(html, "html.parser").select("tbody tr")]


def test_each_cell_has_the_header_of_its_column():
    made = site_html.adapt_tables(table(["alpha", ""]), "how-to/sites")
    cells = bs4.BeautifulSoup(made, "html.parser").find_all("td")
    assert [cell["data-label"] for cell in cells] == ["key", "meaning", "", "meaning"]
    assert ids(made) == [None, None]


@pytest.mark.parametrize(
    ("title", "anchor"),
    [
        ("data.partition", "data.partition.alpha"),
        ("[run]", "run.alpha"),
        ("A silo’s file", "silo.alpha"),
        ("[budget] of a silo’s file", "silo.budget.alpha"),
    ],
)
def test_a_key_has_an_anchor_by_its_place(title, anchor):
    page = section("The experiment file", section(title, table(["alpha"])), level=1)
    made = site_html.adapt_tables(page, "reference/experiment")
    assert ids(made) == [anchor]
    assert f'href="#{anchor}"' in made
    assert made.count("¶") == 3  # the headings keep theirs


def test_a_method_s_key_is_below_its_table_of_the_experiment():
    page = section("[method]", section("<code>fedavg</code>", table(["rounds"]), level=3))
    assert ids(site_html.adapt_tables(page, "reference/experiment")) == ["method.fedavg.rounds"]


def test_a_command_s_option_has_an_anchor_without_its_value():
    page = section("fedfm run", table(["--engine ENGINE", "experiment", "--set KEY=VALUE"], "argument"))
    assert ids(site_html.adapt_tables(page, "reference/commands")) == ["run.engine", "run.experiment", "run.set"]


def test_anchors_are_unique():
    page = section("[method.local]", table(["lr"]), table(["lr"]), table(["lr"]))
    found = ids(site_html.adapt_tables(page, "reference/experiment"))
    assert found[0] == "method.local.lr"
    assert len(set(found)) == 3


def test_a_page_without_tables_stays_as_it_is():
    assert site_html.adapt_tables("<p>a &amp; b</p>", "index") == "<p>a &amp; b</p>"


def test_an_equation_is_mathml_without_a_script():
    from docutils import nodes

    for visit, node in ((site_html.visit_math, nodes.math), (site_html.visit_math_block, nodes.math_block)):
        translator = types.SimpleNamespace(body=[])
        with pytest.raises(nodes.SkipNode):
            visit(translator, node("", r"\frac{w' + a_t w_{pre}}{1 + a_t}"))
        text = "".join(translator.body)
        assert "<mfrac>" in text
        assert "<script" not in text
