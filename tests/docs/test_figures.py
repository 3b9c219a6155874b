"""Every figure of the README and of the table of results is that of the page whose command stands with it."""

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README, RESULTS = ((ROOT / p).read_text(encoding="utf-8") for p in ("README.md", "docs/results/index.md"))
EPYC, XEON = "AMD EPYC", "Intel(R) Xeon(R) Processor"


def page(name):
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def mean(name, table, row, key="accuracy", scale=0.01):
    """Over the seeds."""
    return scale * statistics.fmean(kept[key] for kept in page(name)[table]["rows"][row].values())


def goals(benchmark, cpu):
    """What was measured, in the order of the page."""
    return [goal["measured"] for goal in page("performance")[benchmark][cpu]["goals"]]


def fedpft():
    table = "table5_cifar10"
    pairs = [(mean("fedpft", table, row), mean("fedpft", table, row, "megabytes_up", 1.0)) for row in FEDPFT]
    said = [f"{accuracy:.3f} for {megabytes:.2f} MB" for accuracy, megabytes in pairs]
    return f"{', '.join(said)}; " + "; ".join(
        f"{mean('fedpft', table, row):.3f}" for row in ("fedpft_private_eps1", "centralised")
    )


FEDPFT = ("fedpft_diag_10", "fedpft_spherical_1")


def fedbaf():
    rows = ("fedbaf_psi_1.iid", "none.iid", "weight_init.iid")
    return "; ".join(f"{mean('fedbaf', 'table3', row):.3f}" for row in rows)


def own(row):
    return f"{mean('fedbip', 'vision', row, 'own'):.3f}"


def fedbip():
    shared = f"{mean('fedbip', 'vision', 'fedavg.contradict', 'start'):.3f}"
    groups = [mean("fedbip", "oracle", f"fedavg.contradict_{group}", "own") for group in ("plain", "turned")]
    first = [own(f"{m}.contradict") for m in ("fedbip", "local", "fedavg")]
    rest = [own(f"{m}.contradict") for m in ("fedamp", "fedala")]
    return f"{'; '.join(first)}, {shared}; {'; '.join(rest)}; {statistics.fmean(groups):.3f}"


def lora():
    epyc, xeon = ([*goals("lora", cpu), *goals("lora_last_layers", cpu)] for cpu in (EPYC, XEON))
    last = "; bf16 {:.1f}; in the last two layers {:.0f}. Intel Xeon without AMX: {:.1f}; bf16 {:.1f}; {:.1f}"
    return f"AMD EPYC: {epyc[0]:.1f} times faster" + last.format(*epyc[1:], *xeon)


def flower_lora():
    epyc, xeon = goals("flower_lora", EPYC), goals("flower_lora", XEON)
    return f"AMD EPYC: {epyc[0]:.1f} times faster; bf16 {epyc[1]:.1f}. Intel Xeon: {xeon[0]:.1f}; {xeon[1]:.1f}"


def extraction():
    found = [f"{statistics.fmean(run['all'] for run in page('fedbaf-secrecy')['as printed']['IID']):.0e}"]
    return found[0].replace("e-0", "e-")


def mixtures():
    a, b, c = goals("mixtures", XEON)[:3]
    return f"{a:.0f}, {b:.1f}, {c:.1f} times faster"


def messages():
    nothing, floats = goals("messages", XEON)
    return f"{nothing:.0f} microseconds of CPU, a million floats {floats:.0f};"


def twin():
    """The mean of the held-out differences by their rows, and its standard error: independent sets."""
    kinds = [(p["rows"], p) for of in page("blindfed-twin").values() for k, p in of.items() if k in HELD_OUT]
    n = sum(rows for rows, _ in kinds)
    assert f"{n:,} held-out" in RESULTS
    mean_of = sum(rows * p["difference"] for rows, p in kinds) / n
    error = sum((rows * p["error"]) ** 2 for rows, p in kinds) ** 0.5 / n
    return f"{abs(mean_of):.1f}, {error:.1f}"


HELD_OUT = ("held_out", "jpeg", "unseen")

FIGURES = {
    "python benchmarks/run.py --only lora lora_last_layers": lora,
    "python benchmarks/run.py --only flower_lora": flower_lora,
    "python reproduce/run.py fedpft --only table5_cifar10": fedpft,
    "python reproduce/run.py fedbaf --only table3": fedbaf,
    "python reproduce/run.py fedbip --only vision oracle": fedbip,
    "python reproduce/run.py fedbip --only vision": lambda: f"{own('fedbip.domains')}; {own('local.domains')}",
    "python reproduce/fedbaf/extraction.py": extraction,
    "python reproduce/blindfed/twin.py": twin,
    "python benchmarks/run.py --only mixtures": mixtures,
    "python benchmarks/run.py --only messages": messages,
}


def rows():
    """Command -> figure, of the table of results."""
    return {command: figure for figure, command in re.findall(r"^\| .* \| (.*) \| `(.*)` \|$", RESULTS, re.M)}


@pytest.mark.parametrize("command", FIGURES)
def test_a_figure_is_that_of_its_page(command):
    assert rows()[command].startswith(FIGURES[command]())


def test_each_row_is_checked_or_printed_by_the_demo():
    assert rows().keys() - FIGURES.keys() == {"make demo"}
    printed = dict(re.findall(r"^(fedavg\S*) +fedavg +(\S+)", RESULTS, re.M))
    said = [f"{float(printed[run]):.3f}" for run in ("fedavg", "fedavg-random-weights")]
    assert rows()["make demo"] == ", ".join(said)


def test_the_text_under_the_table_has_the_figures_of_the_page():
    text = " ".join(RESULTS.split())
    heads, workers = goals("heads", XEON), goals("workers", XEON)
    one, five = [heads[i] for i in (0, 1, 3, 4)], [heads[i] for i in (2, 5)]
    assert f"{min(five):.0f} to {max(five):.0f} times faster than a plain loop over five epochs" in text
    assert f"and {min(one):.1f} to {max(one):.1f} times over one" in text
    assert f"are {min(heads[9:]):.0f} to {max(heads[9:]):.0f} times faster than Ray's messages alone" in text
    assert "with digits {:.0f}, {:.0f} and {:.0f} times".format(*heads[6:9]) in text
    assert f"train heads {workers[1]:.1f} times as fast as one if a client takes half a millisecond" in text
    assert f"and {workers[2]:.1f} times if it takes two milliseconds (goal: 1.8). LoRA reaches {workers[0]:.1f}" in text


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
