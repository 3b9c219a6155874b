"""What a protection cost in accuracy where this project measured it, from ``measured_accuracy.json``.

``docs/generate.py`` writes that file from the JSON file of docs/results/privacy.md, so that no figure is typed twice. A
figure is shown only for an experiment that is like the measured one: rows of the same kind and width, as many classes,
the same trained part, and the same epsilon.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.population import feature_dim


def find_accuracy(name: str, experiment: Experiment, population: Partitioned) -> dict[str, Any] | None:
    """The measured accuracy of a protection on rows like these; None if nothing like it was measured.

    Args:
        name: the protection.

    Returns:
        ``accuracy`` and ``half`` its 95 % interval's half width (None for one seed), in percent; ``clear``: the
        accuracy without protection, None if it was not measured at as many clients; ``clients``, ``seeds``, ``of`` (the
        rows), ``page`` and ``row``: where it is from.
    """
    table, privacy, adaptation = population.federated.table, experiment.privacy, experiment.model.adaptation
    like = {
        "kind": table.kind,
        "width": feature_dim(table),
        "model": experiment.model.name,
        "classes": len(table.classes),
        "adaptation": adaptation.name if adaptation is not None else "head",
    }
    epsilon = None if privacy is None else privacy.target_epsilon
    records = json.loads(files("fedfm.api").joinpath("measured_accuracy.json").read_text(encoding="utf-8"))
    alike = [r for r in records if all(r[key] == value for key, value in like.items())]
    same = [r for r in alike if r["protection"] == name and r["epsilon"] == epsilon]
    clients = len(population.clients)
    if not same:
        return None
    found = min(same, key=lambda r: abs(r["clients"] - clients))
    clear = [r for r in alike if r["protection"] == "clear" and r["clients"] == found["clients"]]
    about = {key: found[key] for key in ("accuracy", "half", "clients", "seeds", "of", "page", "row")}
    return about | {"clear": clear[0]["accuracy"] if clear and name != "clear" else None}
