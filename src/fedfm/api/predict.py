"""What a finished run is good for: predictions, and exports for other libraries."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.core.text import to_json
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.models.adapters.experts import is_pair
from fedfm.runtime import predictions
from fedfm.runtime.run_directory import Run

if TYPE_CHECKING:
    from fedfm.core.method import Method
    from fedfm.data.table import Table
    from fedfm.models.export import Target
    from fedfm.models.model import Model

FORMATS = (".json", ".jsonl", ".csv")


def load(path: str | Path, client: str | None = None) -> tuple[Run, Any, Params]:
    """(run, model, its trained parameters).

    Raises:
        InputError: the run is not finished, or its clients have models of their own and none is named.
    """
    from fedfm.models.adapters.lora import at_rank, spec_for
    from fedfm.models.export import load_adapter, rank_on_disk
    from fedfm.models.load import load_model

    run = Run.open(path)
    experiment = run.experiment
    if experiment.in_memory:
        raise InputError(f"{path}: its model was given from Python, where the module holds its weights")
    if run.manifest["result"] is None:
        raise InputError(f"{path} is not finished: `fedfm resume {path}` first")
    personal, newcomers = predictions.personal(experiment.method), run.manifest.get("newcomers", {})
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
    """What the run's model says of every row of a file.

    Args:
        file: any source that the run could have been trained on; labels are not needed and not used.

    Returns:
        By what the model does, in the order of the rows:

        - classes: ``predictions`` and ``probabilities``, ``classes``; of a folder of pictures also ``files``: whose
          prediction each is, relative to the folder;
        - answers to instructions: ``answers``, and ``cut``, the indexes of those that stop at the limit of tokens. Over
          the rows with an output, null where none has one: ``loss``, ``perplexity``, ``exact_match`` and ``rouge_1``,
          as the run's evaluation has them;
        - running text: its ``loss`` and ``perplexity``.

    Raises:
        InputError: the run is not finished, or the file does not hold what its model takes.
    """
    from fedfm.data.load import read_inputs
    from fedfm.linalg.threads import torch_threads

    run, model, w = load(path, client)
    with torch_threads(1):
        shape = run.manifest["model"]
        table = read_inputs(Path(file), run.experiment.data, kind=shape["kind"])
        if shape["feature_dim"] and table.inputs.shape[1] != shape["feature_dim"]:
            raise InputError(
                f"{file} holds vectors of {table.inputs.shape[1]} numbers; the model takes {shape['feature_dim']}"
            )
        said = _said if model.is_language_model else _classes
        result = {"run": str(path)} | said(run.experiment.method, model, w, table)
    folder = Path(file).expanduser()
    if folder.is_dir():
        result["files"] = [os.path.relpath(picture, folder) for picture in table.inputs]
    return result


def _classes(method: Method[Any], model: Model, w: Params, table: Table) -> dict[str, Any]:
    import torch

    rows = model.encode(model.prepare(table, range(len(table))))
    probabilities = torch.softmax(predictions.logits(method, model, w, rows), 1)
    return {
        "classes": list(model.classes),
        "predictions": [model.classes[i] for i in probabilities.argmax(1).tolist()],
        "probabilities": [[round(p, 6) for p in row] for row in probabilities.tolist()],
    }


def _said(method: Method[Any], model: Model, w: Params, table: Table) -> dict[str, Any]:
    """Of a language model: its answers, and how likely it finds what is there."""
    from fedfm.models.metrics import answer_limit, answers, compared, likelihood, references

    result: dict[str, Any] = {"predictions": [], "probabilities": []}
    scored = list(range(len(table)))
    if model.task == "instruction":
        asked = replace(table, inputs=[(instruction, "") for instruction, _ in table.inputs])
        with predictions.applied(method, model, w, model.prepare(asked, scored)) as rows:
            said = answers(model, rows)
        result |= {"answers": [a.text for a in said], "cut": [i for i, a in enumerate(said) if a.cut]}
        result["answer_tokens"] = answer_limit(model)
        scored = [i for i, (_, output) in enumerate(table.inputs) if output.strip()]
    rows = model.prepare(table, scored)
    if model.task == "instruction":
        found = compared([said[i] for i in scored], references(rows))
        result |= {key: found[key] for key in ("exact_match", "rouge_1")}
    with predictions.applied(method, model, w, rows) as judged:
        found = likelihood(model, judged)
    return result | {key: found[key] for key in ("loss", "perplexity")}


def check_out(out: Path) -> None:
    """Refuse a file that :func:`write` would not write.

    Raises:
        InputError: its name ends in no format that is written, its folder is not there, or it is there already.
    """
    if out.suffix not in FORMATS:
        raise InputError(f"--out {out}: expected a name that ends in {', '.join(FORMATS)}")
    if out.exists():
        raise InputError(f"--out {out} exists; give another")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")


def write(result: Mapping[str, Any], out: Path) -> None:
    """Write what :func:`predict` found: ``.json`` all of it, ``.jsonl`` and ``.csv`` a line a row.

    Raises:
        RunError: the disk does not take it.
    """
    rows = _lines(result)
    try:
        with open(out, "x", encoding="utf-8", newline="") as file:
            if out.suffix == ".csv":
                table = csv.DictWriter(file, list(rows[0]) if rows else [])
                table.writeheader()
                table.writerows(rows)
            else:
                things = [result] if out.suffix == ".json" else rows
                file.writelines(f"{to_json(thing)}\n" for thing in things)
    except OSError as error:
        raise RunError(f"--out {out}: cannot be written: {error.strerror}") from None


def _lines(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One for each row: its file, where it has one, and what the model says of it."""
    if "answers" in result:
        cut = set(result["cut"])
        return [{"answer": answer, "cut": i in cut} for i, answer in enumerate(result["answers"])]
    if not result["predictions"]:
        return [{key: result[key] for key in ("loss", "perplexity")}]
    files = [{"file": name} for name in result["files"]] if "files" in result else repeat({})
    said = zip(files, result["predictions"], result["probabilities"], strict=False)
    return [{**file, "prediction": label, "probability": max(p)} for file, label, p in said]


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
        return str(write(model, w, to, out, predictions.feature_transform(run.experiment.method)))
    except SafetensorError as error:  # of weights that do not fit on the disk
        raise RunError(f"{out}: cannot be written: {error}") from None
