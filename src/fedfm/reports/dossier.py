"""``dossier.html``: one printable page about a run, for a data protection officer.

Its sections follow sections 3.2 to 3.4 of an opinion of the European Data Protection Board: Opinion 28/2024 on certain
data protection aspects related to the processing of personal data in the context of AI models (17 December 2024).
The statements come from the run's files. The controller (the GDPR's term) fills in the empty lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfm.audits.finding import cells
from fedfm.errors import InputError
from fedfm.reports import html
from fedfm.reports.account import privacy_claim, smallest_sum
from fedfm.reports.audit import findings, is_outdated
from fedfm.reports.own_models import newcomers_of, own_models
from fedfm.reports.page import note, page, save, table
from fedfm.reports.plain_words import reading
from fedfm.reports.read import DOSSIER, RunFiles, mapping, numeric, read, sequence
from fedfm.reports.text import count, esc, plural, size

Fact = tuple[str, str | None]  # (label, text); if the text is None, the page has an empty line to fill in

FILE = DOSSIER
_MOST = 8  # largest number of rows of a table, so that the dossier has one or two pages
# For each kind of attack in the opinion: how the names of this library's findings on such attacks begin.
_KINDS = {
    "membership inference": (
        "membership",
        "expert_membership",
        "model_membership",
        "departure",
        "update_membership",
        "task_vector.membership",
    ),
    "attribute inference": ("label_counts", "task_vector.labels", "task_vector.shares", "task_vector.neighbours"),
    "exfiltration": (),
    "regurgitation of training data": ("regurgitation", "text_canaries"),
    "model inversion": ("inversion",),
    "reconstruction": ("reconstruction", "single_holder", "head_rows"),
}
_OTHER = "other"
_NUMBERS = re.compile(r" \([^()]*: (?:yes|no)\)")  # matches the numbers in a rule of fedfm.audits.finding
_ORDER = ("leaks", "inconclusive", "holds")


def write(run_dir: Path, unfit: str = "") -> Path:
    """Write ``dossier.html`` into a run's directory; the same files give the same bytes.

    Args:
        unfit: why no attack of this library applies to the run; "" if an attack applies.

    Raises:
        InputError: the manifest is missing or invalid, or the run is not finished.
    """
    run = read(run_dir)
    if not run.is_finished:
        raise InputError(f"{run_dir} is not finished; run `fedfm resume {run_dir}` first")
    found = findings(run) or []
    parts = [
        ("purpose", "1 Purpose and roles", _purpose(run)),
        ("design", "2 Design of the model", _design(run)),
        ("analysis", "3 Analysis of the model", _analysis(run)),
        ("attacks", "4 Tests, and resistance to attacks", _attacks(run, found, unfit)),
        ("risk", "5 Remaining risk", _risk(run, found)),
        ("documents", "6 Documentation", _documents(run)),
        ("interest", "7 Legitimate interest, where it is the legal basis", _interest()),
        ("unlawful", "8 If data were processed unlawfully", _unlawful()),
        ("signed", "Completed by", _facts([("Name, role, date, signature", None)])),
    ]
    version = esc(run.manifest.get("fedfm") or "")
    head = f'<p class="eyebrow">fedfm {version} · dossier for the data protection officer</p><h1>{esc(run.name)}</h1>'
    head += f"<p>{html.sentence(run)}</p>"
    head += note(
        "The sections follow the European Data Protection Board’s opinion 28/2024 on AI models. Texts are taken from "
        "the files of the run. The controller fills in the empty lines, which the files cannot answer. This page is "
        "not a legal assessment."
    )
    foot = f"Written by fedfm {version} from manifest.json, metrics.jsonl, messages.jsonl and audit.json of this run."
    return save(page(f"{run.name} · dossier", head, parts, foot, kind="dossier"), Path(run_dir) / FILE)


def _facts(rows: Sequence[Fact]) -> str:
    blank = '<dd class="blank" contenteditable="true" role="textbox" aria-label="{}: to be filled in"></dd>'
    cell = (blank.format(esc(what)) if text is None else f"<dd>{esc(text)}</dd>" for what, text in rows)
    return f'<dl class="facts">{"".join(f"<dt>{esc(w)}</dt>{c}" for (w, _), c in zip(rows, cell, strict=True))}</dl>'


def _purpose(run: RunFiles) -> str:
    model = mapping(run.experiment.get("model"))
    clients = sequence(run.manifest.get("clients"))
    named = f": {', '.join(map(str, clients))}" if len(clients) <= _MOST else ""
    return _facts(
        [
            ("Purpose of the model", None),
            ("Controllers and processors", None),
            ("Persons whose data these are; categories", None),
            ("Model and task", f"{model.get('name')}; {model.get('task') or 'the task that the data imply'}"),
            ("Parties", f"{plural(len(clients), 'client')}{named}; one server"),
            ("Run", f"begun {run.manifest.get('created')}, finished {run.manifest.get('finished')}"),
        ]
    )


def _design(run: RunFiles) -> str:
    e = run.experiment
    data, model, method = (mapping(e.get(key)) for key in ("data", "model", "method"))
    adaptation, aggregation = mapping(model.get("adaptation")), mapping(e.get("aggregation"))
    source = next((f"{key} = {data[key]}" for key in ("name", "path", "hub") if data.get(key)), "each client's own")
    known = mapping(mapping(run.manifest.get("split")).get("sums")) or _split(run)
    each = [known] if "clients" in known else known.values()  # sums of very many clients, or the counts of each
    rows = [numeric(mapping(mapping(c).get("train")).get("rows")) for c in each]
    counted = f"{count(int(sum(r for r in rows if r)))} training rows" if rows else "not in the manifest"
    if e.get("privacy") and not rows:
        counted = "kept in private/data.json, because this run states an epsilon or hides updates"
    limit = f"; at most {data['limit']} rows were taken" if data.get("limit") else ""
    how = str(adaptation.get("name") or "none")
    decay = numeric(mapping(method.get("local")).get("weight_decay"))
    epsilon, assumed = privacy_claim(run)
    body = "<h3>Selection of sources</h3>"
    body += _facts([("Source", source), ("Why these sources; special categories; scraped data", None)])
    body += "<h3>Preparation and minimisation</h3>"
    body += _facts([("Rows", counted + limit), ("Pseudonymisation, filters, relevance of each field", None)])
    body += "<h3>Choices in training</h3>"
    body += _facts(
        [
            ("Method", f"{run.method}, {plural(run.done_rounds, 'round')}; adaptation: {how}"),
            ("Aggregation", f"{aggregation.get('name') or 'mean'}. {smallest_sum(run)}"),
            (
                "Differential privacy",
                " ".join([epsilon, reading(run), *(["It assumes:", *assumed] if assumed else [])]),
            ),
            *([("Regularisation", f"weight_decay = {decay:g}")] if decay is not None else []),
        ]
    )
    body += f"<h3>Data that left the clients</h3>{_outbound_data(run)}"
    body += "<h3>Measures on the outputs</h3>"
    return body + _facts([("Filters, access control, limits on queries", None)])


def _split(run: RunFiles) -> Any:
    return mapping(mapping(run.manifest.get("split")).get("clients"))


def _outbound_data(run: RunFiles) -> str:
    up = [t for t in run.exposure.traffic if t.direction != "down"]
    receiver = {"up": "server", "across": "other clients"}
    rows = [
        [t.handler, receiver[t.direction], t.form, count(t.messages), size(t.bytes), str(t.clients)] for t in up[:_MOST]
    ]
    if not rows:
        return note("messages.jsonl lists no message of a client.")
    listing = table(["what", "to", "form", "messages", "size", "clients"], rows, "Data that left", words=(1, 2))
    more = f" {plural(len(up) - _MOST, 'kind')} more: see report.html." if len(up) > _MOST else ""
    return listing + note(f"Plain: the receiver could read it. Masked: it could read sums only.{more}")


def _analysis(run: RunFiles) -> str:
    model = {True: "one model for each client", False: "one model for all clients", None: "models"}[own_models(run)]
    lost = [*run.missing, *(f"{len(run.exclusions)} replies of clients were left out" for _ in run.exclusions[:1])]
    attackers, late = ", ".join(map(str, sequence(run.manifest.get("attackers")))), newcomers_of(run)
    return _facts(
        [
            ("Result", f"{model}; params_sha256 {run.result.get('params_sha256') or 'not in the manifest'}"),
            ("Deviations", "; ".join(lost) or "none is recorded"),
            *([("Clients that attacked on purpose", attackers)] if attackers else []),
            *([("Joined after training, each with its own model", ", ".join(late))] if late else []),
            ("Audit of the code and of its design; review", None),
        ]
    )


def kind_of(name: str) -> str:
    """The kind of attack to which a finding of this name belongs, in the opinion's terms."""
    return next((k for k, starts in _KINDS.items() if any(map(name.startswith, sorted(starts)))), _OTHER)


def _attacks(run: RunFiles, found: Sequence[Any], unfit: str) -> str:

    ranked = sorted(found, key=lambda f: _ORDER.index(f["verdict"]) if f.get("verdict") in _ORDER else len(_ORDER))
    shown = ranked[:_MOST]
    rows = [[f"{i} {kind_of(str(f.get('name')))}", str(f.get("question")), *cells(f)] for i, f in enumerate(shown, 1)]
    rows += [[kind, "not tried on this run", "", "", "", ""] for kind in _missing_audits(found)]
    head = ["attack", "question", "verdict", "estimate", "interval", "bound"]
    listing = table(head, rows, "Attacks", words=(1, 2, 4)) + note(esc(_rules(shown)))
    more = f"{plural(len(found) - _MOST, 'finding')} more: see report.html. " if len(found) > _MOST else ""
    more += "The run continued after its audit: audit it again. " if is_outdated(run) else ""
    text = "Leaks: an attacker learns something. An attack that finds nothing proves nothing."
    return (
        listing + note(esc(more + text + (f" {unfit}." if unfit else ""))) + _facts([("Tests outside of fedfm", None)])
    )


def _rules(found: Sequence[Any]) -> str:
    """The rules of the findings. Each rule follows the numbers that its findings have in the table."""
    by_rule: dict[str, list[str]] = {}
    for i, f in enumerate(found, 1):
        if f.get("rule"):
            by_rule.setdefault(_NUMBERS.sub("", str(f["rule"])), []).append(str(i))
    return " ".join(f"{', '.join(numbers)}: {rule}." for rule, numbers in by_rule.items())


def _missing_audits(found: Sequence[Any]) -> list[str]:
    tried = {kind_of(str(f.get("name"))) for f in found}
    return [kind for kind in _KINDS if kind not in tried]


def _risk(run: RunFiles, found: Sequence[Any]) -> str:
    lines = [f"A claim of the run is refuted: {f.get('name')}." for f in found if f.get("contradicts") is True]
    for verdict, what in (("leaks", "An attack succeeded"), ("inconclusive", "An attack gave no answer")):
        names = [str(f.get("name")) for f in found if f.get("verdict") == verdict]
        lines += [f"{what}: {', '.join(names)}."] if names else []
    if untried := _missing_audits(found):
        lines.append(f"Not tried: {', '.join(untried)}.")
    lines.append(smallest_sum(run))
    epsilon, assumed = privacy_claim(run)
    lines.append(f"{epsilon} Section 2 lists what this assumes." if assumed else epsilon)
    if own_models(run):
        lines.append("Each client's model is fitted to its rows; clients/ holds the models that clients revealed.")
    if late := newcomers_of(run):
        lines.append(f"{', '.join(late)} joined after training: the model in clients/ is fitted to their rows alone.")
    if {"departures", "worth"} & run.manifest.keys():
        from fedfm.reports import client_worth, departures

        lines += departures.summary(run) + client_worth.summary(run)
    lines += [f"Incomplete: {text}." for text in run.missing]
    items = "".join(f"<li>{esc(line)}</li>" for line in dict.fromkeys(lines))
    return f'<ul class="plain">{items}</ul>' + _facts(
        [
            ("Likelihood that personal data are extracted from the model: insignificant? Why", None),
            ("The same by queries to the model, with all means reasonably likely to be used", None),
            ("Accepted by whom; measures to come; next review", None),
        ]
    )


def _documents(run: RunFiles) -> str:
    signed = "the run is not signed"
    if (run.path / "signature.json").is_file():
        signed = "signature.json is there; fedfm verify says whether it holds (sign again after this page is written)"
    prints = ", ".join(f"{key} {value}" for key, value in mapping(run.manifest.get("fingerprints")).items())
    return _facts(
        [
            ("Impact assessment (Article 35 GDPR), or why none is needed", None),
            ("Advice of the data protection officer", None),
            ("Technical and organisational measures in operation", None),
            ("Fingerprints", prints or "not in the manifest"),
            ("Signature", signed),
            ("Must not be shared", " ".join(map(str, sequence(run.manifest.get("do_not_share"))))),
        ]
    )


def _interest() -> str:
    return _facts(
        [
            ("1. The interest: lawful, precise, present", None),
            ("2. Necessity: no less intrusive way; amount of data", None),
            ("3. Balance with the persons’ rights; what they expect; mitigating measures", None),
        ]
    )


def _unlawful() -> str:
    return _facts(
        [
            ("Was each source lawful; how was that examined", None),
            ("Who uses the model: the same controller, or another, and what it examined", None),
            ("Is the model anonymous, so that the GDPR does not apply to its use", None),
        ]
    )
