"""Predictions and exports of runs whose module a user's Python brings."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedfm.config.own_code import admit_function, is_function
from fedfm.data.spec import IN_MEMORY
from fedfm.data.user_datasets import checked
from fedfm.errors import InputError
from fedfm.models import export
from fedfm.models.own import language
from fedfm.models.own.brought import Brought, brought, call
from fedfm.models.quiet import quiet
from fedfm.runtime.own_population import brought_by

if TYPE_CHECKING:
    from fedfm.linalg.params import Params
    from fedfm.models.wrap import WrappedModel
    from fedfm.runtime.run_directory import Run

BATCH = 64


def load(run: Run, given: Any, client: str | None, *, last: bool = False) -> tuple[Brought, WrappedModel, Params]:
    """(what was brought, its model, the run's trained parameters, which the model holds).

    Args:
        given: of a run of ``fedfm.federate``, its module or Trainer, or a dict of federate's arguments.
        last: the model in ``last/``.

    Raises:
        InputError: nothing is given, or another module than the run's.
    """
    if run.experiment.own_code:
        brings = brought_by(run.experiment)
    elif given is None:
        raise InputError(
            f"{run.path}: its module was given from Python, and the run holds only what was trained: give the module "
            "or the Trainer again, from Python, as given=..."
        )
    else:
        brings = brought(given, rows=False)
    model = brings.given.model(run.manifest["model"]["classes"])
    if model.fingerprint != run.manifest["fingerprints"]["model"]:
        raise InputError(
            f"{run.path}: the given module is another than the run's: its frozen weights, or names or shapes of what "
            "is trained, differ"
        )
    method = run.experiment.method
    w: Params = (
        export.load_adapter(model, run.adapter(client or "", last=last))
        if client or last
        else method.params_for(run.state(method.state_type), "")
    )
    model.load(w)
    return brings, model, w


def predict(run: Run, rows: Any, given: Any, client: str | None, *, last: bool = False) -> dict[str, Any]:
    """Predictions for rows like those of the run; a target in them is not needed, and not used.

    Args:
        rows: a data set, or the name ``module:function`` of a function that returns one.

    Returns:
        ``classes``, ``predictions`` and ``probabilities`` of a classifier; of a language model what
        :func:`fedfm.models.own.language.told` returns; of other modules ``outputs``, a list for each row, and no
        predictions.

    Raises:
        InputError: rows or module are wrong.
    """
    if isinstance(rows, (str, Path)):
        if not is_function(name := str(rows)):
            raise InputError(f"{name}: rows for an own module: expected module:function, which returns a data set")
        rows = call(admit_function(name, "rows"), name, run.experiment.run.seed)
    brings, model, _ = load(run, given, client, last=last)
    rows = checked(rows, "rows")
    found: list[torch.Tensor] = []
    with model.evaluating():
        first = brings.given.predicted([rows[0]]) if len(rows) else None
        if first is not None and language.gives_tokens(model.module, brings.given.batch([rows[0]]), first):
            return language.told(brings.given, [rows[i] for i in range(len(rows))])
        for start in range(0, len(rows), BATCH):
            part = [rows[i] for i in range(start, min(start + BATCH, len(rows)))]
            found.append(brings.given.predicted(part).float().cpu())
    outputs = torch.cat(found)
    classes = list(model.classes)
    if not classes or outputs.dim() != 2 or outputs.shape[1] != len(classes):
        return {"predictions": [], "probabilities": [], "outputs": outputs.flatten(1).tolist()}
    shares = outputs.softmax(1)
    return {
        "classes": classes,
        "predictions": [classes[i] for i in shares.argmax(1).tolist()],
        "probabilities": np.round(shares.double().numpy(), 6).tolist(),
    }


def write(run: Run, to: str, out: Path, given: Any, client: str | None, *, last: bool = False) -> Path:
    """Write the trained module: ``torch`` all tensors as safetensors, ``hf`` as transformers saves it with the adapter
    merged, ``peft`` the adapter.

    Raises:
        InputError: the module has no such form.
    """
    brings, model, _ = load(run, given, client, last=last)
    module: Any = model.module
    adapted = hasattr(module, "peft_config")
    if to == "peft" and not adapted:
        raise InputError("--to peft: the module is no PeftModel: use hf or torch")
    if to == "hf" and not hasattr(module, "save_pretrained"):
        raise InputError(f"--to hf: {type(module).__name__} is no transformers model: use torch")
    if to == "torch":
        export.save_module(model, out)
        return out
    with quiet():
        if to == "hf" and adapted:
            module = copy.deepcopy(module).merge_and_unload()
        module.save_pretrained(str(out))
        processing = getattr(brings.given.trainer, "processing_class", None)
        if processing is not None:
            processing.save_pretrained(str(out))
    with contextlib.suppress(FileNotFoundError):
        (out / "README.md").unlink()  # an empty model card
    return out


def is_own(run: Run) -> bool:
    """Whether a user's Python brings the run's module."""
    return run.experiment.own_code or run.experiment.data.name == IN_MEMORY
