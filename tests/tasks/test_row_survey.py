"""What a survey counts of the rows of every task, compared with counts of the rows as they were written."""

import numpy as np
import pytest

import fedfm
from fedfm.core import tasks
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.models.load import load_model
from fedfm.models.spec import ModelSpec
from fedfm.tasks._row_survey import bin_names, into_bins, properties_of
from small import jsonl
from task_places import NAMES, Places, rows, tables

FEATURES = {"classification", "multi_label", "regression", "zero_shot", "instruction", "preference"}
LENGTHS, SIDES = (10, 20, 30, 60), (8, 16, 32)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Places(tmp_path_factory.mktemp("survey-tasks"))


@pytest.fixture(params=NAMES)
def surveyed(request, place):
    """(name of the task, its rows as a table, sums by property: {group: rows})"""
    path, folder = place(request.param)
    table = load_table(DataSpec(path=str(path)), seed=0, task=request.param)
    model = load_model(
        ModelSpec(str(folder), max_length=16), classes=table.classes, kind=table.kind, task=request.param
    )
    found = {}
    for of in properties_of(model, LENGTHS, SIDES):
        members = of.members(table)
        assert members.shape == (len(table), len(of.groups)), of.name
        assert set(np.unique(members)) <= {0.0, 1.0}, of.name
        assert members.sum(1).max() <= of.most, of.name
        found[of.name] = dict(zip(of.groups, members.sum(0).astype(int).tolist(), strict=True))
    return request.param, table, found


def test_every_row_is_counted_in_one_bin_of_what_it_has(surveyed):
    name, table, found = surveyed
    assert sum(found["missing"].values()) == len(table)
    gaps = {"multi_label": "no target", "visual_instruction": "a picture of one colour"}.get(name)
    assert found["missing"]["nothing missing"] == len(table) - (found["missing"][gaps] if gaps else 0)
    texts = {"language_modelling", "instruction", "preference", "embedding", "sequence_to_sequence"}
    if tasks.find(name).table_kinds != ("image", "text", "features") and name not in ("segmentation", "zero_shot"):
        assert sum(found["characters"].values()) == len(table)
    if name in texts - {"language_modelling"}:
        assert sum(found["characters_of_answer"].values()) == len(table)
    if name in ("segmentation", "visual_instruction", "zero_shot"):
        assert sum(found["width"].values()) == sum(found["height"].values()) == len(table)


def test_targets_are_those_of_the_written_rows(surveyed):
    name, table, found = surveyed
    if name == "zero_shot":
        expected = dict(zip(table.classes, np.bincount(table.labels).tolist(), strict=True))
        assert found["targets"] == expected
        return
    written = rows(name)
    if name == "classification":
        assert found["targets"] == {"fish": 10, "bird": 10} or found["targets"] == {"bird": 10, "fish": 10}
    elif name == "multi_label":
        assert found["targets"]["odd"] == sum("odd" in row["label"] for row in written)
        assert found["targets"]["third"] == sum("third" in row["label"] for row in written)
        assert found["missing"]["no target"] == sum(not row["label"] for row in written)
    elif name == "token_classification":
        assert found["targets"]["B-ANIMAL"] == sum("B-ANIMAL" in row["tags"] for row in written)
    elif name == "regression":
        values = [row["label"] for row in written]
        counts, _ = np.histogram(values, [-1000, -100, -10, -1, 0, 1, 10, 100, 1000])
        assert [n for group, n in found["targets"].items() if " or more" not in group][1:] == counts.tolist()
    elif name == "segmentation":
        assert sum(found["targets"].values()) >= len(written)
    else:
        assert "targets" not in found


def test_lengths_are_those_of_the_written_texts(surveyed):
    name, _, found = surveyed
    key = {"classification": "text", "instruction": "instruction", "preference": "prompt", "embedding": "anchor"}
    if name not in key:
        return
    lengths = [len(row[key[name]]) for row in rows(name)]
    counts, _ = np.histogram(lengths, [0, *LENGTHS, 10**9])
    assert list(found["characters"].values()) == counts.tolist()
    if name == "preference":
        answers, _ = np.histogram([len(r["chosen"] + r["rejected"]) for r in rows(name)], [0, *LENGTHS, 10**9])
        assert list(found["characters_of_answer"].values()) == answers.tolist()


@pytest.mark.sample("classification", "instruction", "regression", "segmentation", "token_classification")
@pytest.mark.parametrize("name", NAMES)
def test_every_task_is_surveyed_in_a_run(name, place, tmp_path):
    made = tables(place(name), name, clients=2)
    found = fedfm.survey(made, tmp_path / "run", changes={"method.min_count": 2})
    assert found["silos"] == 2
    table = load_table(DataSpec(path=str(place(name)[0])), seed=0, task=name)
    rows_of_all = found["rows"]
    assert 0 < rows_of_all <= len(table)
    assert ("features" in found) == (name in FEATURES)
    assert sum(n or 0 for n in found["counts"]["missing"]["counts"]) <= rows_of_all


def test_rows_with_gaps_are_counted(tmp_path):
    path = jsonl(
        tmp_path / "rows.jsonl", [{"text": t, "label": "ab"[i % 2]} for i, t in enumerate(["x y", "NaN", "none", "z"])]
    )
    table = load_table(DataSpec(path=str(path)), seed=0)
    from small import features

    assert table.kind == "text"
    from fedfm.tasks import _row_survey

    assert _row_survey._missing(table, None).sum(0).tolist() == [2, 2, 0, 0, 0]
    loaded = load_table(DataSpec(path=str(features(tmp_path, n=20))), seed=0)
    loaded.inputs[3, 1], loaded.inputs[7, 0], loaded.inputs[8, 2] = -999, 1e20, np.nan
    assert _row_survey._missing(loaded, None).sum(0).tolist() == [17, 0, 0, 3, 0]


def test_a_picture_of_one_colour_is_counted_and_its_size_is_the_stored_one(tmp_path):
    from PIL import Image

    from fedfm.tasks import _row_survey

    for k, name in enumerate("ab"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(3):
            noise = np.random.default_rng(i).integers(0, 255, (20 + k, 30, 3)).astype(np.uint8)
            Image.fromarray(noise if i else noise * 0).save(tmp_path / "train" / name / f"{i}.png")
    table = load_table(DataSpec(path=str(tmp_path)), seed=0)
    assert _row_survey._missing(table, None).sum(0).tolist() == [4, 0, 2, 0, 0]
    assert sorted(map(tuple, _row_survey._sides(table).tolist())) == [(30, 20)] * 3 + [(30, 21)] * 3


@pytest.mark.parametrize("edges", [(10,), (1, 2, 3), (0.5, 100.0)])
def test_bins_hold_what_numpy_counts(edges):
    values = np.random.default_rng(0).exponential(10, 200)
    counts, _ = np.histogram(values, [-np.inf, *edges, np.inf])
    assert into_bins(values, edges).sum(0).tolist() == counts.tolist()
    assert len(bin_names(edges)) == len(edges) + 1
