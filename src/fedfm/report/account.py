"""The sections on what happened: messages and who saw what, privacy, the manifest, details of the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedfm.core.text import finite, to_json
from fedfm.report import client_weights
from fedfm.report.page import code, details, note, table
from fedfm.report.read import RunFiles, Traffic, mapping, numeric, sequence
from fedfm.report.text import count, esc, number, plural, size, toml

_WAY = {"up": "client to server", "down": "server to client", "across": "client to client"}
_SEEN = {
    ("up", "plain"): "The server received {h} in the clear and could read what each client sent.",
    (
        "up",
        "masked",
    ): "The server received {h} masked: the masks cancel in the sum of the cohort, one client's part it cannot read.",
    (
        "up",
        "encrypted",
    ): "The server received {h} as ciphertext: it saw sizes and times; only a holder of the secret key can read it.",
    ("down", "plain"): "Clients received {h} in the clear and could read all of it.",
    ("down", "masked"): "Clients received {h} masked: they hold the masked values, not what is underneath.",
    ("down", "encrypted"): "Clients received {h} as ciphertext: only a holder of the secret key can read it.",
    ("across", "plain"): "Clients received {h} of other clients in the clear and could read all of it.",
    ("across", "masked"): "Clients received {h} of other clients masked.",
    (
        "across",
        "encrypted",
    ): "Clients received {h} of other clients as ciphertext: only a holder of the secret key can read it.",
}
_NEIGHBOURS = {
    "add_remove": "data sets that differ by one row more or less",
    "replace": "data sets that differ in one row, its label kept; the counts of classes are public",
    "replace_any": "data sets that differ in one row and its label",
}
_MEAN = "train."  # travels so when the server needs only a mean


def messages(run: RunFiles) -> str:
    """Bytes per message type, and what the receiver could read of them."""
    if not run.traffic:
        return note("No message has been recorded yet.")
    n = sum(t.messages for t in run.traffic)
    own = [t for t in run.traffic if t.counted]
    up, down = (sum(t.bytes for t in own if t.direction == way) for way in ("up", "down"))
    said = f"{plural(n, 'message')}. The method's own: {size(up)} up, {size(down)} down"
    across = sum(t.bytes for t in own if t.direction == "across")
    said += f", {size(across)} between clients." if across else "."
    rows = [
        [
            t.handler,
            _WAY[t.direction],
            t.form,
            count(t.messages),
            size(t.bytes),
            size(t.bytes / t.messages),
            str(t.clients),
            "yes" if t.counted else "no",
        ]
        for t in run.traffic
    ]
    head = ["handler", "direction", "form", "messages", "total", "mean", "clients", "counted"]
    listing = table(head, rows, "Messages by handler, direction and form", words=(1, 2))
    if any(not t.counted for t in run.traffic):
        listing += note("Not counted: the hello and evaluation, which are no part of the method's own cost.")
    sentences = "".join(f"<li>{_sentence(t)}</li>" for t in run.traffic)
    meaning = note(
        "In the clear means to the receiver; on a deployment TLS hides every message from whoever is on the way."
    )
    said += operations(run)
    return note(said) + listing + f'<h3>Who saw what</h3><ul class="plain">{sentences}</ul>{meaning}'


def operations(run: RunFiles) -> str:
    """A sentence on the clients' computation; nothing where the ledger does not count it."""
    found = mapping(mapping(run.manifest.get("ledger")).get("operations"))
    sample, each = numeric(found.get("macs_per_sample")), numeric(found.get("macs_per_client_round"))
    if sample is None or each is None:
        return ""
    said = f" Computation: {number(sample)} multiply-accumulates a sample forward, {number(each)} a client and round"
    said += " (median)."
    target, rounds = numeric(found.get("target_accuracy")), numeric(found.get("rounds_to_target"))
    if target is None:
        return said
    if rounds is None:
        return f"{said} Accuracy {number(target)} was not reached."
    tmac = numeric(found.get("tmac"))
    return f"{said} Accuracy {number(target)} was reached in round {count(int(rounds))}: TMAC = {number(tmac)}."


def _sentence(t: Traffic) -> str:
    handler = f"<code>{esc(t.handler)}</code>"
    said = _SEEN.get((t.direction, t.form))
    if said is None:
        return (
            f"{handler} crossed from {_WAY[t.direction]} in the form “{esc(t.form)}”, which this report does not know."
        )
    if (t.direction, t.form) == ("up", "plain") and t.handler.startswith(_MEAN):
        said += " The method asks only for their mean."
    return said.format(h=handler)


def privacy(run: RunFiles) -> str:
    """What is claimed, and what was spent of it."""
    ledger = mapping(run.manifest.get("ledger"))
    epsilon = numeric(run.result.get("epsilon", ledger.get("epsilon")))
    asked = mapping(run.experiment.get("privacy"))
    if epsilon is None:
        said = "No differential privacy is claimed for this run."
    else:
        unit, delta = asked.get("unit"), numeric(asked.get("delta"))
        said = f"Spent: epsilon = {number(epsilon)}" + (f" at delta = {number(delta)}" if delta is not None else "")
        said += f", unit: {unit}." if unit else "."
    entries = [mapping(e) for e in sequence(ledger.get("entries"))]
    if epsilon is not None:
        relations = dict.fromkeys(str(e["relation"]) for e in entries if e.get("relation") in _NEIGHBOURS)
        said += "".join(f" Neighbours: {_NEIGHBOURS[r]}." for r in relations)
        said += "".join(f" Mind: {note}." for note in dict.fromkeys(str(e["note"]) for e in entries if e.get("note")))
    keys = list(dict.fromkeys(k for e in entries for k in e))
    rows = [[str(i), *(_plain(e.get(k)) for k in keys)] for i, e in enumerate(entries, start=1)]
    listing = table(["entry", *map(str, keys)], rows, "Ledger", words=range(1, len(keys) + 1)) if rows and keys else ""
    return note(esc(said)) + (details(f"Ledger: {plural(len(rows), 'entry', 'entries')}", listing) if listing else "")


def manifest(run: RunFiles) -> str:
    """What it takes to run it again."""
    m = run.manifest
    facts: list[list[str]] = [["directory", run.path.resolve().name], ["created", _plain(m.get("created"))]]
    facts += [["finished", _plain(m.get("finished"))], ["fedfm", _plain(m.get("fedfm"))]]
    for part in ("versions", "machine", "fingerprints"):
        facts += [[f"{part}: {k}", _plain(v)] for k, v in mapping(m.get(part)).items()]
    if run.result.get("params_sha256"):
        facts.append(["params_sha256", _plain(run.result["params_sha256"])])
    text = toml(run.experiment)
    said = note("The experiment with every default filled in, as <code>fedfm check</code> prints it.")
    return said + code(text, "Experiment") + table(["what", "value"], facts, "Versions and fingerprints", words=(1,))


def result(run: RunFiles) -> str:
    """The remaining fields of the result line."""
    if not run.result:
        return note("The run has no result line yet.")
    shown = ("balanced_accuracy", "macro_f1", "loss", "perplexity", "engine", "seed", "run", "params_sha256")
    rows = [[k, _plain(run.result[k])] for k in shown if k in run.result]
    rows += [[f"details: {k}", _plain(v)] for k, v in mapping(run.result.get("details")).items()]
    known = {*shown, "details", "client_accuracy", "excluded", "method", "rounds", "seconds", "epsilon", "accuracy"}
    known |= {"global_accuracy", "local_accuracy", "bytes_up", "bytes_down"}
    rows += [[k, _plain(v)] for k, v in run.result.items() if k not in known]
    line = code(json.dumps(finite(run.result), indent=2, ensure_ascii=False, sort_keys=True), "Result line as JSON")
    return table(["field", "value"], rows, "Fields of the result", words=(1,)) + details(
        "The whole result as JSON", line
    )


def share_box(run: RunFiles) -> str:
    """What must not leave the place where the run lies; the report itself tells something too."""
    items = [str(s) for s in sequence(run.manifest.get("do_not_share"))]
    counted = "" if run.experiment.get("privacy") else " and shows their rows per class"
    items.append(f"This report names the clients{counted}; ask them before passing it on.")
    if (run.path / client_weights.FILE).exists():
        items.append("Its map of who learns from whom says whose rows resemble whose, and audit.json names the pairs.")
    body = "".join(f"<li>{esc(s)}</li>" for s in items)
    title = "What must not be shared"
    return f'<aside id="share" aria-label="{title}"><strong>{title}</strong><ul>{body}</ul></aside>'


def _plain(value: Any) -> str:
    if value is None:
        return number(None)
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping | list):
        text = to_json(value)
        return text if len(text) < 4000 else text[:4000] + " … (whole in manifest.json)"
    return str(value)
