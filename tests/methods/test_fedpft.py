"""FedPFT: its messages, the head that the server fits to them, and its refusals."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedfm
from fedfm.api import predict, studies
from fedfm.audits.audit import perform
from fedfm.config.experiment import Experiment
from fedfm.core.client import Client, on_client
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.methods.fedpft import private
from fedfm.methods.fedpft.encoding import pack, unpack
from fedfm.methods.fedpft.fedpft import FedPFT, ForwardedSummary, PeerReply, Summary
from fedfm.methods.fedpft.topology import topological
from fedfm.privacy.gaussian import epsilon_of, paper_sigma
from fedfm.privacy.spec import PrivacySpec
from fedfm.runtime import client_memory
from fedfm.runtime.progress import Progress
from small import checked

D, CLASSES = 6, 4


@pytest.fixture
def file(tmp_path):
    """800 rows of four well-separated classes, in four domains."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, 800)
    centres = rng.normal(size=(CLASSES, D)) * 3
    x = (centres[y] + rng.normal(size=(800, D))).astype(np.float32)
    domain = np.array([f"d{i % 4}" for i in range(800)])
    np.savez(tmp_path / "f.npz", x=x, y=y, domain=domain)
    return tmp_path / "f.npz"


def tables(file, partition=None, privacy=None, run=None, **method):
    out = {
        "data": {"path": str(file), "partition": partition or {"name": "dirichlet", "alpha": 0.3, "clients": 4}},
        "model": {"name": "features"},
        "method": {"name": "fedpft", **method},
        "run": {"workers": 1, **(run or {})},
    }
    return out | ({"privacy": privacy} if privacy else {})


BY_DOMAIN = {"name": "by_column", "column": "domain"}
RECORD = {"unit": "record", "target_epsilon": 4.0, "delta": 1e-5}
PRIVATE = {"covariance": "spherical", "components": 1}


@pytest.mark.parametrize("covariance", ["spherical", "diag", "full"])
def test_fedpft_learns_in_one_round_and_reports_what_it_sent(file, tmp_path, covariance):
    result = fedfm.run(tables(file, covariance=covariance, components=2), tmp_path / "run")
    central = fedfm.run(tables(file) | {"method": {"name": "centralised"}}, tmp_path / "central")
    assert result["rounds"] == 1
    assert result["accuracy"] > central["accuracy"] - 0.03
    told = result["details"]
    assert told["formula_bytes"] <= result["bytes_up"] < told["formula_bytes"] + 4 * 4096
    numbers = {"spherical": D + 2, "diag": 2 * D + 1, "full": 2 * D + (D * D - D) // 2 + 1}[covariance]
    components = sum(k for used in told["components_used"].values() for k in used.values())
    assert told["formula_bytes"] == 2 * numbers * components
    assert result["epsilon"] is None


def test_a_summary_is_the_moments_of_each_class(file, tmp_path):
    seen = record_summaries(file, tmp_path, covariance="diag", components=1, transport="float32", min_count=1)
    data = np.load(file)
    for _, rows, summary in seen:
        x, y = rows.tensors["features"].numpy(), rows.labels.numpy()
        assert sorted(summary.labels) == sorted(np.unique(y))
        for c, n, g in zip(summary.labels, summary.counts, unpack(summary.mixtures), strict=True):
            of_class = x[y == c].astype(np.float64)
            assert n == len(of_class)
            assert g.means[0] == pytest.approx(of_class.mean(0), abs=1e-4)
            assert g.scales[0] ** 2 == pytest.approx(of_class.var(0), rel=2e-3, abs=1e-5)
    assert data["x"].shape == (800, D)


def record_summaries(file, tmp_path, **method):
    """(client, its rows, what it sent) of a run in this process."""
    seen = []

    def summarise(self, client):
        summary = original(self, client)
        seen.append((client.id, client.data.train, summary))
        return summary

    original = FedPFT.summarise
    summarise.__annotations__ = original.__annotations__
    on_client(summarise)
    summarise.__name__ = "summarise"
    summarise.__globals__.update(Client=Client, Summary=Summary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedPFT, "summarise", summarise)
        fedfm.run(tables(file, **method), tmp_path / "recorded")
    return seen


def test_small_classes_are_withheld_and_k_is_what_they_carry(file, tmp_path):
    result = fedfm.run(tables(file, components=10, min_count=30), tmp_path / "run")
    used, withheld = result["details"]["components_used"], result["details"]["withheld"]
    assert withheld
    assert all(1 <= k <= 10 for u in used.values() for k in u.values())
    assert any(k < 10 for u in used.values() for k in u.values())
    budget = fedfm.run(tables(file, components=5, budgets={"client-00": 1}, min_count=1), tmp_path / "budget")
    used = budget["details"]["components_used"]
    assert set(used["client-00"].values()) == {1}
    assert max(k for u in used.values() for k in u.values()) > 1


@pytest.mark.parametrize("topology", ["star", "chain"])
def test_a_client_without_a_large_class_sends_no_mixture_and_is_not_left_out(file, tmp_path, topology):
    rows = dict(np.load(file))
    few = np.sort(np.concatenate([np.flatnonzero(rows["y"] == c)[:3] for c in range(CLASSES)]))
    rows["domain"][few] = "aa"  # first of a chain: its successor is handed nothing
    np.savez(file, **rows)
    result = fedfm.run(tables(file, BY_DOMAIN, components=2, topology=topology), tmp_path / "run")
    told = result["details"]
    assert result["excluded"] == []
    assert told["components_used"]["aa"] == {}
    assert told["withheld"]["aa"]  # a class each, but for those whose rows are test rows
    assert result["accuracy"] > 0.9


@pytest.mark.parametrize("topology", ["star", "chain"])
def test_an_outlier_of_a_class_is_no_component(file, tmp_path, topology):
    """The class has rows enough for four components, and one row far from all others: EM alone gives it one."""
    rows = dict(np.load(file))
    far = int(np.flatnonzero(rows["y"] == 0)[5])
    rows["x"][far] += 50
    np.savez(file, **rows)
    at = tmp_path / "run"
    used = fedfm.run(tables(file, BY_DOMAIN, components=4, topology=topology), at)["details"]["components_used"]
    assert min(k["0"] for k in used.values()) < 4
    (found,) = (f for f in perform(at, ["reconstruction"]) if f.name == "reconstruction")
    assert (found.verdict, found.detail["leaking_components"]) == ("holds", 0)


def test_counts_can_be_withheld(file, tmp_path):
    seen = record_summaries(file, tmp_path, counts="withheld", samples=50, components=1)
    assert {n for _, _, s in seen for n in s.counts} == {50}
    with pytest.raises(InputError, match=r"method\.samples"):
        Experiment.from_dict(tables(file, counts="withheld"))


def test_withheld_counts_do_not_make_up_raw_bytes(file, tmp_path):
    result = fedfm.run(tables(file, counts="withheld", samples=5, components=3), tmp_path / "run")
    assert "raw_feature_bytes" not in result["details"]
    assert not result["details"]["warnings"]


def test_a_budget_of_nobody_is_refused(file, tmp_path):
    with pytest.raises(InputError, match=r'method.budgets: "south" is none of the clients client-00, '):
        fedfm.run(tables(file, budgets={"south": 2}), tmp_path / "run")


class Miscounting(FedPFT):
    """A client counts fewer errors than none; another sends a divergence that is not a number."""

    @on_client
    def summarise(self, client: Client) -> Summary:
        honest = super().summarise(client)
        return replace(honest, kl=[float("inf")] * len(honest.kl)) if client.id == "client-02" else honest

    @on_client
    def count_errors(self, client: Client, w: Params) -> dict[str, int]:
        match client.id:
            case "client-00":
                return {"errors": -1000, "rows": 10}
            case "client-01":
                return {"rows": 10}
        return super().count_errors(client, w)


def test_false_counts_of_errors_are_left_out(file, tmp_path):
    changed = tables(file, {"name": "iid", "clients": 5}, run={"seed": 1})
    changed["method"] = {"name": "tests_fedpft_lying:Miscounting", "components": 1, "verify": True, "bound": True}
    sys.modules["tests_fedpft_lying"] = sys.modules[__name__]
    try:
        result = fedfm.run(changed, tmp_path / "run")
    finally:
        del sys.modules["tests_fedpft_lying"]
    assert sorted(e["client"] for e in result["excluded"]) == ["client-00", "client-01", "client-02"]
    assert 0 <= result["details"]["verified_error"] <= 1
    assert np.isfinite(result["details"]["bound"]["printed"])


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("changes", "code"), [({"scale": 1e30}, "E_NORM"), ({"scale": 1e12}, "E_NORM"), ({"scale": 1e300}, "E_NONFINITE")]
)
@pytest.mark.parametrize("covariance", ["spherical", "diag", "full"])
def test_means_beyond_any_feature_are_left_out_and_change_nothing(
    file, tmp_path, monkeypatch, covariance, changes, code
):
    summary, found = FedPFT._summary, []

    def without(self, client, *rest):
        if client.id == "client-01":
            raise ValueError("no")
        return summary(self, client, *rest)

    def scaled(self, client, *rest):
        sent = summary(self, client, *rest)
        return replace(sent, mixtures=replace(sent.mixtures, **changes)) if client.id == "client-01" else sent

    for i, half in enumerate((without, scaled)):
        monkeypatch.setattr(FedPFT, "_summary", half)
        found.append(fedfm.run(tables(file, covariance=covariance, components=2), tmp_path / str(i)))
    assert [(e["client"], e["code"]) for e in found[1]["excluded"]] == [("client-01", code)]
    assert found[0]["params_sha256"] == found[1]["params_sha256"]


@pytest.mark.parametrize("change", [{"totals": 1e6}, {"totals": 1e14}, {"rows": -1}, {"rows": 1 << 62}])
def test_noisy_sums_that_no_rows_make_are_left_out(file, tmp_path, monkeypatch, change):
    release = private.noisy_sums

    def lying(client, plan):
        sent = release(client, plan)
        if client.id != "client-01":
            return sent
        return replace(sent, totals=sent.totals + change["totals"]) if "totals" in change else replace(sent, **change)

    monkeypatch.setattr(private, "noisy_sums", lying)
    result = fedfm.run(tables(file, privacy=RECORD, **PRIVATE), tmp_path / "run")
    code = "E_NORM" if "totals" in change else "E_FIELD"
    assert [(e["client"], e["code"]) for e in result["excluded"]] == [("client-01", code)]


def test_honest_noisy_sums_are_never_too_large():
    """The bound of 200 releases of few rows under much noise; on average they use a third of it."""
    for epsilon in (0.05, 0.5, 8.0):
        plan = FedPFT().protect(PrivacySpec(**RECORD | {"target_epsilon": epsilon})).privacy
        x = np.repeat(np.eye(D)[:1], 40, axis=0)
        for i in range(200):
            cell = private.release(x, plan, bytes([i]) * 32, "c")
            private._check_norm(cell, plan, D, 0)


def test_a_shuffler_forgets_who_sent_what(file, tmp_path):
    result = fedfm.run(tables(file, components=2, shuffle=True), tmp_path / "run")
    assert result["details"]["components_used"] == {}
    assert result["accuracy"] > 0.9
    assert (
        fedfm.run(tables(file, components=2, shuffle=True), tmp_path / "b")["params_sha256"] == result["params_sha256"]
    )


def test_a_chain_gets_better_and_counts_everybody_once(file, tmp_path):
    result = fedfm.run(tables(file, BY_DOMAIN, topology="chain", components=2), tmp_path / "chain")
    told = result["details"]
    assert told["order"] == ["d0", "d1", "d2", "d3"]
    assert len(told["chain_accuracy"]) == 4
    assert told["chain_accuracy"][-1] == result["accuracy"]
    assert told["dropped"] == []


class Silent(FedPFT):
    """The second client of a line fails."""

    @on_client
    def pass_on(self, client: Client, received: list[ForwardedSummary]) -> PeerReply:
        if client.id == "d1":
            raise ValueError("no rows today")
        return super().pass_on(client, received)


def test_a_line_goes_on_without_a_client_that_fails(file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tests_fedpft_silent", sys.modules[__name__])
    line = tables(file, BY_DOMAIN, run={"min_clients": 2})
    line["method"] = {"name": "tests_fedpft_silent:Silent", "topology": "chain", "components": 2}
    result = fedfm.run(line, tmp_path / "run")
    assert [e["client"] for e in result["excluded"]] == ["d1"]
    assert result["details"]["order"] == ["d0", "d2", "d3"]
    line["run"]["min_clients"] = 4
    with pytest.raises(RunError, match="3 of 4 clients"):
        fedfm.run(line, tmp_path / "few")


def test_a_diamond_does_not_count_its_ancestor_twice(file, tmp_path):
    edges = [["d0", "d1"], ["d0", "d2"], ["d1", "d3"], ["d2", "d3"]]
    result = fedfm.run(tables(file, BY_DOMAIN, topology="dag", edges=edges, components=2), tmp_path / "dag")
    assert len(result["details"]["dropped"]) == 1
    assert result["details"]["dropped"][0].startswith("d3: the summary of d")
    assert result["accuracy"] > 0.9


def test_cycles_are_refused():
    assert topological({"a": [], "b": ["a"], "c": ["a", "b"]}) == ["a", "b", "c"]
    with pytest.raises(InputError, match="cycle"):
        checked(FedPFT(topology="dag", edges=(("a", "b"), ("b", "a"))))


@pytest.mark.each_value
@pytest.mark.parametrize("covariance", ["spherical", "diag", "full"])
@pytest.mark.parametrize("relation", ["add_remove", "replace"])
def test_private_runs_state_their_epsilon_and_use_fresh_noise(file, tmp_path, covariance, relation, monkeypatch):
    method = PRIVATE | {"covariance": covariance, "relation": relation}
    result = fedfm.run(tables(file, privacy=RECORD, **method), tmp_path / "a")
    assert result["epsilon"] == pytest.approx(4.0)
    ledger = fedfm.load_run(tmp_path / "a").manifest["ledger"]
    assert ledger["epsilon"] == result["epsilon"]
    assert ledger["entries"][-1]["relation"] == relation
    again = fedfm.run(tables(file, privacy=RECORD, **method), tmp_path / "b")
    assert again["params_sha256"] != result["params_sha256"]
    monkeypatch.setattr(client_memory, "entropy", lambda n: bytes(n))
    same = [fedfm.run(tables(file, privacy=RECORD, **method), tmp_path / str(i)) for i in range(2)]
    assert same[0]["params_sha256"] == same[1]["params_sha256"]


def test_under_privacy_nothing_leaves_but_the_release(file, tmp_path):
    result = fedfm.run(tables(file, privacy=RECORD, **PRIVATE), tmp_path / "run")
    lines = (tmp_path / "run" / "messages.jsonl").read_text().splitlines()
    assert {json.loads(line)["handler"] for line in lines} == {"query.FedPFT_release"}
    assert set(result["client_accuracy"].values()) == {None}
    assert result["local_accuracy"] is None
    assert result["accuracy"] == result["global_accuracy"]
    assert "no client is asked for scores" in (tmp_path / "run" / "report.html").read_text()


def test_every_seed_of_a_private_study_is_paid_for(file, tmp_path):
    experiment = Experiment.from_dict(tables(file, privacy=RECORD, **PRIVATE))
    found = studies.seeds(experiment, [0, 1, 2], tmp_path / "s", Progress())
    assert found["epsilon"] == pytest.approx(3 * 4.0)
    assert found["delta"] == pytest.approx(3 * fedfm.load_run(tmp_path / "s/seed-0").manifest["guarantee"]["delta"])
    assert f"12  in total, with delta {found['delta']:g}: each seed is a new release" in studies.seeds_text(found)


@pytest.mark.parametrize(
    "topology",
    [{"topology": "chain"}, {"topology": "dag", "edges": [["client-00", "client-01"], ["client-00", "client-02"]]}],
)
def test_along_a_private_line_only_the_release_reads_rows(file, tmp_path, topology, monkeypatch):
    """Other rows behind the same noisy sums give the same head: refits and heads spend nothing."""
    released = {}

    def once(client, plan):
        return released.setdefault(client.id, original(client, plan))

    original = private.noisy_sums
    monkeypatch.setattr(private, "noisy_sums", once)
    method = {"components": 3, "covariance": "diag", **topology}
    first = fedfm.run(tables(file, privacy=RECORD, **method), tmp_path / "a")
    assert len(released) == 4
    data = dict(np.load(file))
    np.savez(tmp_path / "other.npz", **data | {"x": np.roll(data["x"], 7, axis=0)})
    other = fedfm.run(tables(tmp_path / "other.npz", privacy=RECORD, **method), tmp_path / "b")
    assert other["params_sha256"] == first["params_sha256"]
    assert first["epsilon"] == pytest.approx(4.0)
    (entry,) = fedfm.load_run(tmp_path / "a").manifest["ledger"]["entries"]
    one = FedPFT(covariance="diag").protect(PrivacySpec(**RECORD)).privacy
    assert entry["sigma"] == pytest.approx(one.sum_sigma(1))  # K = 3 is of the refits
    assert {json.loads(line)["handler"] for line in messages(tmp_path / "a")} == {"query.FedPFT_pass_noisy"}
    assert set(first["client_accuracy"].values()) == {None}


def test_a_private_line_learns_and_bears_a_client_that_has_nothing_to_tell(file, tmp_path, monkeypatch):
    strong = RECORD | {"target_epsilon": 1000.0}
    noisy = fedfm.run(tables(file, privacy=strong, components=3, topology="chain"), tmp_path / "strong")
    assert noisy["accuracy"] > fedfm.run(tables(file, topology="chain"), tmp_path / "plain")["accuracy"] - 0.05
    monkeypatch.setattr(client_memory, "entropy", lambda n: bytes(n))
    weak = RECORD | {"target_epsilon": 0.01}
    nothing = fedfm.run(tables(file, privacy=weak, components=3, topology="chain"), tmp_path / "weak")
    assert not nothing["excluded"]
    findings = perform(tmp_path / "strong", ["membership"])
    assert {f.name for f in findings} == {"membership", "membership_tpr"}


def test_the_ledger_has_an_epsilon_before_the_message_is_sent(file, tmp_path, monkeypatch):
    monkeypatch.setattr(private, "to_gaussian", lambda *args, **options: None)  # as where no class exceeds
    with pytest.raises(RunError, match="no class exceeds"):
        fedfm.run(tables(file, privacy=RECORD | {"target_epsilon": 1e-6}, **PRIVATE), tmp_path / "failed")
    ledger = fedfm.load_run(tmp_path / "failed").manifest["ledger"]
    assert ledger["epsilon"] == pytest.approx(1e-6)
    assert len(ledger["entries"]) == 1
    with pytest.raises(RunError, match="no class exceeds"):
        fedfm.resume(tmp_path / "failed")
    assert fedfm.load_run(tmp_path / "failed").manifest["ledger"] == ledger  # the same release, not another
    start = fedfm.run(tables(file, privacy=RECORD, rounds=0, **PRIVATE), tmp_path / "start")
    assert start["epsilon"] is None
    assert not fedfm.load_run(tmp_path / "start").manifest["ledger"]["entries"]


@pytest.mark.proof
def test_an_export_of_a_private_head_says_what_it_takes(tmp_path):
    table = tables("") | {"data": {"name": "digits", "limit": 300, "partition": {"name": "iid", "clients": 2}}}
    table |= {"model": {"name": "nano-vit"}, "method": {"name": "fedpft", **PRIVATE}}
    fedfm.run(table | {"privacy": RECORD | {"target_epsilon": 50.0}}, tmp_path / "run")
    with pytest.raises(InputError, match="divided by their Euclidean norm"):
        predict.export(tmp_path / "run", "hf", tmp_path / "hf")
    predict.export(tmp_path / "run", "torch", tmp_path / "torch")
    for folder in (tmp_path / "torch", tmp_path / "run" / "adapter"):
        assert (
            json.loads((folder / "fedfm.json").read_text())["head_takes"] == "features divided by their Euclidean norm"
        )
    fedfm.run(table, tmp_path / "plain")
    predict.export(tmp_path / "plain", "hf", tmp_path / "plain-hf")
    assert "head_takes" not in json.loads((tmp_path / "plain" / "adapter" / "fedfm.json").read_text())


def test_a_large_epsilon_is_nearly_no_noise(file, tmp_path):
    strong = RECORD | {"target_epsilon": 1000.0}
    noisy = fedfm.run(tables(file, privacy=strong, **PRIVATE), tmp_path / "noisy")
    plain = fedfm.run(tables(file, **PRIVATE), tmp_path / "plain")
    assert noisy["accuracy"] > plain["accuracy"] - 0.05


def test_one_noisy_sum_over_the_federation_needs_only_a_mean(file, tmp_path, monkeypatch):
    monkeypatch.setattr(client_memory, "entropy", lambda n: bytes(n))
    weak = RECORD | {"target_epsilon": 0.5}
    many = {"name": "iid", "clients": 40}
    pooled = fedfm.run(tables(file, many, privacy=weak, pooled=True, **PRIVATE), tmp_path / "pooled")
    alone = fedfm.run(tables(file, many, privacy=weak, **PRIVATE), tmp_path / "alone")
    assert pooled["accuracy"] > alone["accuracy"] + 0.2
    handlers = {line.split('"handler": "')[1].split('"')[0] for line in messages(tmp_path / "pooled")}
    assert handlers == {"train.FedPFT_sums"}
    entry = fedfm.load_run(tmp_path / "pooled").manifest["ledger"]["entries"][-1]
    assert "not against the server" in entry["note"]


def messages(run):
    return [line for line in (run / "messages.jsonl").read_text().splitlines() if '"counted": true' in line]


def test_the_report_says_for_which_neighbours_and_against_whom(file, tmp_path):
    fedfm.run(tables(file, privacy=RECORD, pooled=True, **PRIVATE), tmp_path / "pooled")
    report = (tmp_path / "pooled" / "report.html").read_text()
    assert "Neighbours: data sets that differ by one row more or less." in report
    assert "Note: against those who see the head, not against the server, which adds the noise." in report
    assert "Ledger: 1\N{NO-BREAK SPACE}entry<" in report
    fedfm.run(tables(file, privacy=RECORD, relation="replace", **PRIVATE), tmp_path / "replace")
    report = (tmp_path / "replace" / "report.html").read_text()
    assert "with the same label; the counts of classes are public" in report
    assert "sums of every class, without headers" in report
    assert "by equations (10) to (12)" not in report


def test_the_papers_noise_is_larger_and_refused_where_it_fails(file, tmp_path):
    paper = PRIVATE | {"relation": "replace", "calibration": "paper"}
    result = fedfm.run(tables(file, privacy=RECORD | {"target_epsilon": 1.0}, **paper), tmp_path / "paper")
    assert result["details"]["times_paper_noise"] == pytest.approx(1.0)
    assert result["epsilon"] < 1.0
    full = paper | {"covariance": "full"}
    with pytest.raises(InputError, match="not"):
        fedfm.run(tables(file, privacy=RECORD | {"target_epsilon": 600.0}, **full), tmp_path / "fails")


def test_the_papers_other_reading_of_the_bound_is_reported(file, tmp_path):
    """Theorem 4.1 with the client's 200 rows for n: a class of 50 has a quarter of the noise."""
    even = np.load(file)
    order = np.concatenate([np.flatnonzero(even["y"] == c)[:150] for c in range(CLASSES)])
    np.savez(tmp_path / "even.npz", x=even["x"][order], y=even["y"][order], split=np.array(["train"] * len(order)))
    other = PRIVATE | {"relation": "replace", "calibration": "paper_client"}
    iid = {"name": "iid", "clients": 2}
    result = fedfm.run(tables(tmp_path / "even.npz", iid, privacy=RECORD, **other), tmp_path / "run")
    rows = sum(result_rows(tmp_path / "run"))
    by_class = paper_sigma(4.0, 1e-5, rows / 2) * rows / 2 / CLASSES
    assert result["details"]["noise_std_of_sums"] == pytest.approx(by_class, rel=0.05)
    assert result["details"]["times_paper_noise"] == pytest.approx(CLASSES, rel=0.05)
    assert result["epsilon"] is None
    (said,) = result["details"]["warnings"]
    n = round(rows / 2 / CLASSES)
    spent = epsilon_of(paper_sigma(4.0, 1e-5, round(rows / 2)), 2 / n, 1e-5)  # sum sensitivity 2, of n rows
    assert "no epsilon is claimed" in said
    assert f"truly spends {spent:.3g}," in said
    assert spent > 4.0


def result_rows(run):
    split = json.loads((run / "private" / "data.json").read_text())["split"]
    return [c["train"]["rows"] for c in split["clients"].values()]


def test_the_bound_is_printed_and_vacuous_and_errors_can_be_counted(file, tmp_path):
    result = fedfm.run(tables(file, components=1, bound=True, verify=True), tmp_path / "run")
    found = result["details"]["bound"]
    assert found["ours"] >= result["details"]["verified_error"]
    assert found["printed"] > found["ours"]
    assert 0 <= result["details"]["verified_error"] < 0.2


class Lying(FedPFT):
    """Some clients send what cannot be used."""

    @on_client
    def summarise(self, client: Client) -> Summary:
        honest = super().summarise(client)
        mixtures = unpack(honest.mixtures)
        match client.id:
            case "client-00":
                return replace(honest, labels=[c + 90 for c in honest.labels])
            case "client-01":
                return replace(honest, counts=[-5 for _ in honest.counts])
            case "client-02":
                numbers = honest.mixtures.numbers.clone()
                numbers[-1] = -abs(numbers[-1]) - 1
                return replace(honest, mixtures=replace(honest.mixtures, numbers=numbers))
            case "client-05":
                return replace(honest, withheld=honest.labels[:1], withheld_rows=1)
            case "client-06":
                return replace(honest, withheld_rows=3)
            case "client-03":
                wider = [replace(g, means=np.repeat(g.means, 2, 1), scales=np.repeat(g.scales, 2, 1)) for g in mixtures]
                return replace(honest, mixtures=pack(wider, "float32"))
            case "client-04":
                numbers = torch.full_like(honest.mixtures.numbers, torch.nan)
                return replace(honest, mixtures=replace(honest.mixtures, numbers=numbers))
        return honest


def test_another_adaptation_than_a_head_is_refused(file):
    changed = tables(file)
    changed["data"], changed["model"] = {"name": "digits"}, {"name": "nano-vit", "adaptation": {"name": "lora"}}
    with pytest.raises(InputError, match=r'adaptation.*"fedpft" takes "head" only'):
        Experiment.from_dict(changed)


def test_federate_which_trains_a_module_refuses_it(tmp_path):
    rows = [(torch.randn(4), i % 2) for i in range(20)]
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    with pytest.raises(InputError, match="no client optimiser"):
        fedfm.federate(
            module,
            clients={"a": rows, "b": rows},
            loss=torch.nn.functional.cross_entropy,
            method="fedpft",
            rounds=1,
            out=tmp_path / "run",
        )


def test_lying_clients_are_left_out_and_nothing_is_lost(file, tmp_path):
    iid = {"name": "iid", "clients": 9}
    changed = tables(file, iid, components=2, run={"min_clients": 1})
    changed |= {"method": {"name": "tests_fedpft_lying:Lying", "components": 2}}
    sys.modules["tests_fedpft_lying"] = sys.modules[__name__]
    try:
        result = fedfm.run(changed, tmp_path / "run")
    finally:
        del sys.modules["tests_fedpft_lying"]
    assert sorted(e["client"] for e in result["excluded"]) == [f"client-0{i}" for i in range(7)]
    assert result["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"components": 0}, "method.components"),
        ({"covariance": "tied"}, "method.covariance"),
        ({"rounds": 3}, "one round"),
        ({"min_count": 0}, "min_count"),
        ({"topology": "dag"}, "edges"),
        ({"budgets": {"client-00": 0}}, "client-00"),
        ({"head": {"l2": -1.0}}, "method.head.l2"),
        ({"transport": "float8"}, "transport"),
        ({"smoothing": float("inf")}, "method.smoothing"),
        ({"samples": 2**20 + 1}, "method.samples"),
        ({"head": {"l2": float("inf")}}, "method.head.l2"),
        ({"head": {"learning_rate": float("inf")}}, "method.head.learning_rate"),
    ],
)
def test_settings_that_make_no_sense_are_refused(file, wrong, said):
    with pytest.raises(InputError, match=said):
        Experiment.from_dict(tables(file, **wrong))


@pytest.mark.parametrize(
    ("privacy", "method", "said"),
    [
        ({"target_epsilon": -1.0}, PRIVATE, "target_epsilon"),
        ({"delta": 1.5}, PRIVATE, "delta"),
        ({"unit": "client"}, PRIVATE, "record"),
        ({}, {"components": 3, "pooled": True}, "components"),
        ({}, PRIVATE | {"components": 2}, "components = 2: expected 1"),
        ({}, PRIVATE | {"budgets": {"c0": 2}}, "budgets"),
        ({}, PRIVATE | {"topology": "chain", "pooled": True}, "pooled"),
        ({}, PRIVATE | {"topology": "chain", "calibration": "paper_client", "relation": "replace"}, "calibration"),
        ({}, PRIVATE | {"pooled": True, "calibration": "paper", "relation": "replace"}, "calibration"),
        ({}, PRIVATE | {"verify": True}, "verify"),
        ({}, PRIVATE | {"shuffle": True}, "shuffle"),
        ({}, PRIVATE | {"counts": "withheld", "samples": 50}, "counts"),
        ({"mechanism": "dp_sgd"}, PRIVATE, "mechanism"),
        ({"aggregator": "secagg"}, PRIVATE, r"looks at single replies \(release\)"),
    ],
)
def test_promises_that_cannot_be_kept_are_refused(file, privacy, method, said):
    with pytest.raises(InputError, match=said):
        Experiment.from_dict(tables(file, privacy=RECORD | privacy, **method))
    with pytest.raises(InputError, match="no mechanism of its own"):
        Experiment.from_dict(tables(file, privacy=RECORD) | {"method": {"name": "fedavg"}})
