"""FedCLIP on the built-in CLIP."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfm.api import execute
from fedfm.config.experiment import Experiment


def test_a_single_clients_model_is_the_aggregate_before_and_after_it(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 60, (40, 16, 16, 3), dtype=np.uint8)
    y = np.arange(40) % 2
    x[y == 1, ..., 0] += 180  # red
    np.savez(tmp_path / "colours.npz", x=x, y=y, classes=np.array(["black", "red"]))
    experiment = Experiment.from_dict(
        {
            "data": {"path": str(tmp_path / "colours.npz"), "partition": {"name": "iid", "clients": 1}},
            "model": {"name": "nano-clip", "task": "zero_shot"},
            "method": {"name": "fedclip", "rounds": 1, "local": {"name": "adamw", "learning_rate": 0.01}},
            "run": {"workers": 1, "local_scores": True, "evaluate_every": 0},
        }
    )
    result = execute.run(experiment, tmp_path / "run")
    assert result["local_accuracy"] > 0
    assert result["details"]["accuracy_before_aggregation"] == result["local_accuracy"]
    assert abs(result["details"]["loss_before_aggregation"] - result["local_loss"]) < 1e-6
