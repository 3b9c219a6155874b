"""What a finished run is good for: predictions, and exports for other libraries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.errors import InputError, RunError
from fedfm.params import Params
from fedfm.rundir import Run
from fedfm.training.pair import is_pair

if TYPE_CHECKING:
    from fedfm.models.export import Target


def load(path: str | Path, client: str | None = None) -> tuple[Run, Any, Params]:
    """(run, model, its trained parameters).

    Raises:
        InputError: the run is not finished, or its clients have models of their own and none is named.
    """
    from fedfm.models.export import load_adapter, rank_on_disk
    from fedfm.models.load import load_model
    from fedfm.models.lora import at_rank, spec_for

    run = Run.open(path)
    experiment = run.experiment
    if experiment.in_memory:
        raise InputError(f"{path}: its model was given from Python, where the module holds its weights")
    if run.manifest["result"] is None:
        raise InputError(f"{path} is not finished: `fedfm resume {path}` first")
    personal, newcomers = experiment.method.personal, run.manifest.get("newcomers", {})
    known = [*(run.manifest["clients"] if personal else ()), *newcomers]
    if client not in known and personal:
        raise InputError(f"{path}: every client has its own model; name one with --client: {', '.join(known)}")
    if client is not None and client not in known:
        raise InputError(f"{path} has one model for all; drop --client")
    shape, spec = run.manifest["model"], experiment.model
    if client:
        spec = at_rank(spec, rank_on_disk(run.adapter(client)))
    else:
        w: Params = experiment.method.params_for(run.state(experiment.method.state_type), "")
        spec = spec_for(spec, w)  # what was merged into the weights is part of a wider adapter
    model = load_model(
        spec,
        classes=tuple(shape["classes"]),
        kind=shape["kind"],
        task=experiment.model.task,
        seed=experiment.run.seed,
        feature_dim=shape["feature_dim"],
    )
    if client:
        w = load_adapter(model, run.adapter(client))
    if set(w) == set(model.names):
        model.load(w)
    return run, model, w


def predict(path: str | Path, file: str | Path, client: str | None = None) -> dict[str, Any]:
    """Class names and probabilities of every row of a file; for language models the perplexity of its text.

    Args:
        file: any source that the run could have been trained on; labels are not needed and not used.

    Returns:
        ``predictions`` and ``probabilities`` in the order of the rows, ``classes``; of a folder of pictures also
        ``files``: whose prediction each is, relative to the folder.
    """
    import torch

    from fedfm.data.load import read_inputs
    from fedfm.threads import torch_threads

    run, model, w = load(path, client)
    with torch_threads(1):
        shape = run.manifest["model"]
        table = read_inputs(Path(file), run.experiment.data, kind=shape["kind"])
        if shape["feature_dim"] and table.inputs.shape[1] != shape["feature_dim"]:
            raise InputError(
                f"{file} holds vectors of {table.inputs.shape[1]} numbers; the model takes {shape['feature_dim']}"
            )
        rows = model.encode(model.prepare(table, range(len(table))))
        if model.is_language_model:
            scored = run.experiment.method.scores(model, w, rows)
            return {"run": str(path), "predictions": [], "probabilities": [], "perplexity": scored["perplexity"]}
        probabilities = torch.softmax(run.experiment.method.logits(model, w, rows), 1)
    best = probabilities.argmax(1).tolist()
    result = {
        "run": str(path),
        "classes": list(model.classes),
        "predictions": [model.classes[i] for i in best],
        "probabilities": [[round(p, 6) for p in row] for row in probabilities.tolist()],
    }
    folder = Path(file).expanduser()
    if folder.is_dir():
        result["files"] = [os.path.relpath(picture, folder) for picture in table.inputs]
    return result


def export(path: str | Path, to: Target, out: Path, client: str | None = None) -> str:
    """Write the run's model for other libraries; returns the folder."""
    from safetensors import SafetensorError

    from fedfm.models.export import export as write

    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give another --out")
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; give another --out")
    run, model, w = load(path, client)
    if is_pair(w):
        raise InputError(
            f"{path}: {client} has two adapters, no one model's parameters; {run.adapter(client or '')} holds both "
            "together for PEFT, by their mean, and each in global/ and local/"
        )
    if set(w) != set(model.names):
        raise InputError(f"{path}: a {run.experiment.method_name} is not one model's parameters: it cannot be exported")
    try:
        return str(write(model, w, to, out, run.experiment.method.head_takes))
    except SafetensorError as error:  # of weights that do not fit on the disk
        raise RunError(f"{out}: cannot be written: {error}") from None
