"""The trials of the zoo find the failures that they look for."""

import pytest

from fedfm.errors import InputError
from zoo import making, plain, trial
from zoo.families import FAMILIES
from zoo.trial import HOLDS, Trial, trials


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return making.write(FAMILIES["distilbert"], tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def of_bert(folder, rows_folder, tmp_path):
    return Trial("encoder", folder, "classification", "head", rows_folder, tmp_path)


def test_an_export_that_says_something_else_fails(of_bert, monkeypatch):
    as_it_is = plain.classify_texts
    assert of_bert.run()["hf"] == HOLDS
    monkeypatch.setattr(plain, "classify_texts", lambda *a: [[p + 2e-4 for p in row] for row in as_it_is(*a)])
    (of_bert.place / "hf").rename(of_bert.place / "before")
    assert of_bert._step(lambda: of_bert._export("hf")).startswith("fails: probabilities of fedfm predict")


@pytest.mark.parametrize(("error", "begins"), [(ValueError, "fails: ValueError: why"), (InputError, "refused: why")])
def test_an_error_is_a_refusal_only_if_it_is_of_fedfm(of_bert, monkeypatch, error, begins):
    def broken(*_, **__):
        raise error("why")

    monkeypatch.setattr(trial.fedfm, "run", broken)
    outcome = of_bert.run()
    assert list(outcome) == ["train"]
    assert outcome["train"].startswith(begins)


@pytest.mark.parametrize(
    ("notice", "left"),
    [
        ("2 of 9 trained tensors get no gradient, and do not change: a.weight, b.weight", 0),
        ("1 of 9 trained tensors get no gradient, and do not change: a.weight", 2),
        ("2 of 9 trained tensors get no gradient, and do not change: c.weight, d.weight", 2),
        ("a.weight and b.weight are on the CPU", 2),
    ],
)
def test_a_tensor_is_named_by_a_notice_that_counts_all_of_them(notice, left):
    assert len(trial._unnamed(["a.weight", "b.weight"], [notice])) == left


def test_every_family_has_trials():
    assert all(trials(about.kind) for about in FAMILIES.values())
    assert len(FAMILIES) >= 130
