"""Each risk of a survey follows from its figure at the stated limit, and from nothing else."""

import numpy as np
import pytest

from fedfm.reports.survey_rules import distance_from, risks_of


def test_risks_follow_their_rules():
    base = {"silos": 5, "rows": 5000, "counts": {"targets": {"adjusted": 0.0, "counts": [50, 50]}}, "features": {}}
    assert risks_of(base) == []
    skew = base | {"counts": {"targets": {"adjusted": 0.3, "counts": [500, 50]}}}
    assert [r["risk"] for r in risks_of(skew)] == ["skew of targets", "unequal classes"]
    few_groups = {"targets": {"adjusted": 0.06, "counts": [50] * 77, "effective_groups": {"all": 70.0, "silo": 20.0}}}
    assert [r["risk"] for r in risks_of(base | {"counts": few_groups})] == ["skew of targets"]
    drift = base | {"features": {"adjusted": 0.4, "within_classes": {"adjusted": 0.2}}}
    assert [(r["risk"], r["value"]) for r in risks_of(drift)] == [("drift of features", 0.2)]
    by_classes = skew | {"features": {"adjusted": 0.4}}  # the skew of classes may explain it
    assert "drift of features" not in [r["risk"] for r in risks_of(by_classes)]
    few = base | {"silos": 2, "rows": 60}
    assert [r["risk"] for r in risks_of(few)] == ["small silos", "few silos"]
    gaps = base | {"counts": {"missing": {"counts": [4900, 100], "groups": []}}}
    assert [r["risk"] for r in risks_of(gaps)] == ["missing values"]
    far = base | {"features": {"from_reference": {"distance": 0.5}}}
    assert [r["risk"] for r in risks_of(far)] == ["drift from the reference"]


def test_the_distance_from_a_reference_is_in_units_of_its_variance():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0, 2, (500, 3)), rng.normal(1, 2, (400, 3))
    found = distance_from({"mean": y.mean(0).tolist()}, {"mean": x.mean(0).tolist(), "variance": float(x.var(0).sum())})
    assert found == pytest.approx(((y.mean(0) - x.mean(0)) ** 2).sum() / ((x - x.mean(0)) ** 2).sum(1).mean())
