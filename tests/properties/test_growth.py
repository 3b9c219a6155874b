"""What another party sends costs no more than in proportion to its length: counted in operations, not in seconds.

An operation is a line of Python, or a call of a function of Python or C. Each act is done with a thing of size n, 2 n
and 4 n. In proportion, the second step costs twice as much as the first; the square of a length costs four times as
much.
"""

import gc
import json
import re
import shutil
import sys
import tomllib
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import fedfm
from fedfm.api import signature
from fedfm.config.experiment import Experiment
from fedfm.config.faults import read_all
from fedfm.config.registry import available, resolve
from fedfm.config.run_spec import RunSpec
from fedfm.core import reasons
from fedfm.core import text as texts
from fedfm.core.checks import conform, match, nonfinite
from fedfm.core.crossing import Crossing
from fedfm.core.fields import bounds_of
from fedfm.core.messages import Excluded
from fedfm.core.toml_text import check_depth, to_toml
from fedfm.core.wire import payload
from fedfm.core.wire.flower_records import WIRE
from fedfm.data.spec import DataSpec
from fedfm.engines import answers
from fedfm.engines.flower import client_stub
from fedfm.engines.folder.letters import _header
from fedfm.errors import E_FORMAT, E_TIMEOUT, ClientFault, FedfmError, close
from fedfm.linalg.params import Params
from fedfm.models.spec import ModelSpec
from fedfm.reports import compare, dossier, html, text
from fedfm.runtime import logs
from fedfm.runtime.progress import Progress
from fedfm.runtime.trackers import tracker
from fedfm.sites import ledger as silo_ledger
from fedfm.sites.silo_config import Silo
from fedfm.tasks import _label_scores
from fedfm.version import __version__
from small import experiment

MOST = 2.9  # of two steps of which each is twice as long: 2 in proportion, and 4 with the square


def operations(act):
    """Lines and calls of an act; what it raises for a user or a party is a result as any other."""
    count = 0

    def line(frame, event, argument):
        nonlocal count
        count += 1
        return line

    def call(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.gettrace(), sys.getprofile()
    gc.disable()  # what other tests left behind would be counted if it was collected here
    sys.settrace(line)
    sys.setprofile(call)
    try:
        with suppress(FedfmError, ValueError, RecursionError):
            act()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        gc.enable()
    return count


def grows(act, n):
    """How much more the step from 2 n to 4 n costs than the one from n to 2 n; and the cost at 4 n."""
    costs = [operations(partial(act, size)) for size in (n, n, 2 * n, 4 * n)][1:]  # the first fills what is cached
    return (costs[2] - costs[1]) / max(costs[1] - costs[0], n / 4), costs


def test_the_measure_finds_what_is_quadratic():
    """The text is cut character by character, and measured anew each time: as it once was."""

    def shorten(n):
        left = "w" * n
        while left and text.width_of(left) > 10:
            left = left[:-1]

    assert grows(shorten, 60)[0] > 3.5
    assert grows(lambda n: text.width_of("w" * n), 60)[0] < 2.1


# --- texts -----------------------------------------------------------------------------------------------------------

LONG = {
    "a word": lambda n: "w" * n,
    "words": lambda n: "w " * (n // 2),
    "wide": lambda n: "界" * n,
    "marks": lambda n: "e\u0301" * (n // 2),
    "control": lambda n: "\x07" * n,
    "unseen": lambda n: "\u200b" * n,
    "surrogates": lambda n: "\ud800" * n,
    "lines": lambda n: "a\n" * (n // 2),
    "quotes": lambda n: "\"'<&" * (n // 4),
    "backslashes": lambda n: "\\" * n,
    "paths": lambda n: "../" * (n // 3),
    "dots": lambda n: "a." * (n // 2),
    "braces": lambda n: "{}" * (n // 2),
    "spaces": lambda n: " " * n,
}
OF_A_TEXT = {
    "shorten": lambda t: text.shorten(t, 12),
    "width_of": text.width_of,
    "esc": text.esc,
    "toml": lambda t: to_toml({t: t, "a": {t: [t]}}),
    "visible": texts.visible,
    "visible_lines": texts.visible_lines,
    "safe_name": texts.safe_name,
    "is_name": texts.is_name,
    "to_json": lambda t: texts.to_json({t: [t, float("nan")]}),
    "close": lambda t: close(t, ("rounds", "learning_rate", "weight_decay")),
    "payload": lambda t: payload.decode(*_halves({t: [t, t]})),
    "head": lambda t: payload.decode(t, b""),
    "fault": lambda t: answers.parse_envelope({"round": 1, "call": 1, "fault": {"code": t, "reason": t}}),
    "hello": lambda t: answers.parse_hello({"name": t, "fedfm": t, "wire": t, "model": t}, "a" * 64),
    "halves": lambda t: client_stub.fault_halves(ClientFault(t[:20], t), t, b""),
    "reasons": lambda t: reasons.reasons([Excluded(1, t, t, t)]),
    "crossing": lambda t: Crossing(1, t, t, t, 1, t, True).line(),
    "letter": lambda t: _header(
        json.dumps({"kind": t, "sender": t, "receiver": t, "run": t, "number": 1, "size": 1}).encode()
    ),
    "named": lambda t: tracker.to_metric_name(t),
    "experiment": lambda t: Experiment.from_dict(
        {"name": t[:9], "data": {"path": t, t: 1}, "model": {"name": "features"}, "method": {"name": "fedavg"}}
    ),
    "a method": lambda t: Experiment.from_dict(
        {"data": {"path": "x.npz"}, "model": {"name": t}, "method": {"name": t, t: t}}
    ),
    "an adaptation": lambda t: Experiment.from_dict(
        {
            "data": {"path": "x.npz", "where": {t: [t]}},
            "model": {
                "name": "nano-vit",
                "templates": [t],
                "device": t,
                "fingerprint": t,
                "adaptation": {"rank_pattern": {t: 1}, "targets": [t], "alpha_pattern": {t: 1.0}},
            },
            "method": {"name": "fedavg"},
        }
    ),
}


def _halves(value):
    head, pieces = payload.encode(value)
    return head, b"".join(pieces)


@pytest.mark.parametrize("what", OF_A_TEXT)
def test_a_text_costs_in_proportion(what):
    for kind, make in LONG.items():
        ratio, costs = grows(lambda n: OF_A_TEXT[what](make(n)), 100)  # noqa: B023
        assert ratio < MOST, (kind, costs)


@pytest.mark.parametrize(
    "name", ["n" * 65, "n" * 60_000, "a b", "a\nb", "../x", "<b>", ".a", "-a", "_a", "a\u200b", "a\u202e", "", None, 7]
)
def test_a_name_that_no_silo_has_is_none_at_the_server_and_is_not_repeated(name):
    """By the rule of silo.toml and of a federation's file; another node is left out in one short line."""
    hello = {"name": name, "fedfm": __version__, "wire": WIRE, "model": None}
    with pytest.raises(ClientFault) as fault:
        answers.parse_hello(hello, None)
    assert fault.value.code == E_FORMAT
    assert len(fault.value.reason) < 150
    assert not isinstance(name, str) or len(name) < 3 or name not in fault.value.reason
    if isinstance(name, str):
        assert re.fullmatch(bounds_of(next(f for f in fields(Silo) if f.name == "name")).pattern, name) is None
        if name:  # the experiment itself may deal rows to clients of such names
            assert answers.parse_hello(hello, None, [name]) == (name, None)


@pytest.mark.parametrize("name", ["a", "hospital-a", "Klinik_9.b", "Zürich", "9" * 64])
def test_a_silos_name_is_one_at_the_server(name):
    assert answers.parse_hello({"name": name, "fedfm": __version__, "wire": WIRE}, None) == (name, None)


# --- lists, tables and nestings --------------------------------------------------------------------------------------


def _nested(n, inner=1):
    for _ in range(n):
        inner = {"a": inner}
    return inner


def _lists(n):
    inner: Any = 1
    for _ in range(n):
        inner = [inner]
    return inner


OF_A_SIZE = {
    "numbers": lambda n: payload.decode(*_halves(list(range(n)))),
    "texts": lambda n: payload.decode(*_halves([f"c{i}" for i in range(n)])),
    "mixed": lambda n: payload.decode(*_halves([1, "a", 2.0, None] * n)),
    "a mapping": lambda n: payload.decode(*_halves({f"c{i}": i for i in range(n)})),
    "a mixed mapping": lambda n: payload.decode(*_halves({f"c{i}": [i] for i in range(n)})),
    "tensors": lambda n: payload.decode(*_halves([Params({"w": _zeros()})] * n)),
    "parameters": lambda n: payload.decode(*_halves(Params({f"w{i}": _zeros() for i in range(n)}))),
    "other parameters": lambda n: match(
        Params({f"w{i}": _zeros() for i in range(n)}), Params({f"v{i}": _zeros() for i in range(n)}).layout
    ),
    "a nested mapping": lambda n: payload.decode(*_halves(_nested(n // 20))),
    "a deep head": lambda n: payload.decode("[" * n + "]" * n, b""),
    "a deep head of mappings": lambda n: payload.decode('{"m":{"a":' * n + "null" + "}}" * n, b""),
    "texts, one by one": lambda n: conform(["a"] * n, list[str]),
    "numbers of a mapping": lambda n: conform({f"c{i}": 1.0 for i in range(n)}, dict[str, float]),
    "lists in lists": lambda n: conform([["a"]] * n, list[list[str]]),
    "anything": lambda n: conform([{"a": [1, "b"]}] * n, Any),
    "what is finite": lambda n: nonfinite([{"a": 1.0}] * n),
    "what is not": lambda n: texts.finite([{"a": float("nan")}] * n),
    "excluded": lambda n: reasons.reasons([Excluded(1, f"c{i}", E_TIMEOUT, "no reply") for i in range(n)]),
    "counts of many labels": lambda n: _label_scores.scores(_counts_of_labels(n)),
    "figures": lambda n: tracker.figures({"round": 1, "a": {f"c{i}": 1.0 for i in range(n)}}),
    "spans": lambda n: logs._spans(list(range(0, 2 * n, 2))),
    "many keys": lambda n: to_toml({f"k{i}": i for i in range(n)}),
    "many tables": lambda n: to_toml({f"k{i}": {"a": 1} for i in range(n)}),
}


def _counts_of_labels(n):
    """Counts of two rows with n labels; each label has its counts in two bins."""
    ranks = [number for c in range(n) for number in ((c << 32) + (1 << 31), 1, 0, (c << 32) + (3 << 30), 0, 1)]
    counts = dict.fromkeys(("positives", "predicted_positives", "true_positives"), [1] * n)
    return {"rows": 2, "ranks": ranks, **counts}


def _zeros():
    import torch

    return torch.zeros(1)


@pytest.mark.parametrize("what", OF_A_SIZE)
def test_a_list_or_a_table_costs_in_proportion(what):
    ratio, costs = grows(OF_A_SIZE[what], 100)
    assert ratio < MOST, costs


# --- the text of an experiment ---------------------------------------------------------------------------------------

_BASE = '[data]\npath = "x.npz"\n[model]\nname = "features"\n[method]\nname = "fedavg"\n'
OF_TOML = {
    "a comment": lambda n: "#" + "x" * n,
    "comments": lambda n: "#a\n" * n,
    "empty lines": lambda n: "\n" * n,
    "a text": lambda n: f'q = "{"a" * n}"',
    "escapes": lambda n: f'q = "{chr(92) * 2 * n}"',
    "a text of lines": lambda n: "q = '''" + "a\n" * n + "'''",
    "quotes in a text of lines": lambda n: 'q = """' + 'a"" ' * n + '"""',
    "keys": lambda n: "".join(f"k{i} = 1\n" for i in range(n)),
    "tables": lambda n: "".join(f"[data.q{i}]\na = 1\n" for i in range(n)),
    "tables in a list": lambda n: "[[q]]\na = 1\n" * n,
    "tables in tables in a list": lambda n: "[[q]]\n[q.a]\nb = 1\n" * n,
    "a list": lambda n: f"q = [{'1, ' * n}]",
    "lists in lists": lambda n: f"q = {'[' * n}{']' * n}",
    "a table in a line": lambda n: "q = {" + ", ".join(f"a{i} = 1" for i in range(n)) + "}",
    "tables in tables": lambda n: f"q = {'{a = ' * n}1{'}' * n}",
    "parts of a key": lambda n: "a." * n + "b = 1",
    "quoted parts of a key": lambda n: "'a' . " * n + "b = 1",
    "parts of a key that look like its end": lambda n: "\"=\".a.'{'." * n + "b = 1",
    "a key after a text that ends in five quotes": lambda n: 'q = {a = """b""""", ' + '"=".' * n + "c = 1}",
    "quotes that are not closed": lambda n: 'q = "' + chr(92) + '"' * n,
    "escaped quotes that are not closed": lambda n: 'q = """' + (chr(92) + '"""') * n,
    "parts of a table's name": lambda n: "[" + "a." * n + "b]",
    "keys of two parts": lambda n: "[z]\n" + "".join(f"a.b{i} = 1\n" for i in range(n)),
    "digits": lambda n: "q = " + "1" * n,
    "hexadecimal digits": lambda n: "q = 0x" + "1" * n,
    "digits of a fraction": lambda n: "q = 1." + "1" * n,
    "digits of a time": lambda n: "q = 07:32:00." + "1" * n,
    "templates": lambda n: "[run]\n[model.adaptation]\ntargets = [" + "'a', " * n + "]",
    "columns": lambda n: "[data.where]\n" + "".join(f"c{i} = ['a']\n" for i in range(n)),
    "ranks": lambda n: "[model.adaptation.rank_pattern]\n" + "".join(f"c{i} = 1\n" for i in range(n)),
    "speeds": lambda n: (
        "[run.asynchronous]\nbuffer = 1\n[run.asynchronous.speeds]\n" + "".join(f"c{i} = 1.0\n" for i in range(n))
    ),
}


@pytest.mark.parametrize("what", OF_TOML)
def test_the_text_of_an_experiment_costs_in_proportion(what):
    def act(n):
        told = _BASE + OF_TOML[what](n)
        check_depth(told)
        read_all("exp.toml", tomllib.loads(told), Experiment.from_dict)

    ratio, costs = grows(act, 200)
    assert ratio < MOST, costs


def _bounds(cls, seen):
    """The bounds of all settings in a dataclass, and in those of its fields."""
    if not is_dataclass(cls) or cls in seen:
        return
    seen.add(cls)
    for field in fields(cls):
        yield f"{cls.__name__}.{field.name}", bounds_of(field)
    hints = get_type_hints(cls)
    for hint in hints.values():
        for inner in (hint, *get_args(hint)):
            yield from _bounds(inner, seen)


def test_no_pattern_of_a_setting_repeats_what_repeats():
    """Such an expression can take longer than the universe lasts for a text of some hundred characters."""
    from re import _parser  # type: ignore[attr-defined]

    def repeats(parsed, inside):
        for kind, value in parsed:
            name = str(kind)
            endless = name.endswith("REPEAT") and value[1] > 1 and value[1] != 64  # a name has at most so many
            assert not (endless and inside), value
            inner = value[-1] if name.endswith("REPEAT") or name == "SUBPATTERN" else None
            if name == "BRANCH":
                for branch in value[1]:
                    repeats(branch, inside)
            elif inner is not None:
                repeats(inner, inside or endless)

    roots = [DataSpec, ModelSpec, RunSpec]
    roots += [resolve(kind, name) for kind in ("methods", "aggregation", "attacks") for name in available(kind)]
    found, seen = 0, set()
    for root in roots:
        for where, bounds in _bounds(root, seen):
            for pattern in (bounds.pattern, bounds.keys):
                if pattern:
                    found += 1
                    try:
                        repeats(_parser.parse(pattern), False)
                    except AssertionError as error:
                        pytest.fail(f"{where}: {pattern}: {error}")
    assert found > 5
    with pytest.raises(AssertionError):
        repeats(_parser.parse("(a+)+b"), False)


# --- a run that others have written ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run whose folder is copied and filled with more of everything that parties name, say and count."""
    folder = tmp_path_factory.mktemp("base")
    fedfm.run(experiment(folder, run={"workers": 1}), folder / "run", progress=Progress())
    return folder / "run"


def _long_names(m, metrics, messages, n):
    m["name"] = m["experiment"]["name"] = "w " * n
    m["model"]["classes"] = m["split"]["classes"] = [c * n for c in m["model"]["classes"]]
    m["notices"] = ["a long notice " * n]
    m["result"]["excluded"] = [{"round": 1, "client": "c" * n, "reason": "r\n" * n}]


def _many_clients(m, metrics, messages, n):
    split = next(iter(m["split"]["clients"].values()))
    names = [f"c{i}" for i in range(n)]
    m["clients"], m["split"]["clients"] = names, dict.fromkeys(names, split)
    m["result"]["client_accuracy"] = dict.fromkeys(names, 0.5)
    for line in metrics:
        line["client_accuracy"], line["cohort"] = dict.fromkeys(names, 0.5), names
    messages[:] = [messages[0] | {"from": one} for one in names]


def _many_lines(m, metrics, messages, n):
    metrics[:] = [metrics[-1] | {"round": i} for i in range(n)]
    messages[:] = [message | {"round": i} for i in range(n) for message in messages[:2]]
    m["notices"] = [f"notice {i}" for i in range(n)]
    m["result"]["excluded"] = [{"round": i, "client": "c", "reason": "r"} for i in range(n)]
    m["lost"] = [{"file": f"f{i}", "how": "is missing"} for i in range(n)]


def _many_figures(m, metrics, messages, n):
    m["result"]["details"] = {f"k{i}": float(i) for i in range(n)}
    m["versions"] = {f"v{i}": "1" for i in range(n)}
    m["ledger"]["entries"] = [{"what": "tuning", "learning_rate": 0.1}] * n


def _wrong_kinds(m, metrics, messages, n):
    for line in metrics:
        line["x" * n] = ["y"] * n
        line["train_loss"] = "z" * n


@pytest.mark.proof
@pytest.mark.parametrize("fill", [_long_names, _many_clients, _many_lines, _many_figures, _wrong_kinds])
def test_the_cost_of_writing_a_runs_files_is_linear(base, tmp_path, fill):
    folder = tmp_path / "run"

    def act(n):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        manifest = json.loads((base / "manifest.json").read_text())
        lines = {name: [json.loads(one) for one in (base / name).read_text().splitlines()] for name in logs_of}
        fill(manifest, *lines.values(), n)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        for name, many in lines.items():
            (folder / name).write_text("".join(json.dumps(one) + "\n" for one in many))
        return folder

    logs_of = ("metrics.jsonl", "messages.jsonl")
    for write in (
        html.write,
        lambda run: dossier.write(run, ""),
        lambda run: compare.table([run, base]),
        lambda run: compare.write([run, base], tmp_path / "page.html"),
    ):
        costs = []
        for n in (150, 150, 300, 600):  # above the lengths at which names are cut
            run = act(n)
            costs.append(min(operations(lambda: write(run)) for _ in range(2)))  # noqa: B023 - the first fills caches
        assert costs[3] - costs[2] < MOST * max(costs[2] - costs[1], 600), costs[1:]


def test_a_signature_of_many_files_and_a_long_ledger_cost_in_proportion(tmp_path):
    def sign(n):
        folder = tmp_path / f"run{n}"
        folder.mkdir(exist_ok=True)
        body = {"version": 1, "signed": "x" * n, "key": "0" * 64, "files": {f"f{i}\n": "0" for i in range(n)}}
        (folder / signature.FILE).write_bytes(signature._file(body, "0" * n))
        signature.describe(signature.verify(folder))

    ratio, costs = grows(sign, 100)
    assert ratio < MOST, costs

    def ledger(n):
        Path(tmp_path / "ledger").write_text('{"a": 1}\n' * n + "[" * n)
        silo_ledger.entries(tmp_path / "ledger")

    ratio, costs = grows(ledger, 100)
    assert ratio < MOST, costs
