"""Audits of complete runs: leaks are found, protected runs are not accused, and the files of the run stay unchanged."""

import functools
import hashlib
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedfm.api import execute
from fedfm.audits import inversion, membership
from fedfm.audits.audit import audits, choose, perform
from fedfm.audits.finding import Finding, VerdictRule, lines
from fedfm.audits.inference import inverter
from fedfm.audits.member_scores import CellScores, MemberScores
from fedfm.audits.replay import open_finished, replay
from fedfm.cli import main
from fedfm.errors import InputError, RunError
from fedfm.methods.fedpft.encoding import unpack
from fedfm.reports import html
from fedfm.runtime import client_memory
from small import features

NAMES = {"name", "question", "estimate", "low", "high", "bound", "verdict", "rule"}
PRIVATE = {"unit": "record", "target_epsilon": 1.0, "delta": 1e-5}


def run(folder, name="run", privacy=None, data=None, model=None, **method):
    """A finished run of FedPFT on 600 rows of 16 features."""
    rows = folder / "rows.npz"
    if not rows.exists():
        features(folder, n=600, d=16)
    partition = {"name": "dirichlet", "alpha": 0.5, "clients": 8}
    tables = {
        "data": {"path": str(rows), "partition": partition, **(data or {})},
        "model": model or {"name": "features"},
        "method": {"name": "fedpft", **method},
        "run": {"seed": 3, "workers": 1},
    }
    if privacy:
        tables["privacy"] = privacy
    execute.run(tables, folder / name)
    return folder / name


def by_name(found):
    return {f.name: f for f in found}


def prints(folder):
    """Every file's digest, but of what an audit may write; of the manifest all but the audits' verdicts."""
    files = {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in ("audit.json", "report.html", "manifest.json")
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    return files | {"manifest.json": {key: value for key, value in manifest.items() if key != "audits"}}


def change(path, **values):
    """Change the manifest: dotted keys."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    for key, value in values.items():
        table = manifest
        *parents, last = key.split("__")
        for part in parents:
            table = table[part]
        table[last] = value
    file.write_text(json.dumps(manifest))


@pytest.fixture(scope="module", autouse=True)
def _the_same_noise_every_time():
    numbers = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_memory, "entropy", lambda n: hashlib.sha256(str(next(numbers)).encode()).digest()[:n])
        yield


@pytest.fixture(scope="module")
def leaky(tmp_path_factory):
    return run(tmp_path_factory.mktemp("leaky"), components=10, min_count=1, covariance="diag")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quiet")
    data = {"partition": {"name": "iid", "clients": 3}}
    features(folder, n=3000, d=16)
    return run(folder, privacy=PRIVATE, data=data, components=1, covariance="spherical")


@pytest.fixture
def copy(tmp_path, leaky):
    return shutil.copytree(leaky, tmp_path / "copy", ignore=shutil.ignore_patterns("audit.json"))


def test_a_leaky_run_leaks_and_names_rows(leaky):
    found = by_name(perform(leaky))
    assert set(found) == {"membership", "membership_tpr", "reconstruction", "single_holder", "repeated_questions"}
    assert found["membership"].verdict == "leaks"
    assert found["membership"].low > 0.55
    assert found["reconstruction"].verdict == "leaks"
    assert not any(f.contradicts for f in found.values())
    table = np.load(leaky.parent / "rows.npz")
    split = json.loads((leaky / "manifest.json").read_text())["split"]
    for leak in found["reconstruction"].detail["leaks"]:
        assert leak["client"] in split["clients"]
        assert table["classes"][table["y"][leak["row"]]] == leak["class"]
        assert table["split"][leak["row"]] == "train"


def test_an_audit_gives_the_same_figures_again_and_touches_nothing(leaky):
    before = prints(leaky)
    first, second = (perform(leaky) for _ in range(2))
    assert first == second
    assert prints(leaky) == before
    assert oct((leaky / "audit.json").stat().st_mode)[-3:] == "600"


def test_a_private_run_does_not_leak(quiet):
    found = by_name(perform(quiet))
    assert "epsilon" in found
    assert all(f.verdict != "leaks" and not f.contradicts for f in found.values())
    assert found["epsilon"].low <= found["epsilon"].bound == 1.0
    assert found["membership"].detail["allowed_by_epsilon"] < 1


def test_replay_shows_what_the_server_saw(leaky, quiet):
    seen = replay(open_finished(leaky)).replies  # raises where the head's hash is another
    assert {s.handler for s in seen} == {"query.FedPFT_summarise"}
    assert [s.client for s in seen] == json.loads((leaky / "manifest.json").read_text())["clients"]
    lines_ = [json.loads(line) for line in (leaky / "messages.jsonl").read_text().splitlines()]
    assert len(seen) == sum(m["to"] == "server" and m["counted"] for m in lines_)
    assert all(unpack(s.value.mixtures) for s in seen)
    noisy = [replay(open_finished(quiet)).replies for _ in range(2)]
    for a, b in zip(*noisy, strict=True):
        assert a.value.totals.equal(b.value.totals)  # the run's own noise, not a second sample


@pytest.mark.parametrize(
    "method",
    [
        {"components": 2, "topology": "chain"},
        {"components": 2, "covariance": "full", "min_count": 2},
        {"components": 2, "counts": "withheld", "samples": 20},
    ],
)
def test_other_forms_of_the_method_are_read(tmp_path, method):
    found = by_name(perform(run(tmp_path, **method)))
    assert found["membership"].estimate > 0.5


@pytest.mark.parametrize(
    "method",
    [
        {"components": 1, "covariance": "full"},
        {"components": 1, "covariance": "spherical", "relation": "replace"},
    ],
)
def test_other_forms_of_noise_are_read(tmp_path, method):
    data = {"partition": {"name": "iid", "clients": 2}}
    found = by_name(perform(run(tmp_path, privacy=PRIVATE | {"target_epsilon": 8.0}, data=data, **method)))
    assert not found["epsilon"].contradicts


def test_pooled_sums_are_audited_as_the_server_sees_them(tmp_path):
    path = run(tmp_path, privacy=PRIVATE, components=1, covariance="spherical", pooled=True)
    found = by_name(perform(path))
    assert "epsilon" not in found  # it is against others than this server
    assert found["membership"].verdict == "leaks"


def test_a_class_at_one_client_is_named(tmp_path):
    data = {"partition": {"name": "by_class", "clients": 2, "classes_per_client": 2}}
    (found,) = perform(run(tmp_path, data=data), ["single_holder"])
    assert found.verdict == "leaks"
    assert found.estimate == 4
    for told in found.detail["classes"]:
        assert told["count_sent"] == told["count_true"]
        assert told["cosine_of_the_mean"] > 0.999


def test_a_private_class_at_one_client_lies_outside_of_the_promise(tmp_path):
    data = {"partition": {"name": "by_class", "clients": 2, "classes_per_client": 2}}
    features(tmp_path, n=2000, d=16)
    privacy = PRIVATE | {"target_epsilon": 8.0}
    (found,) = perform(
        run(tmp_path, privacy=privacy, data=data, components=1, covariance="spherical"), ["single_holder"]
    )
    assert found.verdict == "inconclusive"
    assert "protects single rows" in found.says


def test_a_false_claim_is_refuted(copy, capsys):
    change(copy, ledger__epsilon=0.01, result__epsilon=0.01)
    assert main(["audit", str(copy), "--format", "json"]) == 1
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]}
    assert found["epsilon"]["contradicts"]
    assert found["epsilon"]["low"] > 0.01
    assert found["epsilon"]["verdict"] == "leaks"


def test_too_little_noise_is_refuted(tmp_path):
    """A release at epsilon = 200 that claims to be one at 0.5."""
    privacy = PRIVATE | {"target_epsilon": 200.0}
    path = run(tmp_path, privacy=privacy, components=1, covariance="spherical")
    (found,) = perform(path, ["epsilon"])
    assert not found.contradicts
    change(path, ledger__epsilon=0.5, result__epsilon=0.5)
    (found,) = perform(path, ["epsilon"])
    assert found.contradicts


def test_the_command_line_and_the_report(copy, capsys):
    assert main(["audit", str(copy)]) == 0
    out, err = capsys.readouterr()
    assert "membership" in out.splitlines()[1]
    assert "A row that was in the fit" in out
    assert "with a recorder at the server" in err
    page = (copy / "report.html").read_text()
    assert '<section id="audit">' in page
    assert "Do components of the mixtures disclose single rows?" in page
    assert main(["audit", str(copy), "--attack", "membership", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result) == {"run", "findings"}
    assert {f["name"] for f in result["findings"]} == {"membership", "membership_tpr"}
    assert all(set(f) >= NAMES for f in result["findings"])
    kept = json.loads((copy / "audit.json").read_text())["findings"]
    names = {"membership", "membership_tpr", "reconstruction", "single_holder", "repeated_questions"}
    assert {f["name"] for f in kept} == names


def test_the_report_bears_what_is_no_audit(copy):
    assert '<section id="audit">' not in html.write(copy).read_text()
    for text in ("{", "[]", '{"findings": 3}', '{"findings": [4, {"name": "<b>", "detail": 1}]}'):
        (copy / "audit.json").write_text(text)
        page = html.write(copy).read_text()
        assert '<section id="audit">' in page
        assert "<b>" not in page.partition('<section id="audit">')[2]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--attack", "membershp"], 'did you mean "membership"'),
        (["--attack", "epsilon"], "claims no epsilon"),
        (["--attack", "inversion"], "it needs images"),
        (["--pictures", "x.npz"], "only the attack inversion"),
    ],
)
def test_an_attack_that_does_not_fit_is_refused(leaky, capsys, args, said):
    assert main(["audit", str(leaky), *args]) == 2
    assert said in capsys.readouterr().err


def test_runs_that_cannot_be_audited_are_refused(copy, tmp_path, capsys):
    def refused(said, path=copy):
        assert main(["audit", str(path)]) == 2
        assert said in capsys.readouterr().err

    refused("no such folder", tmp_path / "nothing")
    change(copy, split=None)
    refused("silos' own data")
    change(copy, split={}, fingerprints__data="0" * 64)
    refused("the data changed")
    change(copy, result=None)
    refused("is not finished")


def test_other_methods_are_refused_with_those_that_are_not(tmp_path, capsys):
    features(tmp_path)
    tables = {"data": {"path": str(tmp_path / "rows.npz")}, "model": {"name": "features"}}
    execute.run(tables | {"method": {"name": "fedavg", "rounds": 1}, "run": {"workers": 1}}, tmp_path / "avg")
    assert main(["audit", str(tmp_path / "avg"), "--attack", "reconstruction"]) == 2
    said = capsys.readouterr().err
    assert "--attack reconstruction: it does not read the messages of fedavg; attacks on this run: " in said
    assert all(f'"{name}"' in said for name in ("model_membership", "update_membership", "label_counts"))
    for name, why in {
        "text_canaries": "it reads models that write texts (tasks language_modelling, instruction, ",
        "regurgitation": 'and this run\'s task is "classification"',
        "row_norms": "no noise to the gradients of single rows",
        "row_canaries": "no noise to the gradients of single rows",
        "canaries": "no noise at the level of clients",
        "departure": "no client left the run",
    }.items():
        assert main(["audit", str(tmp_path / "avg"), "--attack", name]) == 2
        said = capsys.readouterr().err
        assert f"--attack {name}: " in said
        assert why in said
        assert "the messages of" not in said


@pytest.mark.parametrize("task", ["preference", "embedding", "multi_label", "regression"])
@pytest.mark.parametrize("name", ["text_canaries", "label_counts", "regurgitation"])
def test_an_attack_that_needs_another_task_names_the_task(task, name):
    experiment = SimpleNamespace(
        model=SimpleNamespace(task=task),
        method=SimpleNamespace(needs=SimpleNamespace(model="client", pooled=False)),
        method_name="fedavg",
    )
    run = SimpleNamespace(experiment=experiment, manifest={"model": {"kind": "text", "task": task}})
    why = audits()[name].why_unread(run)
    assert f"task is {task}" in why.replace('"', "")
    assert "fedavg" not in why


def test_lost_noise_is_refused(quiet, tmp_path):
    path = shutil.copytree(quiet, tmp_path / "copy")
    shutil.rmtree(path / "private" / "memory")
    with pytest.raises(InputError, match="cannot be drawn again"):
        replay(open_finished(path))


def test_another_result_is_an_error_not_a_finding(copy):
    change(copy, result__params_sha256="0" * 64)
    with pytest.raises(RunError, match="other parameters"):
        perform(copy)


def test_every_audit_is_found_by_its_file():
    blindfed = {"block_order", "ciphertext_weights", "encrypted_error"} | {
        "loss_labels",
        "other_clients",
        "server_view",
        "substitute_model",
    }
    fedpft = {"membership", "epsilon", "reconstruction", "single_holder", "inversion"}
    assert set(audits()) == blindfed | fedpft | {
        "extraction",
        "task_vector",
        "expert_membership",
        "canaries",
    } | {"row_canaries", "row_norms"} | {
        "model_membership",
        "update_membership",
        "label_counts",
        "head_rows",
    } | {"repeated_questions", "departure", "text_canaries", "regurgitation"}


def test_the_page_lists_every_audit_and_which_have_to_be_named():
    page = (Path(__file__).parents[2] / "docs/how-to/audit.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| .* \| (yes|no) \|$", page.partition("## All attacks")[2], re.MULTILINE)
    listed = {name: by_itself == "yes" for names, by_itself in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == {name: audit.by_default for name, audit in audits().items()}


@pytest.mark.proof
def test_the_costly_one_has_to_be_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inversion, "train", functools.partial(inverter.train, steps=5))
    monkeypatch.setattr(inversion, "TARGETS", 10)
    rng = np.random.default_rng(0)
    y = np.arange(120) % 2
    x = np.clip(rng.normal(80 + 90 * y[:, None, None, None], 30, (120, 8, 8, 3)), 0, 255).astype(np.uint8)
    np.savez(tmp_path / "pictures.npz", x=x, y=y, split=np.where(np.arange(120) < 60, "train", "test"))
    data = {"path": str(tmp_path / "pictures.npz"), "partition": {"name": "iid", "clients": 2}}
    tables = {"data": data, "model": {"name": "nano-vit"}, "method": {"name": "fedpft", "components": 2}}
    execute.run(tables | {"run": {"workers": 1}}, tmp_path / "run")
    assert "inversion" not in choose(open_finished(tmp_path / "run"))
    found = by_name(perform(tmp_path / "run", ["inversion"]))
    assert found.pop("inversion_rows").verdict == "inconclusive"  # the attacker has all test rows
    assert set(found) == {"inversion_features", "inversion_components", "inversion_samples"}
    for f in found.values():
        assert 0 <= f.low <= f.estimate <= f.high <= 1
        assert f.detail["psnr"] > 5
        assert f.detail["all"]["ssim"] <= f.detail["oracle"]["ssim"]
        assert f.detail["attacker"]["ssim"] <= f.detail["oracle"]["ssim"]
    np.savez(tmp_path / "own.npz", x=np.zeros((3, 8, 8, 3), np.uint8), y=np.zeros(3, np.int64))
    args = ["--attack", "inversion", "--pictures", str(tmp_path / "own.npz")]
    assert main(["audit", str(tmp_path / "run"), *args]) == 2
    assert "3 images to train on" in capsys.readouterr().err


def test_a_finding_as_text_and_as_json():
    rule = VerdictRule(("estimate < bound",))
    f = Finding("a", "Q?", 0.51234, None, float("nan"), 1.0, rule, "5 % of it.", True, {"x": np.float32(2)})
    assert f.to_dict()["high"] is None
    assert json.loads(json.dumps(f.to_dict()))["detail"] == {"x": 2.0}
    text = lines([f])
    assert "0.5123" in text
    assert "This refutes a claim of the run." in text


def test_a_handful_of_rows_has_no_say_in_the_sentence(monkeypatch):
    """Three rows with AUC 1 beside sixty at chance: the sentence names the class that has a verdict."""
    rng = np.random.default_rng(0)
    run = SimpleNamespace(run=None)
    view = SimpleNamespace(
        rng=lambda *purpose: np.random.default_rng(0), held_out=lambda *cell: np.arange(50), replay=run
    )
    monkeypatch.setattr(membership, "claim", lambda run: None)
    cells = [CellScores(members, rng.normal(size=50)) for members in (np.full(3, 9.0), rng.normal(size=60))]
    scores = MemberScores(cells, lambda confidence: np.random.default_rng(0), 50)
    found = membership._auc(view, scores)
    assert found.detail["by_rows_of_the_class"]["1 to 9"]["auc"] == 1.0
    assert "for classes of 50 to 199 rows at a client" in found.says
