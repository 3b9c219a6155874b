"""Every block of the documents does what it says. Each page is read from top to bottom in a folder of its own.

``python`` blocks run, one after the other, in one namespace a page. ``toml`` blocks are experiments or pretrainings,
and are checked, unless ``<!-- no experiment -->`` stands before them. ``console`` and ``bash`` blocks run where
``<!-- test -->`` stands before them; then every line is a ``fedfm`` command. ``<!-- file: NAME -->`` writes the block
into the page's folder instead: what comes after may use it.
"""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedfm
from fedfm.api.pretrain_spec import Pretraining
from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.encrypted.student.distil_spec import Distillation

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(p for kind in ("tutorial", "how-to") for p in (ROOT / "docs" / kind).glob("*.md"))]
NAMES = sorted((ROOT / "docs/reference/python").glob("*.md"))  # a page for each public name
EXTERNAL = re.compile(r"https://[\w-]+(\.[\w-]+)+(/[\w.~/@%+-]*)?(#[\w.-]+)?")
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page):
    return [(m["mark"] or "", m["language"], m["text"]) for m in BLOCK.finditer(page.read_text())]


def checked(text):
    tables = tomllib.loads(text)
    if "distil" in tables:
        return Distillation.from_dict(tables)
    if "pretrain" in tables:
        return Pretraining.from_dict(tables)
    return Experiment.from_dict(tables, imports=True)  # a page may bring a method of its own


LONG = (
    *("first-experiment", "attacks", "personalise", "own-data", "choose-a-method", "one-round", "instructions"),
    "sequence-to-sequence",
    "visual-instruction",
    "data-at-scale",
    "own-model",
    "read-a-run",
    "multi-label",
    "hugging-face-script",
    "regression",
    "pretrain",
    "track",
)
LONGEST = ("leave", "segmentation", "token-classification")  # of what tests/api, tests/tasks and the gallery show


def marks(page: Path) -> list[pytest.MarkDecorator]:
    """Which target runs the blocks of a page."""
    return [pytest.mark.proof] * (page.stem in LONG) + [pytest.mark.release] * (page.stem in LONGEST)


@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set:UserWarning")  # by a Trainer, where there is no GPU
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT on transformers 5
@pytest.mark.parametrize(
    "page",
    [
        *(pytest.param(p, marks=marks(p), id=p.stem) for p in PAGES),
        *(
            pytest.param(p, marks=[pytest.mark.proof] * (p.stem in ("advise", "audit")), id=f"fedfm.{p.stem}")
            for p in NAMES
        ),
    ],
)
def test_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    scope = {"__name__": "__main__"}
    for i, (mark, language, text) in enumerate(blocks(page)):
        if mark.startswith("file: "):
            Path(mark.removeprefix("file: ")).write_text(text)
            if language == "toml" and "[data]" in text:
                checked(text)
        elif language == "toml" and mark != "no experiment":
            checked(text)
        elif language == "python":
            exec(compile(text, f"{page.name}, block {i + 1}", "exec"), scope)
        elif mark == "test":
            for line in text.replace("\\\n", " ").splitlines():
                command(line)
    capsys.readouterr()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_each_public_name_has_a_page_that_uses_it():
    titles = {p.read_text().splitlines()[0].removeprefix("# fedfm.").replace("\\", ""): p for p in NAMES}
    assert set(titles) == set(fedfm.__all__)
    for name, page in titles.items():
        code = "\n".join(text for _, language, text in blocks(page) if language == "python")
        assert re.search(rf"\b{name}\b", code), name
    listed = re.findall(r"^   python/(\w+)$", (ROOT / "docs/reference/python.rst").read_text(), re.M)
    assert sorted(listed) == [p.stem for p in NAMES]


def command(line):
    words = shlex.split(line.removeprefix("$ "), comments=True)
    if words and "=" in words[0]:  # PYTHONPATH=. fedfm ...: the page's folder is on the path here
        words = words[1:]
    if words:
        assert words[0] == "fedfm", f"only fedfm commands can be marked for a test: {line}"
        assert main(words[1:]) == 0, line


@pytest.mark.parametrize("page", ["own-model", "hugging-face-script"])
def test_a_script_changes_in_at_most_three_lines(page):
    (changed,) = [text for mark, _, text in blocks(ROOT / f"docs/how-to/{page}.md") if mark == "what changes"]
    assert len([line for line in changed.splitlines() if line.strip()]) <= 3


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            assert re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[\w.~/@%+-]*)?(#[\w.-]+)?", target), (
                f"{page.name}: {target}"
            )
            continue
        path, _, anchor = target.partition("#")
        aim = page.parent / path if path else page
        assert aim.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(aim), f"{page.name}: {target}"


def prose(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page):
    """The anchors of a page's headings, as GitHub and MyST name them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("kind", ["tutorial", "how-to", "explanation", "reference", "results"])
def test_an_index_names_every_page_of_its_folder(kind):
    folder = ROOT / "docs" / kind
    named = set(re.findall(r"\]\(([\w-]+\.\w+)\)", prose(folder / "index.md")))
    assert {p.name for p in folder.iterdir() if p.suffix in (".md", ".rst")} - {"index.md"} <= named


def test_a_dead_link_of_the_site_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<p id="here"><a href="b.html#there"></a><img src="no.svg"><a href="#here"></a>')
    (tmp_path / "b.html").write_text('<a href="a.html#gone"></a><a href="https://flower.ai"></a><a href="http:/x"></a>')
    command = [sys.executable, ROOT / "docs" / "links.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    dead = ["a.html: b.html#there", "a.html: no.svg", "b.html: a.html#gone", "b.html: http:/x", "4 dead links"]
    assert (done.returncode, done.stderr.splitlines()) == (1, dead)
    (tmp_path / "a.html").write_text('<p id="gone"><a href="b.html"></a>')
    (tmp_path / "b.html").write_text('<a href="a.html#gone"></a>')
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_the_readme_fits_three_screens():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_examples_are_experiments(path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")  # a model may be a function of a file there
    assert path.read_text().startswith("# ")
    assert f"fedfm run examples/{path.name}" in path.read_text()
    Experiment.load(path)


@pytest.mark.proof
def test_the_reference_is_up_to_date():
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_of_the_readme_exists():
    from fedfm.cli.parser import build

    helped = build().format_help()
    for name in re.findall(r"`fedfm ([a-z]+)", (ROOT / "README.md").read_text()):
        assert f"    {name} " in helped, name
