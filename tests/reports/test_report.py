"""report.html says what the files of a run say, in any state of the run, and executes nothing that a run contains."""

import json
import math
import re
import tomllib
import xml.etree.ElementTree as ET
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedfm.errors import InputError
from fedfm.reports import html, read, sections
from fedfm.reports.svg import ChartBar, bars, domain, ticks
from fedfm.reports.text import percent
from reports import runs

SECTIONS = ("rounds", "clients", "split", "messages", "privacy", "time", "excluded", "result", "manifest")
EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "a\x00b\x1b[31m",
    "\u202ereversed",
    "\ud800",
    "{h}%s&amp;",
]


def document(run: Path, baselines: list[Path] | None = None) -> str:
    return html.write(run, baselines or []).read_text(encoding="utf-8")


class Tags(HTMLParser):
    """The tags of a document, checked to close what they open."""

    VOID = ("meta", "br", "img", "link", "hr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    return tags


# Widths of DejaVu Sans in em; of the fonts that a page may get it is the widest (fontTools: hmtx / 2048).
DEJAVU = dict.fromkeys("0123456789", 0.636) | dict.fromkeys(". \u00a0,", 0.318) | {"%": 0.950, "-": 0.361}


def svgs(text: str) -> list[ET.Element]:
    return [ET.fromstring(s) for s in re.findall(r"<svg.*?</svg>", text, flags=re.S)]


def words(text: str) -> str:
    body = re.sub(r"<style>.*?</style>", "", text, flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body)).replace("\u202f", " ")


def test_a_report_is_one_document_with_every_section(tmp_path):
    text = document(runs.make(tmp_path / "run"))
    tags = parsed(text)
    ids = [a["id"] for _, a in tags.seen if a.get("id")]
    assert [i for i in ids if i in SECTIONS] == list(SECTIONS)
    assert len(ids) == len(set(ids))
    assert [t for t, _ in tags.seen].count("h1") == 1
    assert {t for t, _ in tags.seen}.isdisjoint({"script", "link", "img", "iframe", "object", "form"})
    assert not re.search(r"(src|href|url\(|@import)\s*[=(]?\s*[\"']?(https?:)?//", text)
    assert "http" not in re.sub(r"http-equiv", "", text)


def test_the_head_says_the_result_in_one_line(tmp_path):
    text = words(document(runs.make(tmp_path / "run")))
    assert "fedavg on nano-vit with digits (dirichlet 0.1) at 6 clients : accuracy 77.9 %" in text.replace(
        " clients:", " clients :"
    )
    assert "after 12 rounds and 1 min 02 s, 12.3 MB sent up and 2.35 MB down." in text
    assert "Unfinished" not in text
    assert "Epsilon – nothing is claimed" in text


def test_the_sections_state_the_figures_of_the_files(tmp_path):
    run = runs.make(tmp_path / "run")
    (run / "private").mkdir()
    text = words(document(run))
    assert "6 clients, each model on the client&#x27;s own test rows: mean 69.5 %, worst 57.9 %, best 77.9 %" in text
    assert "c1 no test rows" in text
    assert "client c99 got no rows and was dropped" in text
    assert "train.FedAvg_train client to server masked 72 72.0 kB 1.00 kB 0.01 / 0.001 / 0.0001 6 yes" in text
    assert "query.hello server to client plain 6 720 B 120 B 0.0012 / 0.00012 / 1.2e-05 6 no" in text
    assert "The server received train.FedAvg_train masked, and the masks cancel in the sum" in text
    assert "12 rounds: median 1.50 s, longest 1.50 s, together 18.0 s." in text
    assert "evaluation before training took 0.25 s" in text
    assert "3 c0 round E_TIMEOUT no reply in 600 s" in text
    assert "params_sha256 " + "ab" * 32 in text
    assert "private/ holds the keys of the masks" in text
    assert "details: bound 0.25" in text


def test_the_experiment_stands_as_toml(tmp_path):
    run = runs.make(tmp_path / "run")
    text = document(run)
    shown = re.search(r'aria-label="Experiment"><pre>(.*?)</pre>', text, flags=re.S)
    assert shown is not None
    experiment = json.loads((run / "manifest.json").read_text())["experiment"]
    del experiment["privacy"], experiment["attack"], experiment["data"]["limit"]
    assert tomllib.loads(shown[1].replace("&quot;", '"')) == experiment


def test_the_same_files_give_the_same_bytes(tmp_path):
    run = runs.make(tmp_path / "run")
    assert document(run) == document(run)
    assert not list(run.glob(".*part"))


@pytest.mark.each_value
@pytest.mark.parametrize(
    "place", ["client", "class", "name", "handler", "method", "reason", "notice", "share", "detail"]
)
@pytest.mark.parametrize("evil", EVIL)
def test_no_text_of_a_run_is_executed(tmp_path, place, evil):
    names = [evil if place == "client" else "c0", "c1"]
    run = runs.make(tmp_path / "run", n_rounds=2, n_classes=3, names=names)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["name"] = evil if place == "name" else "x"
    if place == "class":
        manifest["split"]["classes"][0] = evil
    if place == "method":
        manifest["result"]["method"] = manifest["experiment"]["method"][evil] = evil
    if place == "notice":
        manifest["notices"] = [evil]
    if place == "share":
        manifest["do_not_share"] = [evil]
    if place == "detail":
        manifest["result"]["details"] = {evil: {evil: [evil]}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    if place == "reason":
        excluded = [{"client": evil, "code": evil, "reason": evil}]
        (run / "metrics.jsonl").write_text(json.dumps(runs.line(1, names, excluded=excluded)) + "\n")
    if place == "handler":
        lost = {"round": 1, "from": evil, "to": "server", "handler": evil, "bytes": 1, "form": evil, "counted": True}
        (run / "messages.jsonl").write_text(json.dumps(lost) + "\n")
    text = document(run, [run])
    tags = parsed(text)
    assert {t for t, _ in tags.seen}.isdisjoint({"script", "img"})
    assert not any(k.startswith("on") for _, a in tags.seen for k in a)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
    assert svgs(text)


def test_every_drawing_is_xml_with_a_name_and_inside_its_frame(tmp_path):
    drawn = svgs(document(runs.make(tmp_path / "run"), [runs.make(tmp_path / "other", n_classes=4)]))
    assert len(drawn) > 10
    for svg in drawn:
        assert svg.get("aria-hidden") == "true" or (svg.get("role") == "img" and svg.get("aria-label"))
        width, height = map(float, svg.get("viewBox", "").split()[2:])
        for part in svg.iter():
            if part.tag in ("rect", "circle", "text") and "transform" not in part.attrib:
                x = float(part.get("x", part.get("cx", "0"))) + float(part.get("width", "0")) * (part.tag == "rect")
                y = float(part.get("y", part.get("cy", "0")))
                assert -0.1 <= x <= width + 0.1
                assert -0.1 <= y <= height + 0.1


@pytest.mark.parametrize("text", ["100.0\u00a0%", "0.88", "-100.0\u00a0%", "1000000"])
def test_the_figure_after_a_bar_ends_inside_the_frame(text):
    (drawn,) = svgs(bars(680, [ChartBar("1" * 12, 1.0, text)], "accuracy"))
    name, figure = drawn.iter("text")
    assert float(figure.get("x")) + 12 * sum(DEJAVU[c] for c in text) <= 680
    assert float(name.get("x")) - 12 * sum(DEJAVU[c] for c in name.text) >= 0


def test_the_policy_forbids_scripts_and_requests(tmp_path):
    tags = parsed(document(runs.make(tmp_path / "run")))
    policy = [a["content"] for t, a in tags.seen if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policy) == 1
    assert str(policy[0]).startswith("default-src 'none'")
    assert "script-src" not in str(policy[0])


@pytest.mark.parametrize("n_rounds", [0, 1, 1000])
def test_any_number_of_rounds(tmp_path, n_rounds):
    text = document(runs.make(tmp_path / "run", n_clients=2, n_rounds=n_rounds, traffic=[]))
    assert svgs(text)
    assert "No message has been recorded yet" in text
    assert "nan" not in re.sub(r"[a-z]*nan[a-z-]+", "", " ".join(re.findall(r'd="(.*?)"', text)))


def test_a_run_killed_before_its_first_round(tmp_path):
    run = runs.make(tmp_path / "run", finished=None, result=None, split=None)
    (run / "metrics.jsonl").unlink()
    (run / "messages.jsonl").unlink()
    text = words(document(run))
    assert "Unfinished run No round is committed yet." in text
    assert "accuracy –" in text


def test_an_unfinished_run_is_reported_as_far_as_it_came(tmp_path):
    run = runs.make(tmp_path / "run", rounds=[runs.line(t, ["c0", "c1"]) for t in range(5)], finished=None, result=None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "accu')  # the kill came here
    text = words(document(run))
    assert "4 of 12 rounds are committed" in text
    assert "8.00 kB sent up and 16.0 kB down" in text
    assert "after 4 rounds and 6.25 s" in text


def test_values_that_are_not_finite_leave_a_gap(tmp_path):
    rounds = [runs.line(t, ["c0", "c1"]) for t in range(9)]
    rounds[4] |= {"global_accuracy": math.nan, "loss": math.inf, "train_loss": 10**400}
    rounds[5] |= {"global_accuracy": None, "client_accuracy": {"c0": math.nan, "c1": None}}
    rounds[8]["client_accuracy"] = {"c0": math.nan, "c1": None}
    text = document(runs.make(tmp_path / "run", names=["c0", "c1"], rounds=rounds))
    assert "Left out: 1 value that is not finite." in words(text)
    assert "c0 not a number" in words(text)
    first = next(s for s in svgs(text) if s.get("role") == "img")
    paths = [p for p in first.iter("path") if "s1" in p.get("class", "")]
    assert len(paths) == 2  # before and after the gap
    assert not re.search(r"\b(nan|inf)\b", " ".join(str(p.get("d")) for s in svgs(text) for p in s.iter("path")))


def test_scores_of_former_models_are_marked(tmp_path):
    names = ["a", "b"]
    rounds = [runs.line(t, names) for t in range(7)]
    for line in rounds[1:-1]:
        line["client_scored_round"] = {"a": line["round"] - 1, "b": max(line["round"] - 3, 0)}
    text = words(document(runs.make(tmp_path / "late", names=names, n_clients=2, n_rounds=6, rounds=rounds)))
    assert "are the last that it reported. They are of models that are up to 3 rounds old." in text
    assert "The rounds are asynchronous" not in document(runs.make(tmp_path / "run"))


def test_a_diverged_loss_is_drawn_by_logarithm(tmp_path):
    rounds = [runs.line(t, ["c0"], loss=10.0 ** (3 * t), train_loss=None) for t in range(5)]
    assert svgs(document(runs.make(tmp_path / "run", names=["c0"], rounds=rounds)))


def test_the_loss_that_ends_a_run_is_drawn(tmp_path):
    rounds = [runs.line(t, ["c0"], val_loss=3.0 - t / 4) for t in range(5)]
    text = document(runs.make(tmp_path / "run", names=["c0"], rounds=rounds))
    assert "loss on the clients' validation rows: 3 to 2." in unescape(text)
    assert "validation rows" not in document(runs.make(tmp_path / "none"))


def test_a_language_model_shows_its_perplexity(tmp_path):
    none = dict.fromkeys(
        ("accuracy", "global_accuracy", "local_accuracy", "balanced_accuracy", "macro_f1", "train_loss")
    )
    rounds = [runs.line(t, ["c0"], **none, client_accuracy={}, perplexity=90.0 - t) for t in range(4)]
    result = {"method": "fedavg", "accuracy": None, "perplexity": 87.0, "seconds": 3.0, "bytes_up": 1, "bytes_down": 1}
    part = {"classes": [], "clients": {"c0": {"train": {"rows": 70, "by_class": None}, "val": 0, "test": {"rows": 9}}}}
    text = words(document(runs.make(tmp_path / "run", names=["c0"], rounds=rounds, result=result, split=part)))
    assert "perplexity 87 after 3 rounds" in text
    assert "No accuracy per client was measured." in text
    assert "70 training rows at 1 client" in text


def test_a_language_model_for_each_client_shows_its_losses(tmp_path):
    none = dict.fromkeys(("accuracy", "global_accuracy", "local_accuracy", "balanced_accuracy", "macro_f1"))
    names = ["north", "south", "east"]
    own, before = {"north": 2.25, "south": 3.5, "east": None}, {"north": 2.5, "south": 3.25, "east": None}
    silent = dict.fromkeys(names)
    rounds = [
        runs.line(t, names, **none, client_accuracy=silent, client_loss=own, local_loss=5.0 - t / 2, perplexity=None)
        for t in range(4)
    ]
    details = {"client_loss": own, "server_client_loss": before, "server_client_accuracy": silent}
    result = {"method": "fedbip", "accuracy": None, "perplexity": 90.0, "client_accuracy": silent, "details": details}
    text = words(document(runs.make(tmp_path / "run", names=names, rounds=rounds, result=result)))
    for said in ("mean loss 2.875, worst 3.5, best 2.25", "1 without scores", "it moves the mean loss by +0.000"):
        assert said in text
    assert "Local loss 2.875 mean of the clients Worst client 3.5 south" in text
    assert "loss, mean of the clients on their own test rows 3.5" in text
    assert "north 2.5 2.25" in text
    assert "3 without scores" not in text
    many = {"client_loss": {f"c{i}": float(i) for i in range(60)}}
    changed = runs.make(tmp_path / "many", names=list(many["client_loss"]), result=result | {"details": many})
    assert "averaged in groups" in words(document(changed))
    unfinished = words(document(runs.make(tmp_path / "broken", names=names, rounds=rounds, result=None)))
    assert "mean loss 2.875" in unfinished


def test_a_language_model_with_accuracies_shows_its_perplexity_first(tmp_path):
    rounds = [runs.line(t, ["c0"], perplexity=90.0 - t) for t in range(4)]
    result = {"method": "fedavg", "accuracy": 0.25, "global_accuracy": 0.25, "perplexity": 87.0, "seconds": 3.0}
    text = words(document(runs.make(tmp_path / "run", names=["c0"], rounds=rounds, result=result)))
    assert "perplexity 87, accuracy 25.0" in text
    assert text.index("Perplexity 87") < text.index("Global accuracy")


def test_accuracies_of_zero_have_an_axis_with_different_labels():
    low, high = domain([0.0, 0.0], within=(0.0, 1.0))
    labels = [percent(tick) for tick in ticks(low, high)]
    assert len(set(labels)) == len(labels) > 1


@pytest.mark.parametrize(("n_clients", "n_classes"), [(1, 1), (40, 8), (41, 8), (300, 31), (60, 1000)])
def test_any_size_of_split(tmp_path, n_clients, n_classes):
    text = document(runs.make(tmp_path / "run", n_clients=n_clients, n_rounds=1, n_classes=n_classes, traffic=[]))
    parsed(text)
    assert svgs(text)
    assert len(text) < 4_000_000
    assert ("gathered" in text) == (n_clients > sections.MOST_BARS)


def test_optional_keys_may_be_absent(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"round": 0}\n\n{"round": 1, "client_accuracy": null, "excluded": null}\n')
    (run / "messages.jsonl").write_text('{"round": 1}\n')
    parsed(document(run))


def test_a_missing_manifest_is_named(tmp_path):
    run = runs.make(tmp_path / "run")
    (run / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"this is not a run; manifest\.json is missing"):
        html.write(run)
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("schema", [2, "1", None, 1.5])
def test_a_newer_schema_is_refused(tmp_path, schema):
    with pytest.raises(InputError, match=r"manifest\.json: its schema is .* reads up to 1"):
        html.write(runs.make(tmp_path / "run", schema=schema))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_manifest_is_named(tmp_path, text):
    run = runs.make(tmp_path / "run")
    (run / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"manifest\.json: (not JSON|expected a JSON object)"):
        html.write(run)


DAMAGE = {
    "metrics gone": ("metrics.jsonl", lambda lines: None, "metrics.jsonl has no line of rounds 0 to 12"),
    "metrics emptied": ("metrics.jsonl", lambda lines: [], "metrics.jsonl has no line of rounds 0 to 12"),
    "metrics cut": ("metrics.jsonl", lambda lines: lines[:5], "metrics.jsonl has no line of rounds 5 to 12"),
    "a hole": ("metrics.jsonl", lambda lines: lines[:3] + lines[4:7] + lines[9:], "no line of rounds 3 and 7 to 8"),
    "no JSON": ("metrics.jsonl", lambda lines: [*lines[:2], b"{dam", *lines[3:]], "has a damaged or edited line: 3"),
    "no object": ("metrics.jsonl", lambda lines: [*lines[:2], b"7", *lines[2:]], "has a damaged or edited line: 3"),
    "many": ("metrics.jsonl", lambda lines: [b"x"] * 8 + lines, "damaged or edited lines: 1, 2, 3, 4, 5 and 3 more"),
    "messages gone": ("messages.jsonl", lambda lines: None, "messages.jsonl does not list all messages: bytes up 0 of"),
    "some messages": ("messages.jsonl", lambda lines: lines[::2], "messages.jsonl does not list all messages"),
    "junk": ("messages.jsonl", lambda lines: [*lines[:2], b"\0\xff\r{", *lines[2:]], "has a damaged or edited line: 3"),
    "deep": ("messages.jsonl", lambda lines: [b"[" * 100_000, *lines], "has a damaged or edited line: 1"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_log_is_shown_with_a_notice_of_the_missing_lines(tmp_path, what):
    name, damage, said = DAMAGE[what]
    run = runs.make(tmp_path / "run")
    manifest = json.loads((run / "manifest.json").read_text())
    sent = [m for m in map(json.loads, (run / "messages.jsonl").read_text().splitlines()) if m["counted"]]
    for way, up in (("bytes_up", True), ("bytes_down", False)):
        manifest["result"][way] = sum(m["bytes"] for m in sent if (m["to"] == "server") == up)
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert read.read(run).missing == ()
    lines = damage((run / name).read_bytes().split(b"\n")[:-1])
    if lines is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(b"".join(line + b"\n" for line in lines))
    assert any(said in text for text in read.read(run).missing)
    text = words(document(run))
    assert "This record is incomplete" in text
    assert said in text
    assert "fedavg-digits" in text


def test_a_run_that_was_stopped_in_its_first_round_lacks_nothing(tmp_path):
    run = runs.make(tmp_path / "run", finished=None, result=None)
    (run / "metrics.jsonl").unlink()
    (run / "checkpoint").mkdir()
    (run / "checkpoint/round-000000.safetensors").touch()
    assert read.read(run).missing == ()


def test_a_torn_last_line_of_an_unfinished_run_is_not_damage(tmp_path):
    run = runs.make(tmp_path / "run", finished=None, result=None)
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"round": 13, "acc')
    assert read.read(run).missing == ()
    (run / "checkpoint").mkdir()
    (run / "checkpoint/round-000015.safetensors").touch()
    assert read.read(run).missing == ("metrics.jsonl has no line of rounds 13 to 14",)


def test_a_long_messages_file_is_summed_as_a_stream(tmp_path):
    names = [f"c{i}" for i in range(100)]
    run = runs.make(
        tmp_path / "run", names=names, n_rounds=1, traffic=[c for t in range(1, 101) for c in runs.crossings(t, names)]
    )
    sums = {(t.handler, t.direction): (t.messages, t.bytes, t.clients) for t in read.read(run).exposure.traffic}
    assert sums[("train.FedAvg_train", "up")] == (10_000, 10_000_000, 100)
    assert sums[("query.FedAvg_probe", "up")] == (10_000, 640_000, 100)


def test_every_form_and_direction_has_its_sentence(tmp_path):
    ways = {"up": ("c0", "server"), "down": ("server", "c0"), "across": ("c0", "c1")}
    traffic = [
        {"round": 1, "from": a, "to": b, "handler": f"train.{way}_{form}", "bytes": 5, "form": form, "counted": True}
        for way, (a, b) in ways.items()
        for form in ("plain", "masked", "encrypted", "sealed")
    ]
    text = words(document(runs.make(tmp_path / "run", traffic=traffic)))
    assert text.count("The method asks only for their mean.") == 1
    assert text.count("only a holder of the secret key can read it") == 3
    assert text.count("in the unknown form") == 3


def test_the_ledger_is_shown(tmp_path):
    ledger = {"epsilon": 3.25, "entries": [{"event": "gaussian", "sigma": 1.1}, {"event": "gaussian", "rounds": 3}]}
    run = runs.make(tmp_path / "run", ledger=ledger, result=None, finished=None)
    text = words(document(run))
    assert "Spent: epsilon = 3.25" in text
    assert "2 gaussian – 3" in text
