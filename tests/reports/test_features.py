"""The sections on one-round runs: what a FedPFT run states, and accuracy by the bytes that were sent."""

import re

import pytest

import fedfm
from fedfm.reports import compare, html
from fedfm.reports.frontier import frontier, short
from small import experiment


def method(**keys):
    return {"name": "fedpft", "components": 2, "min_count": 2} | keys


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A plain run with bound and count of errors, a chain, a private run, and a baseline."""
    folder = tmp_path_factory.mktemp("runs")
    changes = {
        "plain": {"method": method(bound=True, verify=True)},
        "chain": {"method": method(topology="chain")},
        "private": {
            "method": method(components=1, covariance="spherical"),
            "privacy": {"unit": "record", "target_epsilon": 2.0, "delta": 1e-5},
        },
        "baseline": {"method": {"name": "fedncm"}},
    }
    for name, change in changes.items():
        tables = experiment(folder, run={"seed": 1})
        fedfm.run(tables | change, folder / name)
    return folder


def text(path):
    page = html.write(path).read_text()
    section = page.split("Mixtures of features</h2>", 1)[1].split("<section", 1)[0]
    return re.sub(r"<[^>]+>", " ", section)


def test_a_fedpft_report_states_bytes_bound_and_components(runs):
    said = text(runs / "plain")
    result = fedfm.load_run(runs / "plain").manifest["result"]
    for part in (
        "by equations (10) to (12)",
        "raw features, for comparison",
        "our bound",
        "as printed",
        "counted by the clients",
        "vacuous",
        "Components of every client",
    ):
        assert part in said
    assert result["details"]["bound"]["vacuous"] is True


def test_a_chain_shows_every_head_and_a_private_run_its_noise(runs):
    along = text(runs / "chain")
    assert "Heads along the chain" in along
    assert "client-00" in along
    noise = text(runs / "private")
    assert "standard deviation of the noise" in noise
    assert "larger by a factor" in noise


def test_other_methods_have_no_such_section(runs):
    assert "Mixtures of features" not in html.write(runs / "baseline").read_text()


def test_the_frontier_keeps_what_nobody_beats_with_fewer_bytes():
    spots = [("a", 10.0, 0.5), ("b", 20.0, 0.4), ("c", 30.0, 0.9), ("d", 30.0, 0.8), ("e", 99.0, 0.9)]
    assert [name for name, _, _ in frontier(spots)] == ["a", "c"]


def test_names_lose_what_all_share():
    assert short(["t5__a-seed0", "t5__bc-seed0"]) == ["a", "bc"]
    assert short(["run", "run-2"]) == ["run", "run-2"]
    assert short(["one"]) == ["one"]


def test_compare_draws_accuracy_against_bytes(runs, tmp_path):
    page = compare.write([runs / "plain", runs / "private", runs / "baseline"], tmp_path / "c.html").read_text()
    assert "Accuracy for what was sent" in page
    assert page.count('<circle class="dot') >= 3
    one = compare.write([runs / "plain"], tmp_path / "one.html").read_text()
    assert "Accuracy for what was sent" not in one
