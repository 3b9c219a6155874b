"""The section about a FedPFT run: sent bytes, bytes by the paper's formulas, withheld classes, bound and noise."""

from __future__ import annotations

from typing import Any

from fedfm.core.metric_names import GLOBAL_ACCURACY
from fedfm.reports.page import aside, details, figure, note, table
from fedfm.reports.read import RunFiles, mapping, numeric, sequence
from fedfm.reports.svg import Series, lines
from fedfm.reports.text import count, number, percent, plural, size


def section(run: RunFiles) -> str:
    """The section; empty for other methods."""
    info = mapping(run.result.get("details"))
    if "formula_bytes" not in info:
        return ""
    warnings = [*sequence(info.get("warnings")), *(f"Excluded: {d}" for d in sequence(info.get("dropped")))]
    hidden = mapping(run.experiment.get("method")).get("counts") == "withheld"
    parts = [_bytes(run, info), aside("Warnings", warnings), _bound(run, info), _along(info), _noise(info)]
    return "".join([*parts, _components(info, hidden)])


def _bytes(run: RunFiles, info: Any) -> str:
    formula = "by equations (10) to (12)" if "components_used" in info else "sums of every class, without headers"
    sent = "sent by the clients, with headers, labels and counts"
    if "chain_accuracy" in info:
        sent += ", and every client's head"
    if {"bound", "verified_error"} & info.keys():
        sent += ", and the messages of the bound or of the count of errors"
    rows = [[formula, size(numeric(info.get("formula_bytes")))], [sent, size(run.traffic_total("up"))]]
    if "raw_feature_bytes" in info:
        rows.append(["raw features, for comparison", size(numeric(info.get("raw_feature_bytes")))])
    return table(["mixtures", "bytes"], rows, "What was sent")


def _bound(run: RunFiles, info: Any) -> str:
    found, verified = mapping(info.get("bound")), numeric(info.get("verified_error"))
    if not found and verified is None:
        return ""
    rows = []
    if found:
        rows = [
            [
                "our bound on the 0-1 loss (Theorem 4.2, corrected; smoothed features, 95 % confidence)",
                number(numeric(found.get("ours"))),
            ],
            ["the bound as printed", number(numeric(found.get("printed")))],
            ["loss on fresh synthetic draws, 97.5 % upper limit", percent(numeric(found.get("synthetic_loss")))],
        ]
    if verified is not None:
        rows.append(["counted by the clients on their own training rows", percent(verified)])
    accuracy = run.value(GLOBAL_ACCURACY)
    rows.append(["true loss on the global test rows", percent(None if accuracy is None else 1 - accuracy)])
    vacuous = "The bound is vacuous: it is not below 1 and says nothing about this head."
    listing = table(["of the head", "value"], rows, "Bounds") + (note(vacuous) if found.get("vacuous") else "")
    return f"<h3>What the server can conclude</h3>{listing}"


def _along(info: Any) -> str:
    values = [numeric(v) for v in sequence(info.get("chain_accuracy"))]
    if not values:
        return ""
    rows = [[str(n), percent(v)] for n, v in zip(sequence(info.get("order")), values, strict=False)]
    label = "Accuracy of each client's head on the global test rows, in the order of the chain: "
    label += ", ".join(map(" ".join, rows)) + "."
    series = [Series("head", [(float(i), v) for i, v in enumerate(values, start=1)])]
    draw = figure(lambda w: lines(w, series, label, percent, within=(0.0, 1.0), x_label="place in the chain"))
    return "<h3>Heads along the chain</h3>" + draw + details("All heads", table(["client", "accuracy"], rows, "Heads"))


def _noise(info: Any) -> str:
    if "noise_std_of_sums" not in info:
        return ""
    rows = [["standard deviation of the noise on each sum", number(numeric(info["noise_std_of_sums"]))]]
    if "cells" in info:
        cells = f"{count(info['cells_kept'])} of {count(info['cells'])}"
        rows.append(["cells (client and class) above the noise", cells])
    if "left_out_rows" in info:
        left = f"{count(info['left_out_rows'])}, standard deviation {number(numeric(info['left_out_rows_std']))}"
        rows.append(["rows of the other cells, by their noisy counts", left])
    if info.get("times_paper_noise") is not None:
        rows.append(["the paper's own noise is larger by a factor of", number(numeric(info["times_paper_noise"]))])
    return "<h3>Noise</h3>" + table(["private release", "value"], rows, "Noise")


def _components(info: Any, hidden: bool) -> str:
    used, withheld = mapping(info.get("components_used")), mapping(info.get("withheld"))
    text = _withheld_note(info, withheld, hidden)
    if not used:
        return text
    rows = []
    for client in sorted(used):
        k = [int(v) for v in mapping(used[client]).values()]
        missing = "not disclosed" if hidden else count(len(sequence(withheld.get(client))))
        rows.append([client, count(len(k)), count(sum(k)), f"{min(k)} to {max(k)}" if k else "", missing])
    head = ["client", "classes sent", "components", "K per class", "classes withheld"]
    return text + details("Components of every client", table(head, rows, "Components"))


def _withheld_note(info: Any, withheld: Any, hidden: bool) -> str:
    if hidden:
        return note(
            "Counts are withheld: clients disclose neither which classes they withhold nor how many rows. An absent "
            "class has fewer rows than min_count; each of several components represents at least ten rows."
        )
    total = numeric(info.get("withheld_classes")) or sum(len(sequence(v)) for v in withheld.values())
    if not total:
        return ""
    rows = numeric(info.get("withheld_rows"))
    of = "" if rows is None else f", {plural(int(rows), 'row')} in all,"
    return note(f"{plural(int(total), 'class', 'classes')} of single clients{of} withheld (too few examples).")
