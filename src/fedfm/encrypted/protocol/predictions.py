"""Predictions at the clients with the adapters of a finished run.

After an encrypted forward pass the server sends the adapters and the head, (theta, eta), of the finished run. Each
client writes its predictions into its own store. The server sees only ciphertexts and the number of rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedfm.core.capabilities import PREDICTIONS
from fedfm.core.client import Client
from fedfm.core.federation import Federation
from fedfm.errors import E_LOST, ClientFault, InputError, reason_of
from fedfm.linalg.params import Params
from fedfm.models.adapter_reading import load_adapter
from fedfm.models.adapters.side_adapter import STATES, SideModel, with_numbers


def load_trained(path: str, settings: Mapping[str, object], fed: Federation, model: SideModel) -> Params:
    """Load (theta, eta) of the finished run that ``method.trained`` names.

    Args:
        path: folder of the finished run.
        settings: settings on which the adapters depend; they must be equal in this run and in the finished run.

    Raises:
        InputError: there is no such run, or it has another model.
    """
    folder, where = Path(path), f'method.trained = "{path}"'
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{where}: this is not a readable run ({reason_of(error)}); expected the folder of a finished run"
        ) from None
    of = manifest["experiment"]["method"]
    if manifest.get("result") is None or of.get("name") != "blindfed":
        raise InputError(f"{where}: expected a finished run of blindfed")
    for key, ours in settings.items():
        if of.get(key, ours) != ours:
            raise InputError(f"{where}: its {key} is {of[key]!r}, but here it is {ours!r}; both must be the same")
    if manifest["fingerprints"]["model"] != model.fingerprint:
        raise InputError(f"{where}: that run had another foundation model")
    if list(manifest["model"]["classes"]) != list(model.classes):
        raise InputError(
            f"{where}: its classes are {', '.join(manifest['model']['classes'])}; the classes must be the same here"
        )
    return load_adapter(fed.model, folder / "adapter")


def keep(client: Client, seen: Client, w: Params) -> int:
    """Client half: write the predictions of all rows of the client, null for rows without activations.

    Returns:
        The number of rows, whether or not they have a prediction, so that the server learns no more than it knew.
    """
    rows, model = seen.data.test, seen.model
    if not len(rows):
        raise ClientFault(E_LOST, "there are no rows to predict")
    model.load(w)
    probabilities = torch.softmax(model.predict(rows), 1)
    given = client.data.test.pictures or (b"",) * len(rows)
    answered = with_numbers(rows.tensors[STATES]).tolist()
    lines = []
    for p, name, known in zip(probabilities, given, answered, strict=True):
        line: dict[str, Any] = {"prediction": None, "probabilities": None}
        if known:
            best = model.classes[int(p.argmax())]
            line = {"prediction": best, "probabilities": [round(x, 6) for x in p.tolist()]}
        lines.append(json.dumps(line if isinstance(name, bytes) else {"file": os.fspath(name)} | line))
    client.store[PREDICTIONS] = "\n".join(lines).encode()
    return len(lines)
