"""FedBaF whose clients attack and whose server takes a robust rule for the mean: end to end, and step by step against
NumPy.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedfm
from fedfm.audits.replay import open_finished, replay
from fedfm.errors import Lost
from small import experiment
from stopping import StopAfter

TRIM, PSI = 0.3, 0.5
RULES = {"trimmed_mean": {"trim": TRIM}, "median": {}, "krum": {"byzantine": 1}}


def trimmed_mean(x):
    cut = math.ceil(TRIM * len(x))
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(0)


def krum(x):
    """Krum with one Byzantine of m: the update with the least sum of squared distances to its m - 3 nearest others."""
    scores = [sum(sorted(float(((a - b) ** 2).sum()) for j, b in enumerate(x) if j != i)[: len(x) - 3])
              for i, a in enumerate(x)]  # fmt: skip
    return x[int(np.argmin(scores))]


BY_HAND = {"trimmed_mean": trimmed_mean, "median": lambda x: np.median(x, axis=0), "krum": krum}


def tables(folder, rule="trimmed_mean", **more):
    """Six clients, all in every round; the foundation model is a head of small random weights."""
    if not (foundation := folder / "foundation").exists():
        foundation.mkdir()
        rng = np.random.default_rng(5)
        w, b = (torch.tensor(rng.normal(size=s), dtype=torch.float32) for s in ((4, 8), (4,)))
        save_file({"head.weight": w, "head.bias": b}, foundation / "model.safetensors")
        (foundation / "fedfm.json").write_text(json.dumps({"classes": ["ant", "bee", "cow", "dog"]}))
    local = {"learning_rate": 0.2, "batch_size": 16}
    method = {"name": "fedbaf", "foundation": str(foundation), "identical": ["labels"], "psi": PSI, "rounds": 3}
    found = experiment(folder, data={"partition": {"name": "iid", "clients": 6}})
    attack = {"name": "label_shuffle", "fraction": 0.34, "intensity": 2}
    return (
        found
        | {"method": method | {"local": local}, "aggregation": {"name": rule, **RULES[rule]}}
        | ({"attack": attack} | more)
    )


class Kept:
    """A replay's watch that keeps every round."""

    def __init__(self):
        self.turns = []

    def see(self, turn, population):
        self.turns.append(turn)


def turns(path):
    """The rounds of a finished run as its server had them; a replay that ends with other bits raises."""
    kept = Kept()
    replay(open_finished(path), watched={"kept": kept}, keep=False)
    return kept.turns[1:]


def vector(w):
    """(P,) float64: weight, then bias."""
    return np.concatenate([w[n].double().numpy().ravel() for n in sorted(w, reverse=True)])


def direction(w):
    return w / np.linalg.norm(w)


@pytest.mark.parametrize("rule", RULES)
def test_a_round_is_the_rule_of_the_updates_and_then_the_mixture(rule, tmp_path):
    result = fedfm.run(tables(tmp_path, rule), tmp_path / "run")
    assert result["rounds"] == 3
    assert len(result["attackers"]) == 2
    assert set(result["attackers"]) < set(result["client_accuracy"])
    w_pre = vector(
        {n.removeprefix("head."): t for n, t in load_file(tmp_path / "foundation/model.safetensors").items()}
    )
    first, draws = None, []
    for t, turn in enumerate(turns(tmp_path / "run")):  # the paper's t = 0, 1, 2
        w_t, deltas = vector(turn.before), np.stack([vector(s.value.delta) for s in turn.replies])
        assert len(deltas) == 6
        w = w_t + BY_HAND[rule](deltas)  # line 8, with the rule in the mean's place
        length = np.linalg.norm(direction(w) - direction(w_t))
        first = length if first is None else first
        tau = min(length, first) / math.sqrt(t + 1) / first  # line 9 over tau_0, under the default cap
        after = vector(turn.after)
        a = (after - w) @ (w_pre - after) / ((w_pre - after) @ (w_pre - after))  # its only unknown; one for all entries
        draws.append(a / (PSI * tau) - 1)  # line 10: uniform in [0, 1)
        expected = (w + a * w_pre) / (1 + a)  # line 11
        np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-6)
        assert np.linalg.norm(expected - w) > 1e-2 * np.linalg.norm(w)  # it was pulled
        weights = np.array([s.value.weight for s in turn.replies])
        assert np.linalg.norm(w - w_t - weights @ deltas / weights.sum()) > 1e-2 * np.linalg.norm(w - w_t)  # no mean
    assert all(-1e-3 < u < 1 + 1e-3 for u in draws)
    assert len({round(u, 4) for u in draws}) == 3


def test_attackers_alone_send_something_else(tmp_path):
    attacked = fedfm.run(tables(tmp_path), tmp_path / "attacked")
    honest = tables(tmp_path)
    del honest["attack"]
    assert fedfm.run(honest, tmp_path / "honest")["attackers"] == []
    sent = [{s.client: vector(s.value.delta) for s in turns(tmp_path / r)[0].replies} for r in ("attacked", "honest")]
    changed = {c for c in sent[0] if not np.array_equal(sent[0][c], sent[1][c])}
    assert changed == set(attacked["attackers"])


@pytest.mark.parametrize("base", ["scaffold", "fedadam", "fedprox"])
def test_any_base_runs_and_the_same_bits_come_from_workers_and_wire(base, tmp_path, monkeypatch):
    monkeypatch.setattr("fedfm.runtime.client_memory.entropy", lambda n: b"k" * n)
    results = []
    for i, run in enumerate(({"workers": 1}, {"workers": 2, "wire": True})):
        found = tables(tmp_path, run={"seed": 1, **run})
        found["method"]["base"] = {"name": base}
        results.append(fedfm.run(found, tmp_path / str(i)))
    assert results[0]["params_sha256"] == results[1]["params_sha256"]
    assert len(results[0]["attackers"]) == 2


@pytest.mark.parametrize("base", ["fedavg", "fedadam", "fedyogi", "fedavgm", "scaffold"])
def test_no_file_outside_private_reveals_the_aggregate(base, tmp_path, monkeypatch):
    """Moments and control variates give w' away, and w' with w_{t+1} a line through w_pre. A run that was stopped goes
    on from private/ with the same bits.
    """
    monkeypatch.setattr("fedfm.runtime.client_memory.entropy", lambda n: b"k" * n)
    asked, run = tables(tmp_path), tmp_path / "run"
    asked["method"]["base"] = {"name": base}
    with pytest.raises(KeyboardInterrupt):
        fedfm.run(asked, run, progress=StopAfter(2))
    method = fedfm.load_run(run).experiment.method
    state = fedfm.load_run(run).state(method.state_type)
    w = method.params_for(state, "")
    more = [getattr(state, f.name) for f in dataclasses.fields(state)] if base != "fedavg" else []
    secret = [v.flats[torch.float32].numpy().tobytes() for v in more if v is not w]
    assert len(secret) == {"fedavg": 0, "fedavgm": 1, "scaffold": 1}.get(base, 2)
    files = [p for p in run.rglob("*") if p.is_file()]
    open_to_all = [p for p in files if "private" not in p.relative_to(run).parts]
    assert {"manifest.json", "metrics.jsonl", "messages.jsonl"} <= {p.name for p in open_to_all}
    assert not [p for p in open_to_all for v in secret if v in p.read_bytes()]
    assert any(v in p.read_bytes() for p in files for v in secret) == bool(secret)  # the search finds what is there
    assert not [p for p in set(files) - set(open_to_all) if p.stat().st_mode & 0o077]
    assert fedfm.resume(run)["params_sha256"] == fedfm.run(asked, tmp_path / "whole")["params_sha256"]


def test_a_run_that_lost_its_key_does_not_go_on_with_another(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fedfm.run(tables(tmp_path), run, progress=StopAfter(2))
    key = (run / "private/server/alpha.secret").read_bytes()
    (run / "private/server/alpha.secret").unlink()
    with pytest.raises(Lost, match=r"alpha\.secret is missing.*Put the files? back"):
        fedfm.resume(run)
    (run / "private/server/alpha.secret").write_bytes(key)
    (run / "private/server").rename(tmp_path / "elsewhere")
    with pytest.raises(Lost, match=r"alpha\.secret is missing.*Put the files? back"):
        fedfm.resume(run)
    (tmp_path / "elsewhere").rename(run / "private/server")
    assert fedfm.resume(run)["rounds"] == 3
