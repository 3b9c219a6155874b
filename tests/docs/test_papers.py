"""`fedfm show` lists every default that differs from the paper's, with the reason."""

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest

from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.config.papers import differences
from fedfm.config.registry import ours, resolve
from fedfm.core.capabilities import HiddenModel
from fedfm.core.fields import Paper, setting
from fedfm.encrypted.student.distil_spec import Distillation
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedms.fedms import FedMS
from fedfm.training import AdamW

METHODS = [name for name in ours("methods") if resolve("methods", name).paper]


def whole(method):
    """All tables of an experiment with this method, and of a distillation, as their own code fills them in."""
    cls = resolve("methods", method)
    table = {"name": method} | ({"foundation": "nano-vit"} if hasattr(cls, "foundation") else {})
    tables = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}, "method": table}
    if isinstance(cls(), HiddenModel):
        del tables["model"]
    elif adaptations := cls().needs.adaptations:
        tables["model"]["adaptation"] = {"name": adaptations[0]}
    if task := (cls().needs.tasks or ("",))[0]:
        tables["model"]["task"] = task
    distil = Distillation.from_dict({"data": {"name": "digits"}, "model": {"name": "nano-vit"}}).to_dict()["distil"]
    return Experiment.from_dict(tables).to_dict() | {"distil": distil}


def at(tables, key, cls):
    for part in key.split("."):
        tables = tables.get(part) if isinstance(tables, dict) else None
    if tables is None and key.startswith("method."):  # an absent key that stands for another value
        usual = {f.name: f.metadata.get("usual") for f in dataclasses.fields(cls)}
        return usual.get(key.removeprefix("method."))
    return tables


def same(a, b):
    return list(a) == list(b) if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) else a == b


@pytest.mark.parametrize("name", METHODS)
def test_show_lists_exactly_the_settings_that_differ_from_the_paper(name, capsys):
    cls, tables = resolve("methods", name), whole(name)
    expected = {key for key, paper in cls.paper.items() if not same(at(tables, key, cls), paper.value)}
    assert main(["show", name]) == 0
    _, _, listed = capsys.readouterr().out.partition("# These defaults differ from the paper:\n")
    assert set(re.findall(r"^#   (\S+) = .*, in the paper .*: \S", listed, re.M)) == expected
    for key, paper in cls.paper.items():
        assert bool(paper.why) == (key in expected), f"{name}: {key} has a reason if and only if it differs"


def test_the_five_papers_methods_have_paper_settings():
    assert {"blindfed", "fedbaf", "fedbip", "fedms", "fedpft"} <= set(METHODS)


def test_a_default_equal_to_the_papers_is_not_listed():
    @dataclass(frozen=True)
    class Mine(FedMS):
        local: AdamW = setting(AdamW(learning_rate=1e-3, weight_decay=0.05, batch_size=512, betas=(0.9, 0.98)), "")

    keys = {row["key"] for row in differences(Mine)}
    assert not keys & {"method.local.batch_size", "method.local.betas"}
    assert "method.local.learning_rate" in keys  # 2e-4 in the paper, as FedMS has it


def test_a_paper_setting_with_an_unknown_key_is_an_error():
    @dataclass(frozen=True)
    class Mine(FedAvg):
        paper: ClassVar = {"method.local.rate": Paper(1)}

    with pytest.raises(LookupError):
        differences(Mine)


def test_show_lists_the_differences_of_a_users_method(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = [
        '"""Mine: a title."""',
        "from dataclasses import dataclass",
        "from fedfm.core.fields import Paper",
        "from fedfm.methods.fedavg import FedAvg",
        "@dataclass(frozen=True)",
        "class Mine(FedAvg):",
        '    paper = {"method.rounds": Paper(100, "quick trials"), "method.local.epochs": Paper(1)}',
    ]
    (tmp_path / "own_papers.py").write_text("\n".join(lines))
    assert main(["show", "own_papers:Mine"]) == 0
    listed = capsys.readouterr().out.partition("# These defaults differ from the paper:\n")[2]
    assert listed == "#   method.rounds = 10, in the paper 100: quick trials\n"
