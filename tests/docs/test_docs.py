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

from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.runtime.pretrain_spec import Pretraining

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page):
    return [(m["mark"] or "", m["language"], m["text"]) for m in BLOCK.finditer(page.read_text())]


def checked(text):
    tables = tomllib.loads(text)
    return (Pretraining if "pretrain" in tables else Experiment).from_dict(tables)


@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set:UserWarning")  # by a Trainer, where there is no GPU
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT on transformers 5
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
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
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_examples_are_experiments(path):
    assert path.read_text().startswith("# ")
    assert f"fedfm run examples/{path.name}" in path.read_text()
    Experiment.load(path)


def test_the_reference_is_up_to_date():
    done = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_of_the_readme_exists():
    from fedfm.cli.parser import build

    helped = build().format_help()
    for name in re.findall(r"`fedfm ([a-z]+)", (ROOT / "README.md").read_text()):
        assert f"    {name} " in helped, name
