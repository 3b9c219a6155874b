"""Every figure of the README and of the table of results is that of the page whose command stands with it."""

import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README, RESULTS = ((ROOT / p).read_text(encoding="utf-8") for p in ("README.md", "docs/results/index.md"))
EPYC, XEON = "AMD EPYC", "Intel(R) Xeon(R) Processor"


def page(name):
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def mean(name, table, row, key="accuracy", scale=0.01):
    """The mean over the seeds."""
    return scale * statistics.fmean(kept[key] for kept in page(name)[table]["rows"][row].values())


def test_each_figure_of_the_papers_rows_stands_on_its_page():
    found = re.findall(r"^\| .* \| (.*) \| `python reproduce/run.py (\w+) .*` \|$", RESULTS, re.M)
    assert len(found) == 4
    for figures, name in found:
        text = (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")
        for figure in re.findall(r"0\.\d{3}", figures):
            near = {f"| {100 * float(figure) + off:.1f} " for off in (-0.1, -0.05, 0.0, 0.05, 0.1)}
            assert any(cell in text for cell in near), f"{name}: {figure}"


def test_the_index_names_every_goal_that_is_missed_with_both_processors():
    kept = [*page("performance").items(), ("secagg_gate", {"AMD EPYC": page("secure-aggregation")})]
    missed = set()
    for name, by_cpu in kept:
        for result in by_cpu.values():
            missed |= {(name, g["goal"]) for g in result.get("goals", []) if not g["met"]}
    part = RESULTS.partition("## Goals that are missed")[2].partition("## Claims of the papers")[0]
    head, _, rows = part.partition("| measurement |")[2].partition("\n")
    assert "AMD EPYC" in head
    assert "Intel Xeon" in head
    rows = [line.strip("| ").split(" | ") for line in rows.partition("\n\n")[0].splitlines()[1:]]
    assert {(row[0], row[1]) for row in rows} == missed
    for name, goal, _, *cells in rows:
        assert len(cells) == 2
        for cpu, cell in zip((EPYC, XEON), cells, strict=True):
            of = {g["goal"]: g for g in dict(kept)[name].get(cpu, {}).get("goals", [])}
            assert cell.endswith("met") == (goal in of and of[goal]["met"]), (name, goal, cpu)
            assert (cell == "-") == (goal not in of), (name, goal, cpu)


def test_the_index_lists_every_claim_that_does_not_hold():
    part = RESULTS.partition("Every claim that does not hold")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| (\S+) \|", part, re.M)[1:]
    said = dict(re.findall(r"^\| \[(\w+)\]\(\w+\.md#the-claims\) \| \d+ \| (\d+) \|", RESULTS, re.M))
    for name in ("BlindFed", "FedBaF", "FedBip", "FedMS", "FedPFT"):
        text = (ROOT / "docs" / "results" / f"{name.lower()}.md").read_text(encoding="utf-8")
        tables = [line for line in text.splitlines() if line.startswith("|")]
        count = sum(line.count("does not hold |") + line.count("does not hold,") for line in tables)
        assert listed.count(name) == int(said[name]) == count


def test_the_demos_figures_are_those_that_it_printed():
    printed = dict(re.findall(r"^(fedavg\S*) +fedavg +(\S+)", RESULTS, re.M))
    said = ", ".join(f"{float(printed[run]):.3f}" for run in ("fedavg", "fedavg-random-weights"))
    assert f"| {said} | `make demo` |" in RESULTS


def test_the_readme_says_what_its_figure_shows():
    text = " ".join(README.split())
    table = "table5_cifar10"
    (once, sent), (often, more) = (
        (mean("fedpft", table, row), mean("fedpft", table, row, "megabytes_up", 1.0))
        for row in ("fedpft_spherical_1", "fedavg")
    )
    assert f"one round of FedPFT sends {sent:.2f} MB and reaches {once:.3f}" in text
    assert f"20 rounds of FedAvg send {more:.2f} MB and reach {often:.3f}" in text
    assert 0 < often - once < 0.01
    assert f"comes within one point of 20 rounds of FedAvg and sends {more / sent:.0f} times fewer bytes" in text
