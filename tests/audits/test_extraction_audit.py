"""The audit of FedBaF end to end, on a vision transformer of 3,000 weights."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch

from fedfm.api import execute
from fedfm.audits import extraction, fedbaf_coalition
from fedfm.audits.audit import perform
from fedfm.audits.extraction import Clipped, disclosure_rule, recover, reverse_mean
from fedfm.audits.fedbaf_coalition import Pull, Rounds, rounds_to_keep
from fedfm.audits.inference.extraction import relative_error
from fedfm.audits.replay import open_finished, replay
from fedfm.core.client import Update
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedbaf import fedbaf
from fedfm.methods.fedbaf.fedbaf import FedBaF
from fedfm.reports import html

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two random models of one shape: the one that is trained from random weights, and the server's secret."""
    from transformers import ViTConfig, ViTForImageClassification

    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("model", "secret")):
        torch.manual_seed(seed)
        config = ViTConfig(**VISION, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        module = ViTForImageClassification(config)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.05 * torch.randn(p.shape))  # biases and norms differ, too
        module.save_pretrained(root / name)
        processor = {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": 8, "width": 8},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
        (root / name / "preprocessor_config.json").write_text(json.dumps(processor))
    return root


def run(folder, name, settings=None, **method):
    """A finished run of six clients."""
    tables = {
        "data": {"name": "digits", "limit": 240, "partition": {"name": "iid", "clients": 6}},
        "model": {"name": str(folder / "model"), "weights": "random", "adaptation": {"name": "full"}},
        "method": {
            "name": "fedbaf",
            "foundation": str(folder / "secret"),
            "rounds": 3,
            "local": {"learning_rate": 0.05, "batch_size": 16},
            **method,
        },
        "run": {"seed": 3, "workers": 1, "evaluate_every": 0, **(settings or {})},
    }
    execute.run(tables, folder / name)
    return folder / name


@pytest.fixture(scope="module")
def default(folder):
    path = run(folder, "default")
    return path, {f.name: f for f in perform(path, ["extraction"])}


def watched(path):
    """(rounds as the audit keeps them, the replay)."""
    current = open_finished(path)
    rounds = Rounds.of_run(current)
    return rounds, replay(current, watched={"extraction": rounds}, keep=False)


def everyone(path):
    """(relative error of what all clients compute, rounds, replay)."""
    rounds, again = watched(path)
    x, _ = recover(rounds.lines(again.population.clients), rounds.method, rounds.target.groups, exact=True)
    return relative_error(x, rounds.target.truth), rounds, again


@pytest.mark.proof
def test_everyone_together_computes_the_model(default):
    _, found = default
    first = next(iter(found.values()))
    assert first.name == "extraction.all_colluding"
    assert first.verdict == "leaks"
    assert first.estimate < 1e-4
    assert "exact to rounding" in first.says
    assert max(first.detail["by_tensor"].values()) < 1e-3
    ability = first.detail["ability"]
    assert ability["recovered"]["cosine"] > 0.999
    assert ability["start"]["cosine"] < 0.9
    assert ability["recovered"]["probe"] == pytest.approx(ability["foundation"]["probe"], abs=0.02)
    assert [r["round"] for r in first.detail["curve"]] == [1, 2, 3]


def test_hidden_sums_change_nothing(default):
    _, found = default
    assert found["extraction.hidden_sums"].estimate == found["extraction.all_colluding"].estimate
    assert found["extraction.hidden_sums"].verdict == "leaks"


def test_the_attack_uses_one_thread_and_restores_the_number_of_threads(folder, monkeypatch):
    """Threads that wait for each other took seven times the time of one."""
    from threadpoolctl import threadpool_info

    seen, true_recover = [], extraction.recover

    def recover(*args, **keys):
        blas = {p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas"}
        seen.append((torch.get_num_threads(), blas))
        return true_recover(*args, **keys)

    path = run(folder, "threads", rounds=2)
    monkeypatch.setattr(extraction, "recover", recover)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        perform(path, ["extraction"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen
    assert all(found == (1, {1}) for found in seen)


def test_some_only_estimate_it(default):
    _, found = default
    few = [found[f"extraction.{name}"].estimate for name in ("colluding_50", "one_client")]
    assert 100 * found["extraction.all_colluding"].estimate < min(few)
    assert max(few) < 0.2
    one = found["extraction.one_client"]
    assert one.low <= one.estimate <= one.high
    assert len(one.detail["errors"]) == 6
    assert "extraction.colluding_10" not in found  # nobody


def test_one_active_client(default):
    _, found = default
    told = found["extraction.active_client"].detail["variants"]
    assert told["cap = none"]["pull"] > 3 * told["cap = reference"]["pull"]
    assert told["cap = none"]["as_sent"] < told["cap = reference"]["as_sent"]
    watching, checked = told["if it had sent its honest update"], told["cap = reference and a norm check at the server"]
    assert checked["as_sent"] == pytest.approx(watching["as_sent"], rel=0.2)
    assert watching["upload"] == 1.0 < told["cap = none"]["upload"]


def test_the_audit_leaves_the_run_as_it_was_and_says_its_verdicts(default):
    path, found = default
    kept = json.loads((path / "audit.json").read_text())["findings"]
    assert {f["name"] for f in kept} == set(found)
    shown = (path / "metrics.jsonl").read_text() + (path / "manifest.json").read_text()
    assert '"tau' not in shown
    page = html.write(path).read_text()
    assert "Relative error of the foundation model that coalitions of clients compute" in page
    assert "Error by tensor" in page


@pytest.mark.sample("fedavg", "scaffold")
@pytest.mark.parametrize(
    "base",
    [
        {"name": "fedavg"},
        {"name": "fedprox", "mu": 0.1},
        {"name": "fedadam", "server_learning_rate": 0.1},
        {"name": "scaffold"},
    ],
    ids=lambda base: base["name"],
)
def test_clients_compute_the_servers_own_aggregate(folder, base, monkeypatch):
    """w' from replies alone, bit for bit what the server mixed."""
    path = run(folder, f"base-{base['name']}", base=base, rounds=2)
    mixed = []
    true_mix = fedbaf.mix
    monkeypatch.setattr(fedbaf, "mix", lambda w, *rest: mixed.append(w) or true_mix(w, *rest))
    rounds, again = watched(path)
    lines = rounds.lines(again.population.clients)
    assert lines.rounds == (1, 2)
    assert len(mixed) == 2
    for u, w in zip(lines.u, mixed, strict=True):
        assert np.array_equal(u, rounds.target.of(w))
    for v, turn in zip(lines.v, rounds.turns, strict=True):
        assert np.array_equal(v, rounds.target.of(rounds.model(turn.after)))
    # Line 9 as they compute it is the server's: a_t is between l_t and 2 l_t.
    truth = rounds.target.truth
    a = np.linalg.norm(lines.v - lines.u, axis=1) / np.linalg.norm(truth - lines.v, axis=1)
    assert ((lines.guess * 0.999 < a) & (a < lines.guess * 2.001)).all()
    assert lines.guess[0] == 1.0
    x, how = recover(lines, rounds.method, rounds.target.groups, exact=True)
    assert how == "intersection of lines"
    assert relative_error(x, truth) < 1e-3


@pytest.mark.proof
def test_scaffold_tells_every_client_the_aggregate(folder):
    """Its control variates are sent to all: one client that watches has w' and, after two rounds, the model."""
    path = run(folder, "controls", base={"name": "scaffold"})
    found = {f.name: f for f in perform(path, ["extraction"])}
    one = found["extraction.one_client"]
    assert one.high < 1e-4
    assert "control variates" in one.says
    rounds, again = watched(path)
    lines = rounds.lines(again.population.clients[:1])
    assert lines.rounds == (1, 2)  # of the last round's control variate nobody is told
    for u, turn in zip(lines.u, rounds.turns, strict=False):
        mean = sum(s.value.delta["y/" + rounds.target.names[0]] for s in turn.replies) / len(turn.replies)
        w = turn.before.x[rounds.target.names[0]] + mean
        assert np.allclose(u[: w.numel()], w.reshape(-1).numpy(), atol=1e-6)


@pytest.mark.proof
def test_scaffold_with_unequal_numbers_of_steps_leaves_an_estimate(folder):
    path = run(folder, "unequal", base={"name": "scaffold"}, local={"learning_rate": 0.05, "batch_size": 3})
    rounds, again = watched(path)
    population = again.population
    rows = dict(population.federated.clients)
    rows["client-00"] = dataclasses.replace(rows["client-00"], train=rows["client-00"].train[:4])  # as if it had 4
    population.federated = dataclasses.replace(population.federated, clients=rows)
    lines = rounds.lines(["client-00"])
    assert lines.controls
    assert not lines.exact
    assert rounds.lines(["client-01"]).exact


@pytest.mark.proof
def test_a_client_alone_in_its_cohort_knows_the_aggregate(folder):
    path = run(folder, "alone", {"evaluate_every": 1}, fraction=0.17, rounds=12)
    rounds, again = watched(path)
    twice = [c for c in again.population.clients if sum(list(t.payloads) == [c] for t in rounds.turns) > 1]
    assert twice
    for client in twice:
        lines = rounds.lines([client])
        assert lines.exact
        x, how = recover(lines, rounds.method, rounds.target.groups, exact=lines.exact)
        assert how == "intersection of lines"
        assert relative_error(x, rounds.target.truth) < 1e-4
    active = {f.name: f for f in perform(path, ["extraction"])}["extraction.active_client"].detail["variants"]
    # The median of one norm is that norm: such a check does nothing, and the client knows it.
    assert active["cap = reference and a norm check at the server"] == active["cap = reference"]


def test_no_finding_reveals_a_draw_of_alpha(default, monkeypatch):
    """What is said of a_t / U is what clients compute, and the same under other draws of alpha."""
    path, found = default
    rounds, again = watched(path)
    lines, active = rounds.lines(again.population.clients), found["extraction.active_client"]
    curve = [r["pull"] for r in found["extraction.all_colluding"].detail["curve"]]
    assert curve == pytest.approx(lines.guess, rel=1e-6)
    variants = active.detail["variants"]
    watching = variants["if it had sent its honest update"]
    assert watching["pull"] == pytest.approx(lines.guess[active.detail["round"] - 1], rel=1e-6)
    monkeypatch.setattr(fedbaf_coalition, "secret", lambda *_: bytes(32))
    other = {f.name: f for f in perform(path, ["extraction"])}["extraction.active_client"].detail["variants"]
    assert {k: m["pull"] for k, m in other.items()} == {k: m["pull"] for k, m in variants.items()}
    assert all(m["as_sent"] != other[k]["as_sent"] for k, m in variants.items())  # the draw is another
    said = re.findall(r"a_t / U = ([^)]*)\)", active.says)
    assert said == [f"{m['pull']:.3g}" for m in variants.values()]


def test_a_client_that_is_not_asked_again_does_not_see_the_model(folder):
    path = run(folder, "sampled", fraction=0.34, rounds=4)
    rounds, again = watched(path)
    assert again.replies == ()
    for client in again.population.clients:
        took = [t.round for t in rounds.turns if client in {s.client for s in t.replies}]
        seen = [t for t in took if t == 4 or client in rounds.asked[t + 1]]
        assert rounds.lines({client}).rounds == tuple(seen)
    path = run(folder, "scored", {"evaluate_every": 1}, fraction=0.34, rounds=4)
    rounds, again = watched(path)
    for client in again.population.clients:  # everybody is sent every model, to score it
        took = [t.round for t in rounds.turns if client in {s.client for s in t.replies}]
        assert rounds.lines({client}).rounds == tuple(took)


@pytest.mark.sample("half-0-1.0")
@pytest.mark.parametrize(
    ("harden", "low", "high"),
    [
        ("per_tensor", 0, 1e-2),
        ("half", 0, 1.0),
        ("per_coordinate", 1e-5, 0.2),
        ("log_uniform", 1e-2, 2),
        ("first_round", 1e-6, 1 / 7 + 0.2),  # nearly exact once in a while, as alpha is drawn
        ("noise_afresh", 1e-2, 2),
    ],
)
def test_hardened_variants(folder, harden, low, high):
    assert low <= everyone(run(folder, harden, harden=harden))[0] <= high


@pytest.mark.sample("log_uniform")
@pytest.mark.parametrize("harden", sorted(set(fedbaf.HARDENED) - {"none"}))
def test_every_variant_is_audited_to_the_end(folder, harden):
    path = run(folder, f"whole-{harden}", {"evaluate_every": 1}, harden=harden, rounds=2)
    found = {f.name: f for f in perform(path, ["extraction"])}
    assert {"extraction.all_colluding", "extraction.one_client", "extraction.active_client"} <= found.keys()
    active = found["extraction.active_client"]
    assert (active.estimate is None) == (harden == "first_round")
    if harden == "first_round":
        assert "whatever clients send" in active.says


def test_noise_drawn_once_is_a_floor(folder):
    """However many rounds: what all clients compute is the noised model, exactly."""
    error, rounds, again = everyone(run(folder, "once", harden="noise_once", noise=0.5, rounds=5))
    live = rounds.first.only(again.population.model.live())
    sigma = 0.5 * live.norm() / math.sqrt(sum(t.numel() for t in live.values()))
    truth = rounds.target.truth
    expected = sigma * math.sqrt(len(truth)) / float(np.linalg.norm(truth))
    assert error == pytest.approx(expected, rel=0.1)


def test_line_9_as_clients_compute_it():
    """Unit vectors at right angles are sqrt 2 apart, at 60 degrees 1."""
    w = Params({"w": torch.tensor([1.0, 0.0])})
    right = Params({"w": torch.tensor([0.0, 3.0])})
    sixty = Params({"w": torch.tensor([0.5, math.sqrt(0.75)])})
    pull = Pull(FedBaF(foundation="x", psi=0.5), ["w"])
    assert pull(w, w, 1) == (0.0, 0.0)  # did not move
    assert pull(sixty, w, 2) == pytest.approx((1 / math.sqrt(2), 0.5))  # the reference
    tau, used = pull(right, w, 4)
    assert tau == pytest.approx(math.sqrt(2) / 2)
    assert used == pytest.approx(0.5 * math.sqrt(2 / 4))  # capped at the reference's numerator
    printed = Pull(FedBaF(foundation="x", psi=0.5, cap="none"), ["w"])
    late = printed(sixty, w, 4)[1]  # takes this for what round 1 had
    assert late == pytest.approx(0.5 / math.sqrt(4))
    assert printed(right, w, 9)[1] == pytest.approx(0.5 * math.sqrt(2) / 3)
    once = Pull(FedBaF(foundation="x", harden="first_round"), ["w"])
    assert [once(sixty, w, t)[1] for t in (1, 2, 3)] == [1.0, 0.0, 0.0]


def test_a_run_without_mixing_is_refused(folder):
    with pytest.raises(InputError, match="psi = 0"):
        perform(run(folder, "zero", psi=0.0, rounds=1), ["extraction"])


def test_a_large_model_is_kept_for_as_many_rounds_as_fit():
    found = [rounds_to_keep(0.1, clients=100, trainable=n) for n in (10_000, 5_000_000, 500_000_000)]
    assert found == [30, 4, 2]


def test_the_upload_turns_the_mean_around_and_leaves_running_statistics():
    w = Params({"a": torch.tensor([1.0, -2.0]), "bn.running_var": torch.tensor([4.0])})
    honest = Update(Params({"a": torch.tensor([0.1, 0.1]), "bn.running_var": torch.tensor([0.5])}), 3.0)
    sent = reverse_mean(honest, w, 0.25, ["a"])
    mean = 0.25 * (w + sent.delta)["a"] + 0.75 * w["a"]
    torch.testing.assert_close(mean, -0.3 * w["a"])
    assert sent.delta["bn.running_var"].item() == 0.5
    assert sent.weight == 3.0
    joined = dataclasses.replace(honest, delta=Params.join(y=honest.delta, c=honest.delta))
    torch.testing.assert_close(reverse_mean(joined, w, 0.25, ["a"]).delta.part("y")["a"], sent.delta["a"])


def test_the_norm_check_shortens_to_the_median():
    class Link:
        clients = ("a", "b", "c")

        def exchange(self, requests):
            sent = {"a": (3.0, 4.0), "b": (0.6, 0.8), "c": (0.0, 2.0)}
            for r in requests:
                yield Reply(r.client, Update(Params({"w": torch.tensor(sent[r.client])}), 1.0), r.round, r.call)

    class Model:
        def params(self):
            return Params({"w": torch.zeros(2)})

    def handler(client) -> Update: ...

    handler.__self__ = FedBaF(foundation="x")
    fed = Federation(Link(), model=Model(), aggregator=Clipped())
    mean = fed.mean(_Bound(handler))
    torch.testing.assert_close(mean["w"], (torch.tensor([1.2, 1.6]) + torch.tensor([0.6, 2.8])) / 3)


class _Bound:
    """A handler with the two attributes that name it on the wire."""

    def __init__(self, handler):
        self.__self__, self.__name__ = handler.__self__, "train"


@pytest.mark.parametrize(
    ("error", "cosine", "says"),
    [
        (1e-6, 1.0, "leaks"),
        (0.05, 0.2, "leaks"),
        (0.4, 0.95, "leaks"),
        (0.4, 0.4, "inconclusive"),
        (1.5, 0.7, "inconclusive"),
        (1.5, 0.1, "holds"),
    ],
)
def test_verdicts(error, cosine, says):
    assert disclosure_rule(cosine).verdict({"estimate": error, "bound": 0.1}) == says


def test_errors_of_a_target_go_through_the_model(folder, default):
    """Matched entries written into a model and read again are the same."""
    rounds, _ = watched(default[0])
    x = np.random.default_rng(0).normal(size=len(rounds.target.truth)).astype(np.float32)
    back = rounds.target.of(rounds.target.into(rounds.last, x))
    assert relative_error(back, x) == 0.0
