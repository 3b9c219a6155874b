"""What a FedPFT run says of itself: bytes by the formulas, what was withheld, the bound, the noise."""

from __future__ import annotations

from typing import Any

from fedfm.report.page import details, figure, note, table
from fedfm.report.read import RunFiles, mapping, numeric, sequence
from fedfm.report.svg import Series, lines
from fedfm.report.text import count, esc, number, percent, plural, size


def section(run: RunFiles) -> str:
    """Empty for other methods."""
    told = mapping(run.result.get("details"))
    if "formula_bytes" not in told:
        return ""
    parts = [_bytes(run, told), _warnings(told), _bound(run, told), _along(told), _noise(told)]
    return "".join(
        [*parts, _components(told, hidden=mapping(run.experiment.get("method")).get("counts") == "withheld")]
    )


def _bytes(run: RunFiles, told: Any) -> str:
    rows = [
        [
            "by equations (10) to (12)" if "components_used" in told else "sums of every class, without headers",
            size(numeric(told.get("formula_bytes"))),
        ],
        [
            "really sent up: also headers, labels and counts"
            + (", and every client's head" if "chain_accuracy" in told else "")
            + (", and what the bound or a count of errors takes" if {"bound", "verified_error"} & told.keys() else ""),
            size(run.traffic_total("up")),
        ],
    ]
    if "raw_feature_bytes" in told:
        rows.append(["the raw features would be", size(numeric(told.get("raw_feature_bytes")))])
    return table(["mixtures", "bytes"], rows, "What was sent")


def _warnings(told: Any) -> str:
    items = [esc(str(w)) for w in sequence(told.get("warnings"))]
    items += [f"Left out: {esc(str(d))}" for d in sequence(told.get("dropped"))]
    if not items:
        return ""
    return (
        f'<aside aria-label="Warnings"><strong>Mind</strong><ul>{"".join(f"<li>{i}</li>" for i in items)}</ul></aside>'
    )


def _bound(run: RunFiles, told: Any) -> str:
    found, verified = mapping(told.get("bound")), numeric(told.get("verified_error"))
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
    accuracy = run.value("global_accuracy")
    rows.append(["true loss on the global test rows", percent(None if accuracy is None else 1 - accuracy)])
    said = (
        note("The bound is vacuous: it is not below 1 and says nothing about this head.")
        if found.get("vacuous")
        else ""
    )
    return "<h3>What the server can conclude</h3>" + table(["of the head", "value"], rows, "Bounds") + said


def _along(told: Any) -> str:
    values = [numeric(v) for v in sequence(told.get("chain_accuracy"))]
    if not values:
        return ""
    names = [str(n) for n in sequence(told.get("order"))]
    label = "Accuracy of each client's head on the global test rows, along the way: "
    label += ", ".join(f"{n} {percent(v)}" for n, v in zip(names, values, strict=False)) + "."
    series = [Series("head", [(float(i), v) for i, v in enumerate(values, start=1)])]
    draw = figure(lambda w: lines(w, series, label, percent, within=(0.0, 1.0), x_label="client along the way"))
    rows = [[n, percent(v)] for n, v in zip(names, values, strict=False)]
    return "<h3>Along the way</h3>" + draw + details("All heads", table(["client", "accuracy"], rows, "Heads"))


def _noise(told: Any) -> str:
    if "noise_std_of_sums" not in told:
        return ""
    rows = [
        ["standard deviation of the noise on each sum", number(numeric(told.get("noise_std_of_sums")))],
    ]
    if "cells" in told:
        cells = f"{count(told['cells_kept'])} of {count(told['cells'])}"
        rows.append(["cells (client and class) that stand out of the noise", cells])
    if "left_out_rows" in told:
        left = f"{count(told['left_out_rows'])}, standard deviation {number(numeric(told['left_out_rows_std']))}"
        rows.append(["rows of the other cells, by their noisy counts", left])
    if told.get("times_paper_noise") is not None:
        rows.append(["the paper's own noise is larger by a factor of", number(numeric(told["times_paper_noise"]))])
    return "<h3>Noise</h3>" + table(["private release", "value"], rows, "Noise")


def _components(told: Any, hidden: bool) -> str:
    used, withheld = mapping(told.get("components_used")), mapping(told.get("withheld"))
    said = _withheld(told, withheld, hidden)
    if not used:
        return said
    rows = []
    for client in sorted(used):
        k = [int(v) for v in mapping(used[client]).values()]
        missing = "not told" if hidden else count(len(sequence(withheld.get(client))))
        rows.append([client, count(len(k)), count(sum(k)), f"{min(k)} to {max(k)}" if k else "", missing])
    head = ["client", "classes sent", "components", "K per class", "classes withheld"]
    return said + details("Components of every client", table(head, rows, "Components"))


def _withheld(told: Any, withheld: Any, hidden: bool) -> str:
    if hidden:
        return note(
            "Counts are withheld: clients tell neither which classes they hold back nor how many rows these have. A "
            "class that is absent has fewer rows than min_count; several components stand for at least ten rows each."
        )
    total = numeric(told.get("withheld_classes")) or sum(len(sequence(v)) for v in withheld.values())
    if not total:
        return ""
    rows = numeric(told.get("withheld_rows"))
    of = "" if rows is None else f", {plural(int(rows), 'row')} in all,"
    return note(f"{plural(int(total), 'class', 'classes')} of single clients{of} withheld for having too few examples.")
