"""The dossier: true statements of the run's files, named blanks for the rest, two pages of paper."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from fedfm.api import execute
from fedfm.audits.audit import audits
from fedfm.audits.model_membership import ModelMembership
from fedfm.audits.repeated_questions import RepeatedQuestions
from fedfm.audits.update_membership import UpdateMembership
from fedfm.cli import main
from fedfm.errors import InputError
from fedfm.reports import dossier, html
from reports import runs
from reports.test_browser import BROWSER
from reports.test_report import parsed
from small import experiment, features

BLANKS = 21  # lines that no run can know


def tags(page):
    return parsed(page).seen


def blanks(page):
    return [a["aria-label"] for _, a in tags(page) if "blank" in (a.get("class") or "")]


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    """FedPFT without privacy on 600 rows: the attacks succeed."""
    folder = tmp_path_factory.mktemp("audited")
    features(folder, n=600, d=16)
    table = experiment(folder)
    table["method"] = {"name": "fedpft"}
    execute.run(table, folder / "run")
    assert main(["audit", str(folder / "run"), "--dossier"]) == 0
    return folder / "run"


def test_sections_are_in_the_opinions_order_and_every_blank_has_a_name(audited):
    page = (audited / "dossier.html").read_text()
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert [t.split()[0] for t in titles[:-1]] == [str(i) for i in range(1, 9)]
    order = ["Purpose", "Design", "Analysis", "Tests", "Remaining risk", "Documentation", "Legitimate", "unlawfully"]
    assert all(word in title for word, title in zip(order, titles, strict=False))
    named = blanks(page)
    assert len(named) == len(set(named)) == BLANKS
    assert all(label.endswith(": to be filled in") for label in named)
    assert {t for t, _ in tags(page)}.isdisjoint({"script", "link", "img", "iframe", "object", "form"})


def test_every_attack_and_verdict_of_the_audit_stands_in_it(audited):
    page = unescape((audited / "dossier.html").read_text())
    found = json.loads((audited / "audit.json").read_text())["findings"]
    assert any(f["verdict"] == "leaks" for f in found)
    for f in found:
        assert f["question"] in page
        if f["verdict"] == "leaks":
            assert f["name"] in page.partition("An attack succeeded")[2].partition("</li>")[0]
    untried = page.partition("Not tried: ")[2].partition(".")[0].split(", ")
    assert untried == ["attribute inference", "exfiltration", "regurgitation of training data", "model inversion"]
    assert "The smallest sum that the server saw has 1 update" in page
    sent = (json.loads(line) for line in (audited / "messages.jsonl").read_text().splitlines())
    assert {m["handler"] for m in sent if m["to"] == "server"} <= set(re.findall(r">([\w.]+)</th>", page))


def test_the_same_files_give_the_same_bytes(audited):
    before = (audited / "dossier.html").read_bytes()
    dossier.write(audited)
    assert (audited / "dossier.html").read_bytes() == before


def test_a_run_that_no_attack_fits_gets_one_too(tmp_path, capsys, monkeypatch):
    execute.run(experiment(tmp_path, privacy={"aggregator": "secagg"}), tmp_path / "run")
    for audit in (ModelMembership, UpdateMembership, RepeatedQuestions):  # each fits every run of its kind
        monkeypatch.setattr(audit, "unfit", lambda self, run: "it is left out")
    assert main(["audit", str(tmp_path / "run")]) == 2
    assert main(["audit", str(tmp_path / "run"), "--dossier", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["findings"] == []
    page = (tmp_path / "run" / "dossier.html").read_text()
    assert "The smallest sum that the server saw has 3 updates" in page
    assert page.count("not tried on this run") == 6
    assert str(tmp_path) not in page.partition("<h2>4 Tests")[2]
    assert main(["audit", str(tmp_path / "run"), "--dossier", "--attack", "membership"]) == 2


def test_a_guarantee_is_stated_with_its_assumptions(tmp_path):
    features(tmp_path, n=600)
    table = experiment(tmp_path, privacy={"unit": "record", "target_epsilon": 2.0, "delta": 1e-6})
    table["method"] = {"name": "fedpft", "components": 1, "covariance": "spherical"}
    execute.run(table, tmp_path / "run")
    page = dossier.write(tmp_path / "run").read_text()
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    for text in manifest["guarantee"]["assumptions"]:
        assert text in page
    assert "epsilon = 2 at delta = 1e-06, unit: record." in page
    assert "480 training rows" not in page  # under [privacy] the number of rows is not public
    assert page.count("data.json") > 0


def test_hostile_names_and_damaged_files_do_no_harm(tmp_path):
    evil = "<script>alert(1)</script>"
    run = runs.make(tmp_path / "run", names=[evil, '"><img src=x>', "\x1b[31m"], name=evil, n_rounds=2)
    (run / "audit.json").write_text(json.dumps({"findings": [{"name": evil, "verdict": evil, "question": evil}, 3]}))
    page = dossier.write(run).read_text()
    assert evil not in page
    assert "\x1b" not in page
    assert {t for t, _ in tags(page)}.isdisjoint({"script", "img"})
    (run / "audit.json").write_text("{")
    (run / "messages.jsonl").write_bytes(b"\xff\n")
    assert "Incomplete" in dossier.write(run).read_text()


LATER = {
    "join": lambda run, rows: main(["join", str(run), rows, "--client", "late"]),
    "predict": lambda run, rows: main(["predict", str(run), rows, "--out", str(run.parent / "out.csv")]),
    "export": lambda run, rows: main(["export", str(run), "--to", "torch", "--out", str(run.parent / "export")]),
    "sign": lambda run, rows: main(["sign", str(run), "--key", str(run.parent / "key.pem")]),
    "audit": lambda run, rows: main(["audit", str(run), "--attack", "head_rows"]),
    "resume": lambda run, rows: main(["resume", str(run)]),
    "report": lambda run, rows: main(["report", str(run)]),
}


def facts(run):
    """What the dossier says in the sections on design and analysis, by name."""
    page = unescape(dossier.write(run).read_text())
    part = page.partition('<section id="design">')[2].partition('<section id="attacks">')[0]
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", part))


@pytest.mark.parametrize(("method", "model"), [("fedavg", "one model for all"), ("ditto", "one model for each client")])
def test_no_later_command_changes_a_fact(tmp_path, method, model):
    features(tmp_path, n=200)
    table = experiment(tmp_path)
    table["method"] = {"name": method, "rounds": 1}
    execute.run(table, tmp_path / "run")
    before, rows = facts(tmp_path / "run"), str(tmp_path / "rows.npz")
    assert before["Result"].startswith(model)
    for name, command in LATER.items():
        if method == "ditto" and name in ("predict", "export", "join"):
            continue  # they want a client's name, or know no start for a newcomer
        assert command(tmp_path / "run", rows) == 0, name
        after = facts(tmp_path / "run")
        joined = after.pop("Joined after training, each with its own model", None)
        assert joined == ("late" if (tmp_path / "run/clients/late").exists() else None)
        assert after == before, name
    if method == "fedavg":
        out = tmp_path / "late"
        assert main(["export", str(tmp_path / "run"), "--client", "late", "--to", "torch", "--out", str(out)]) == 0
        card = (out / "README.md").read_text()
        assert "fitted to rows of late after training; no privacy is claimed for these" in card
        assert "accuracy of this client's model on its own test rows" in card
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    warned = [text for text in manifest["do_not_share"] if text.startswith("clients/")]
    assert ["one model per client" in text for text in warned] == [method == "ditto"]


def test_a_later_command_writes_the_dossier_again(audited, tmp_path):
    run = shutil.copytree(audited, tmp_path / "run")
    (run / "dossier.html").write_text("old")
    assert main(["audit", str(run), "--attack", "single_holder"]) == 0
    assert "What do the messages disclose about a class" in (run / "dossier.html").read_text()


def test_rules_stand_below_the_table_by_number(audited):
    page = unescape((audited / "dossier.html").read_text())
    assert re.search(r"\d: leaks if low > bound or largest low .* > bound; else holds if high <= bound", page)
    report = unescape((audited / "report.html").read_text())
    for f in json.loads((audited / "audit.json").read_text())["findings"]:
        assert f"{f['verdict']}, by its rule: {f['rule']}." in report


def test_an_unfinished_run_has_no_dossier(tmp_path):
    run = runs.make(tmp_path / "run", finished=None, result=None)
    with pytest.raises(InputError, match="not finished"):
        dossier.write(run)
    assert not (run / "dossier.html").exists()


def test_every_finding_of_every_audit_has_its_kind():
    of = {"membership_tpr": "membership inference", "task_vector.membership_tpr": "membership inference"}
    of |= {"task_vector.labels": "attribute inference", "extraction.all_colluding": "other", "epsilon": "other"}
    of |= {"task_vector.colluders": "other", "inversion": "model inversion", "single_holder": "reconstruction"}
    assert {name: dossier.kind_of(name) for name in of} == of
    assert {"membership", "inversion", "reconstruction", "single_holder", "expert_membership"} <= audits().keys()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_the_dossier_prints_on_two_pages(audited, tmp_path):
    out = tmp_path / "dossier.pdf"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer", f"--print-to-pdf={out}"]
    made = html.write(audited).with_name("dossier.html").as_uri()
    subprocess.run([BROWSER, *flags, made], check=True, capture_output=True, timeout=120)
    assert len(re.findall(rb"/Type\s*/Page[^s]", out.read_bytes())) <= 2
