"""Run directories made by hand, in exactly the form in which a run writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np


def make(path: Path, n_clients: int = 6, n_rounds: int = 12, n_classes: int = 10, **change: Any) -> Path:
    """A finished run of FedAvg on digits; ``change`` sets keys of the manifest, ``names`` the clients."""
    names = change.pop("names", [f"c{i}" for i in range(n_clients)])
    rounds = change.pop("rounds", None) or [line(t, names) for t in range(n_rounds + 1)]
    traffic = change.pop("traffic", None)
    if traffic is None:
        traffic = [c for t in range(n_rounds + 1) for c in crossings(t, names)]
    counts = {c: [(7 * i + 13 * j) % 60 * int((i + j) % 3 > 0) for j in range(n_classes)] for i, c in enumerate(names)}
    last = rounds[-1]
    manifest: dict[str, Any] = {
        "schema": 1,
        "fedfm": "0.1.0",
        "name": "fedavg-digits",
        "created": "2026-01-02T03:04:05+00:00",
        "finished": "2026-01-02T03:05:05+00:00",
        "experiment": {
            "name": "fedavg-digits",
            "data": {
                "name": "digits",
                "partition": {"name": "dirichlet", "alpha": 0.1, "clients": n_clients},
                "test_fraction": 0.2,
                "limit": None,
            },
            "model": {"name": "nano-vit", "task": "classification", "adaptation": {"name": "lora", "rank": 8}},
            "method": {"name": "fedavg", "rounds": n_rounds, "local": {"name": "sgd", "learning_rate": 0.1}},
            "privacy": None,
            "attack": None,
            "run": {"engine": "local", "seed": 0, "wire": False},
        },
        "versions": {"python": "3.11.7", "torch": "2.8.0"},
        "machine": {"cpus": 2, "device": "cpu"},
        "fingerprints": {"data": "d" * 64, "model": "e" * 64},
        "split": {
            "classes": [f"class {j}" for j in range(n_classes)],
            "clients": {
                c: {"train": _part(v), "val": _part([0] * n_classes), "test": _part([n // 4 * (i != 1) for n in v])}
                for i, (c, v) in enumerate(counts.items())
            },
        },
        "notices": ["client c99 got no rows and was dropped"],
        "clients": names,
        "result": {
            "run": "runs/fedavg-digits",
            "method": "fedavg",
            "engine": "local",
            "seed": 0,
            "rounds": n_rounds,
            "seconds": 61.5,
            **{k: last[k] for k in ("accuracy", "global_accuracy", "local_accuracy", "client_accuracy")},
            "balanced_accuracy": 0.81,
            "macro_f1": 0.8,
            "loss": 0.61,
            "perplexity": None,
            "bytes_up": 12_345_678,
            "bytes_down": 2_345_678,
            "epsilon": None,
            "params_sha256": "ab" * 32,
            "excluded": [],
            "details": {"bound": 0.25, "weights": "weights.npz"},
        },
        "ledger": {"epsilon": None, "entries": []},
        "do_not_share": ["private/ holds the keys of the masks: whoever has them can open them."],
    }
    manifest.update(change)
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds), encoding="utf-8")
    (path / "messages.jsonl").write_text("".join(json.dumps(c) + "\n" for c in traffic), encoding="utf-8")
    return path


def changed(path: Path, **result: Any) -> Path:
    """The run with other values in its result line."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["result"] |= result
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def weights(path: Path, layers: int = 1, p: np.ndarray | None = None) -> np.ndarray:
    """Writes weights.npz into a run, and the accuracies before the last pass; returns p (T, L, K, K)."""
    manifest = json.loads((path / "manifest.json").read_text())
    names, rounds = manifest["clients"], manifest["result"]["rounds"]
    if p is None:
        p = np.random.default_rng(0).random((rounds, layers, len(names), len(names))) + 3 * np.eye(len(names))
        p /= p.sum(3, keepdims=True)
    blocks = np.array([f"vit.layers.{i}" for i in range(p.shape[1])])
    np.savez(
        path / "weights.npz",
        weights=p.astype(np.float32),
        rounds=np.arange(1, len(p) + 1),
        clients=np.array(names),
        layers=blocks,
    )
    own = manifest["result"]["client_accuracy"]
    before = {c: None if a is None else a - 0.1 for c, a in own.items()}
    manifest["result"]["details"] |= {"server_client_accuracy": before, "server_accuracy": 0.5}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return p


def _part(by_class: list[int]) -> dict[str, Any]:
    return {"rows": sum(by_class), "by_class": by_class}


def line(t: int, names: list[str], **change: Any) -> dict[str, Any]:
    """A line of metrics.jsonl; the second client has no test rows."""
    rise = 0.85 * (1 - math.exp(-(t + 0.4) / 5))
    own = {c: None if i == 1 else round(rise * (0.7 + 0.3 * math.cos(i * 1.7) ** 2), 4) for i, c in enumerate(names)}
    seen = [v for v in own.values() if v is not None]
    return {
        "round": t,
        "seconds": 0.25 + 1.5 * t,  # since the start of the run, as the bytes are
        "accuracy": rise,
        "global_accuracy": rise,
        "local_accuracy": sum(seen) / len(seen) if seen else None,
        "loss": 2.3 * math.exp(-t / 6) + 0.3,
        "balanced_accuracy": rise * 0.98,
        "macro_f1": rise * 0.97,
        "perplexity": None,
        "client_accuracy": own,
        "train_loss": 2.2 * math.exp(-t / 5) + 0.2 if t else None,
        "cohort": names if t else [],
        "excluded": [{"client": names[0], "code": "E_TIMEOUT", "reason": "no reply in 600 s"}] if t == 3 else [],
        "bytes_up": 1000 * len(names) * t,
        "bytes_down": 2000 * len(names) * t,
        **change,
    }


def crossings(t: int, names: list[str]) -> list[dict[str, Any]]:
    """Lines of messages.jsonl: the hello before training, then training and evaluation."""
    out = []
    for c in names:
        if t == 0:
            kinds = [
                ("server", c, "query.hello", 120, "plain", False),
                (c, "server", "query.hello", 300, "plain", False),
            ]
        else:
            kinds = [
                ("server", c, "train.FedAvg_train", 2000, "plain", True),
                (c, "server", "train.FedAvg_train", 1000, "masked", True),
                (c, "server", "query.FedAvg_probe", 64, "plain", True),
            ]
        keys = ("from", "to", "handler", "bytes", "form", "counted")
        out += [{"round": t, **dict(zip(keys, k, strict=True))} for k in kinds]
    return out
