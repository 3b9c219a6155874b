"""Sections of the report: messages and who saw what, privacy, the manifest, and details of the result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fedfm.core.metric_names import GLOBAL_ACCURACY, LOCAL_ACCURACY
from fedfm.core.text import finite, to_json
from fedfm.core.toml_text import to_toml
from fedfm.reports.page import MOST_ROWS, aside, code, details, note, table
from fedfm.reports.plain_words import present, reading
from fedfm.reports.read import WEIGHTS, RunFiles, mapping, numeric, sequence
from fedfm.reports.text import count, esc, number, plural, size
from fedfm.runtime.exposure import MEAN, SERVER, Traffic

_WAY = {"up": "client to server", "down": "server to client", "across": "client to client"}
_RECEIVED = {"up": "The server received {h}", "down": "Clients received {h}"}
_RECEIVED["across"] = _RECEIVED["down"] + " of other clients"
_KEY = " as ciphertext: only a holder of the secret key can read it"
_READ = {
    ("up", "plain"): " in the clear and could read what each client sent.",
    (
        "up",
        "masked",
    ): " masked, and the masks cancel in the sum over the cohort; the server cannot read one client's part.",
    ("up", "encrypted"): f"{_KEY}; the server saw sizes and times.",
    ("down", "plain"): " in the clear and could read all of it.",
    ("down", "masked"): " masked: they could read only the masked values.",
    ("down", "encrypted"): f"{_KEY}.",
    ("across", "plain"): " in the clear and could read all of it.",
    ("across", "masked"): " masked.",
    ("across", "encrypted"): f"{_KEY}.",
}
_NEIGHBOURS = {
    ("record", "add_remove"): " Neighbours: data sets that differ by one row more or less.",
    ("record", "replace"): " Neighbours: data sets that differ in one row with the same label; the counts of classes "
    "are public.",
    ("record", "replace_any"): " Neighbours: data sets that differ in one row and its label.",
    ("client", "add_remove"): " Neighbours: federations that differ by one client more or less.",
    ("client", "replace"): " Neighbours: federations that differ in all rows of one client.",
}
_RATES = (1e5, 1e6, 1e7)  # bytes per second of a client's link
_CLASSES = ("confusion", "class_counts")  # fields of the result that the section about classes shows
_FORMS = ("plain", "masked", "encrypted")


def messages(run: RunFiles) -> str:
    """Bytes by kind of message, and what the receivers could read."""
    if not run.exposure.traffic:
        return note("No message has been recorded yet.")
    n = sum(t.messages for t in run.exposure.traffic)
    own = [t for t in run.exposure.traffic if t.counted]
    up, down, across = (sum(t.bytes for t in own if t.direction == way) for way in _WAY)
    text = f"{plural(n, 'message')}. The method's own messages: {size(up)} up, {size(down)} down"
    text += f", {size(across)} between clients." if across else "."
    rows = [
        [
            t.handler,
            _WAY[t.direction],
            t.form,
            count(t.messages),
            size(t.bytes),
            size(t.bytes / t.messages),
            " / ".join(f"{t.bytes / t.messages / rate:.2g}" for rate in _RATES),
            str(t.clients),
            "yes" if t.counted else "no",
        ]
        for t in run.exposure.traffic
    ]
    head = ["handler", "direction", "form", "messages", "total", "mean", "seconds", "clients", "counted"]
    listing = table(head, rows, "Messages by handler, direction and form", words=(1, 2))
    listing += note("Seconds: time of an average message on a client's link of 0.1, 1 and 10 MB/s.")
    if any(not t.counted for t in run.exposure.traffic):
        listing += note(
            "Not counted: hello and evaluation, and messages with which one program trains several clients."
        )
    sentences = "".join(f"<li>{_sentence(t)}</li>" for t in run.exposure.traffic)
    meaning = note("In the clear: the receiver can read it. In a deployment TLS hides every message from all others.")
    listing += f'<h3>Who saw what</h3><ul class="plain">{sentences}</ul>{note(esc(smallest_sum(run)))}{meaning}'
    return note(text + _operations(run)) + listing + _traffic_by_form(run)


def smallest_sum(run: RunFiles) -> str:
    """A sentence about the smallest number of clients in a sum that the server saw."""
    least = run.exposure.smallest_sum
    if least == 1:
        return "The smallest sum that the server saw has 1 update: it could read what each client sent."
    if least is not None:
        return f"The smallest sum that the server saw has {count(least)} updates; it read no single client's update."
    replies = any(t.direction == "up" and t.form == "masked" for t in run.exposure.traffic)
    return "This log does not say how many updates are in each sum." if replies else "The server could read no update."


def _traffic_by_form(run: RunFiles) -> str:
    """Bytes that the server and each client received in each form, in a folded section."""
    receivers = sorted(run.exposure.received.items(), key=lambda item: (item[0] != SERVER, item[0]))
    forms = [*_FORMS, *sorted({form for _, by in receivers for form in by} - {*_FORMS})]
    rows = [[name, *(size(by[form]) if form in by else "" for form in forms)] for name, by in receivers]
    listing = table(["receiver", *forms], rows, "Bytes that each receiver got, by form")
    return details(f"Bytes of each of {plural(len(rows), 'receiver')}", listing)


def _operations(run: RunFiles) -> str:
    """A sentence about the clients' computation; empty if the ledger has no figures about it."""
    found = mapping(mapping(run.manifest.get("ledger")).get("operations"))
    sample, each = numeric(found.get("macs_per_sample")), numeric(found.get("macs_per_client_round"))
    if sample is None or each is None:
        return ""
    text = (
        f" Computation: {number(sample)} multiply-accumulates in a sample's forward pass, {number(each)} per client "
        "and round"
    )
    text += " (median)."
    target, rounds = numeric(found.get("target_accuracy")), numeric(found.get("rounds_to_target"))
    if target is None:
        return text
    if rounds is None:
        return f"{text} Accuracy {number(target)} was not reached."
    tmac = numeric(found.get("tmac"))
    return f"{text} Accuracy {number(target)} was reached in round {count(int(rounds))}: TMAC = {number(tmac)}."


def _sentence(t: Traffic) -> str:
    handler = f"<code>{esc(t.handler)}</code>"
    if (t.direction, t.form) not in _READ:
        return f"{handler} went from {_WAY[t.direction]} in the unknown form “{esc(t.form)}”."
    text = _RECEIVED[t.direction].format(h=handler) + _READ[t.direction, t.form]
    averaged = (t.direction, t.form) == ("up", "plain") and t.handler.startswith(MEAN)
    return text + " The method asks only for their mean." * averaged


def privacy(run: RunFiles) -> str:
    """The differential privacy that the run claims, and the ledger of its releases."""
    ledger = mapping(run.manifest.get("ledger"))
    entries = [mapping(e) for e in sequence(ledger.get("entries"))]
    text, listed = privacy_claim(run)
    assumed = "".join(f"<li>{esc(line)}</li>" for line in listed)
    head = (
        note(esc(text))
        + (note(esc(plain)) if (plain := reading(run)) else "")
        + (f'{note("It assumes:")}<ul class="plain">{assumed}</ul>' if listed else "")
    )
    keys = list(dict.fromkeys(k for e in entries for k in e))
    if not keys:
        return head
    rows = [[str(i), *(_plain(e.get(k)) for k in keys)] for i, e in enumerate(entries, start=1)]
    listing = table(["entry", *map(str, keys)], rows, "Ledger", words=range(1, len(keys) + 1))
    return head + details(f"Ledger: {plural(len(rows), 'entry', 'entries')}", listing)


def privacy_claim(run: RunFiles) -> tuple[str, list[str]]:
    """The differential privacy that the run claims, as a sentence, and the assumptions of the claim."""
    found = run.guarantee
    if found is None:
        return "No differential privacy is claimed for this run.", []
    epsilon, delta = numeric(found["epsilon"]), numeric(found["delta"])
    text = f"Spent: epsilon = {number(math.inf if epsilon is None else epsilon)}"
    text += f" at delta = {number(delta)}" if delta is not None else ""
    text += f", unit: {found['unit']}." if found["unit"] else "."
    text += _NEIGHBOURS.get((found["unit"], found["relation"]), "")
    text += "".join(f" Note: {line}." for line in found["notes"])
    return text, list(map(str, found["assumptions"]))


def manifest(run: RunFiles) -> str:
    """The experiment, versions and fingerprints, which somebody needs to repeat the run."""
    m = run.manifest
    facts: list[list[str]] = [["directory", run.path.resolve().name], ["created", _plain(m.get("created"))]]
    facts += [["finished", _plain(m.get("finished"))], ["fedfm", _plain(m.get("fedfm"))]]
    for part in ("versions", "machine", "fingerprints"):
        facts += [[f"{part}: {k}", _plain(v)] for k, v in mapping(m.get(part)).items()]
    if run.result.get("params_sha256"):
        facts.append(["params_sha256", _plain(run.result["params_sha256"])])
    text = note("The experiment with every default filled in, as <code>fedfm check</code> prints it.")
    experiment = dict(run.experiment)
    if run.silos_own_rows:
        experiment["data"] = {k: v for k, v in mapping(experiment.get("data")).items() if k != "partition"}
    listing = table(["what", "value"], facts, "Versions and fingerprints", words=(1,))
    return text + code(to_toml(experiment), "Experiment") + listing


def result(run: RunFiles) -> str:
    """Fields of the result line that no other section shows."""
    if not run.result:
        return note("The run has no result line yet.")
    shown = ("balanced_accuracy", "macro_f1", "loss", "perplexity", "engine", "seed", "run", "params_sha256")
    rows = [[k, _plain(run.result[k])] for k in shown if k in run.result]
    rows += [[f"details: {k}", _plain(v)] for k, v in mapping(run.result.get("details")).items() if k not in _CLASSES]
    known = {*shown, "details", "client_accuracy", "excluded", "method", "rounds", "seconds", "epsilon", "accuracy"}
    known |= {GLOBAL_ACCURACY, LOCAL_ACCURACY, "bytes_up", "bytes_down"}
    rows += [[k, _plain(v)] for k, v in run.result.items() if k not in known]
    text = json.dumps(_without_long_tables(finite(run.result)), indent=2, ensure_ascii=False, sort_keys=True)
    listing = table(["field", "value"], rows, "Fields of the result", words=(1,))
    return listing + details("The complete result as JSON", code(text, "Result line as JSON"))


def _without_long_tables(value: Any) -> Any:
    """The result, with the number of entries in place of a table of very many clients."""
    if isinstance(value, dict) and len(value) > MOST_ROWS:
        return f"{count(len(value))} entries, which manifest.json has"
    return {k: _without_long_tables(v) for k, v in value.items()} if isinstance(value, dict) else value


def share_box(run: RunFiles) -> str:
    """A box that lists which files of the run, and which facts in this report, must not be shared."""
    items = [text for s in sequence(run.manifest.get("do_not_share")) if (text := present(run, str(s)))]
    private, part = run.experiment.get("privacy"), mapping(run.manifest.get("split"))
    read = part.get("clients") or part.get("sample")
    counted = " and shows their rows per class" if read and not private else ""
    items.append(f"This report names the clients{counted}; ask them before you share it.")
    if (run.path / WEIGHTS).exists():
        items.append(
            "The map of who learns from whom shows which clients have similar rows, and audit.json names the pairs."
        )
    return aside("What must not be shared", items, ' id="share"')


def _plain(value: Any) -> str:
    if value is None:
        return number(None)
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping | list):
        text = to_json(value)
        return text if len(text) < 4000 else text[:4000] + " … (complete in manifest.json)"
    return str(value)
