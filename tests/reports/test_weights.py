"""The map of weights between clients: its drawing, its text, and where it must not be shown."""

import json
import re

import numpy as np
import pytest

from fedfm.api import execute
from fedfm.cli import main
from fedfm.reports import compare, html
from fedfm.reports.client_weights import Weights, group_means, load, seriation, words
from reports import runs
from small import experiment


def section(page, name="map"):
    text = page.read_text(encoding="utf-8")
    found = re.search(rf'<section id="{name}">(.*?)</section>', text, re.S)
    return found[1] if found else None


def blocks(group, within=1.0, across=0.0, own=2.0):
    """Clients of one group share, others do not: rows sum to 1."""
    group = np.asarray(group)
    p = np.where(group[:, None] == group, within, across) + own * np.eye(len(group))
    return p / p.sum(1, keepdims=True)


def test_every_share_is_on_the_map(tmp_path):
    run = runs.make(tmp_path / "a", n_clients=3, n_rounds=2)
    p = np.array([[np.eye(3)], [[[0.6, 0.3, 0.1], [0.0, 1.0, 0.0], [0.25, 0.25, 0.5]]]])
    runs.weights(run, p=p)
    found = section(html.write(run))
    wide = found.partition('<div class="narrow">')[0]
    told = dict(re.findall(r"<title>(c\d from c\d): ([\d.-]+) %</title>", wide))
    assert told == {
        f"c{i} from c{k}": f"{100 * p[1, 0, i, k]:.1f}" for i in range(3) for k in range(3) if p[1, 0, i, k]
    }
    assert "Round 2." in found
    assert "which clients are alike" in found


def test_colours_follow_the_order_of_the_weights(tmp_path):
    run = runs.make(tmp_path / "a", n_clients=2, n_rounds=1)
    runs.weights(run, p=np.array([[[[0.9, 0.1], [-0.4, 1.4]]]]))
    cells = section(html.write(run)).partition('<div class="narrow">')[0]
    drawn = re.findall(r'<rect class="(s\d)" fill-opacity="([\d.]+)"[^>]*><title>(c\d) from (c\d)', cells)
    ink = {(a, b): (colour, float(x)) for colour, x, a, b in drawn}
    assert ink["c0", "c1"][1] < ink["c0", "c0"][1] < ink["c1", "c1"][1] == 1
    assert ink["c1", "c0"][0] == "s2"  # what raw similarities take away
    assert "c1 from c0: -40.0 %" in cells
    assert "second colour" in cells


def test_the_largest_weight_of_each_client_is_listed(tmp_path):
    run = runs.make(tmp_path / "a", n_clients=3, n_rounds=1)
    runs.weights(run, p=np.array([[[[0.5, 0.1, 0.4], [0.3, 0.5, 0.2], [0, 0, 1]]]]))
    rows = re.findall(r"<tr><th[^>]*>(c\d)</th>(.*?)</tr>", section(html.write(run)))
    cells = {c: [x.replace("\xa0", " ") for x in re.findall(r">([^<]*)</td>", rest)] for c, rest in rows}
    assert cells["c0"] == ["50.0 %", "c2", "40.0 %", "15.0 %"]
    assert cells["c2"] == ["100.0 %", "nobody", "", "30.0 %"]
    text = words(run).replace("\xa0", " ")
    assert "c1 keeps 50.0 %, learns most from c0 (30.0 %)" in text
    assert "c2 keeps 100.0 %, from no other client" in text


def test_a_client_that_was_not_asked_shows_its_last_row():
    p = np.stack([np.stack([blocks([0, 0, 1])]), np.stack([blocks([0, 1, 1])])])
    p[1, :, 0] = 0
    w = Weights(p, (1, 2), ("a", "b", "c"), ("model",))
    np.testing.assert_array_equal(w.last[0], [p[0, 0, 0], p[1, 0, 1], p[1, 0, 2]])
    assert w.cohorts.tolist() == [[True] * 3, [False, True, True]]


def test_neighbours_in_the_order_are_of_one_group():
    rng = np.random.default_rng(3)
    group = rng.permutation(np.arange(40) % 4)
    p = blocks(group, within=0.3) + 0.02 * rng.random((40, 40))
    order = seriation(p)
    assert sorted(order) == list(range(40))
    assert (np.diff(group[order]) != 0).sum() == 3


@pytest.mark.parametrize(("n", "most"), [(5, 9), (61, 40), (200, 40), (7, 7)])
def test_gathering_keeps_the_sums_of_rows(n, most):
    p = np.random.default_rng(n).dirichlet(np.ones(n), n)
    q, groups = group_means(p, np.random.default_rng(0).permutation(n).tolist(), most)
    assert len(q) == min(n, most)
    assert sorted(i for g in groups for i in g) == list(range(n))
    np.testing.assert_allclose(q.sum(1), 1)
    a, b = groups[0], groups[-1]
    assert q[0, -1] == pytest.approx(np.mean([sum(p[i, k] for k in b) for i in a]))


def test_many_clients_and_layers_are_gathered_and_it_says_so(tmp_path):
    run = runs.make(tmp_path / "a", n_clients=130, n_rounds=7, traffic=[])
    runs.weights(run, layers=40)
    found = section(page := html.write(run))
    assert "gathered into 40 groups" in found
    assert "5 of 40 layers" in found
    assert "the mean and 5 of 40 layers".capitalize() in found
    assert "5 of 7" in found
    assert "10 to 90 % of clients" in found
    assert page.stat().st_size < 1_000_000


def test_an_invalid_file_of_weights_is_reported(tmp_path):
    run = runs.make(tmp_path / "a", n_clients=2, n_rounds=1)
    assert section(html.write(run)) is None
    assert words(run) == ""
    good = runs.weights(run)
    names = {"rounds": np.array([1]), "clients": np.array(["a", "b"]), "layers": np.array(["x"])}
    for wrong in ({"weights": good[:, :, :1]} | names, {"weights": good}, names | {"weights": np.array([{}])}):
        np.savez(run / "weights.npz", **wrong)
        with pytest.raises(ValueError, match=r"shape|not a file|pickle|KeyError|rounds"):
            load(run)
        assert "is not a valid file of weights" in section(html.write(run))
    (run / "weights.npz").write_bytes(b"PK\x03\x04 torn")
    assert "is not a valid file of weights" in section(html.write(run))
    assert words(run) == ""


def test_before_and_after_the_last_pass(tmp_path):
    run = runs.make(tmp_path / "a", n_clients=4, n_rounds=1)
    assert "theta_bar_i" not in section(html.write(run), "clients")
    runs.weights(run)
    found = section(html.write(run), "clients")
    assert "may come from the last local pass alone" in found.replace("\n", " ")
    assert found.count("+10.0</td>") == 3  # the second client has no test rows
    assert "moves the mean by +10.0 points" in found


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fedbip")
    method = {"name": "fedbip", "rounds": 3, "granularity": "module", "fraction": 1.0}
    execute.run(experiment(folder, method=method), folder / "run")
    return folder / "run"


def test_a_run_draws_its_map_and_says_that_it_must_not_be_shared(real, capsys):
    assert main(["report", str(real)]) == 0
    assert "client-00 keeps" in capsys.readouterr().out
    page = real / "report.html"
    assert "Heat map of 5 by 5" in section(page)
    assert "Before and after" in section(page, "clients")
    said = page.read_text().partition('id="share"')[2].partition("</aside>")[0]
    assert "weights.npz, arrays/ and the map" in said
    assert "which clients have similar rows" in said
    assert any("weights.npz" in line for line in json.loads((real / "manifest.json").read_text())["do_not_share"])


def test_neither_export_nor_comparison_shows_the_map(real, tmp_path):
    assert main(["export", str(real), "--to", "torch", "--client", "client-01", "--out", str(tmp_path / "out")]) == 0
    shares = {f"{x:.4f}"[:6] for x in load(real).last.mean(0).ravel() if 0 < x < 1}
    for path in (tmp_path / "out").rglob("*"):
        assert path.suffix != ".npz"
        if path.is_file() and path.suffix == ".json":
            assert "weights.npz" not in path.read_text()
            assert not any(share in path.read_text() for share in shares)
    page = compare.write([real], tmp_path / "c.html").read_text()
    assert 'id="map"' not in page
    assert " keeps " not in page
    assert "learns most" not in page
