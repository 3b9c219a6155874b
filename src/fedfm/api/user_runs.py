"""Predictions and exports of runs whose module comes from a user's Python code."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedfm.api import model_card
from fedfm.config.user_code import admit_function, is_function
from fedfm.core.text import complain
from fedfm.data.spec import IN_MEMORY
from fedfm.data.user_datasets import check_dataset
from fedfm.errors import InputError, quote_names
from fedfm.models import adapter_reading, export, merging
from fedfm.models.batches import tensors
from fedfm.models.quiet import quiet
from fedfm.models.user import language
from fedfm.models.user.function_calls import call
from fedfm.models.user.outputs import Outputs
from fedfm.models.user.user_inputs import UserInputs, read_inputs
from fedfm.runtime import result_match
from fedfm.runtime.result_match import final_state
from fedfm.runtime.user_population import load_inputs

if TYPE_CHECKING:
    from fedfm.linalg.params import Params
    from fedfm.models.export import Target
    from fedfm.models.user.user_module import Given
    from fedfm.models.wrap import WrappedModel
    from fedfm.runtime.run_directory import Run

BATCH = 64


def load(run: Run, given: Any, client: str | None, *, last: bool = False) -> tuple[UserInputs, WrappedModel, Params]:
    """The user's inputs, the model made from them, and the run's trained parameters, which the model has loaded.

    Args:
        given: only for a run of ``fedfm.federate``: its module or Trainer, or a dict of federate's arguments.
        last: whether to load the last round's model, which is in ``last/``.

    Raises:
        InputError: nothing is given, or the module is not the run's.
    """
    if run.experiment.own_code:
        user_inputs = load_inputs(run.experiment)
    elif given is None:
        raise InputError(
            f"{run.path}: its module came from Python, and the run contains only the trained tensors; pass the module "
            "or the Trainer again, from Python, as given=..."
        )
    else:
        user_inputs = read_inputs(given, rows=False)
    model = user_inputs.given.model(run.manifest["model"]["classes"])
    if model.fingerprint != run.manifest["fingerprints"]["model"]:
        raise InputError(
            f"{run.path}: the given module is not the run's: its frozen weights, or the names or shapes of its "
            "trained tensors, differ"
        )
    method, folder = run.experiment.method, run.adapter(client or "", last=last)
    if client or last:
        result_match.refuse_other_model(run, folder)
    w: Params = (
        adapter_reading.load_adapter(model, folder)
        if client or last
        else method.params_for(final_state(run, method.state_type), "")
    )
    model.load(w)
    return user_inputs, model, w


def predict(run: Run, rows: Any, given: Any, client: str | None, *, last: bool = False) -> dict[str, Any]:
    """Predict rows of the same form as the run's rows. Their targets are neither needed nor used.

    Args:
        rows: a data set, or the name ``module:function`` of a function that returns one.

    Returns:
        For a classifier: ``classes``, ``predictions`` and ``probabilities``. For a language model: the result of
        :func:`fedfm.models.user.language.evaluate`. For other modules: ``outputs``, a list for each row, and empty
        ``predictions``.

    Raises:
        InputError: rows or module are invalid.
    """
    if isinstance(rows, (str, Path)):
        if not is_function(name := str(rows)):
            raise InputError(
                f'{name}: your module takes rows from a function that returns a data set; expected "module:function"'
            )
        rows = call(admit_function(name, "rows"), name, run.experiment.run.seed)
    user_inputs, model, _ = load(run, given, client, last=last)
    rows = check_dataset(rows, "rows")
    given, found = user_inputs.given, list[Outputs]()
    classes, lists = list(model.classes), list[dict[str, Any]]([{}] * len(rows))
    with model.evaluating():
        if language.translates(model.module) and len(rows):
            return language.translations(given, [rows[i] for i in range(len(rows))])
        first = given.predict([rows[0]]) if len(rows) else None
        logits = None if first is None else first.logits
        if logits is not None and language.gives_tokens(model.module, given.batch([rows[0]]), logits):
            return language.evaluate(given, [rows[i] for i in range(len(rows))])
        several = first is not None and first.count != 1  # e.g. a row of preferences has two answers
        for index in _parts(given, rows, 1 if several else BATCH, mixed=logits is not None and logits.dim() <= 2):
            part = [rows[i] for i in index]
            found.append(given.predict(part))
            mask = given.batch(part).get("attention_mask")
            for i, row in zip(index, [found[-1].together()] if several else found[-1].rows(mask), strict=True):
                lists[i] = row
    alone = [of.logits for of in found]
    if not classes or several or any(x is None or x.dim() != 2 or x.shape[1] != len(classes) for x in alone):
        return _arrays(lists, found)
    shares = torch.cat([x.float().cpu() for x in alone if x is not None]).softmax(1)
    return {
        "classes": classes,
        "predictions": [classes[i] for i in shares.argmax(1).tolist()],
        "probabilities": np.round(shares.double().numpy(), 6).tolist(),
    }


def _parts(given: Given, rows: Any, most: int, *, mixed: bool) -> list[list[int]]:
    """Lists of at most ``most`` indices; the rows of one list are predicted at once.

    Args:
        mixed: whether rows of different shapes may share a batch, which pads them. This would be wrong for modules with
            an output for each position, e.g. each frame of speech: outputs for padding would look like the row's own.
    """
    if mixed or most == 1:
        return [list(range(start, min(start + most, len(rows)))) for start in range(0, len(rows), most)]
    alike: dict[Any, list[int]] = {}
    for i in range(len(rows)):
        batch = given.inputs(given.batch([rows[i]]))
        shapes = tuple(tuple(value.shape) for value in tensors(batch))
        alike.setdefault(shapes, []).append(i)
    return [index[start : start + most] for index in alike.values() for start in range(0, len(index), most)]


def _arrays(lists: list[dict[str, Any]], found: list[Outputs]) -> dict[str, Any]:
    """Outputs of rows without classes: the values of the only array if it is one-dimensional, else all arrays by
    name.
    """
    names = [] if not found else list(found[0].arrays)
    result: dict[str, Any] = {"predictions": [], "probabilities": []}
    if all(len(of.arrays) == 1 and next(iter(of.arrays.values())).dim() <= 2 for of in found):
        return result | {"outputs": [_flat(row[name]) for row in lists for name in names]}
    left_out = found[0].left_out
    why = [f"not written, since they have no entry for each row: {', '.join(left_out)}"] if left_out else []
    return result | {"outputs": lists, "warnings": why}


def _flat(value: Any) -> list[float]:
    return [x for part in value for x in _flat(part)] if isinstance(value, list) else [value]


def write(run: Run, to: Target, out: Path, given: Any, client: str | None, *, last: bool = False) -> Path:
    """Write the trained module: with ``torch`` all tensors as safetensors, with ``peft`` the adapter.

    With ``hf`` it is written as transformers saves it, with the adapter merged.

    Raises:
        InputError: the module cannot be written in this form.
    """
    user_inputs, model, _ = load(run, given, client, last=last)
    module: Any = model.module
    adapted = hasattr(module, "peft_config")
    if to == "peft" and not adapted:
        raise InputError("--to peft: the module is not a PeftModel; use hf or torch")
    if to == "hf" and not hasattr(module, "save_pretrained"):
        raise InputError(f"--to hf: {type(module).__name__} is not a model of transformers; use torch")
    if to == "torch":
        export.save_module(model, out)
        model_card.write(run.path, model, to, out, client)
        return out
    with quiet():
        if to == "hf" and adapted:
            merging.save(merging.merge(copy.deepcopy(module)), out)
        elif adapted:
            _write_adapter(module, out)
        else:
            module.save_pretrained(str(out))
        processing = getattr(user_inputs.given.trainer, "processing_class", None)
        if processing is not None:
            processing.save_pretrained(str(out))
    model_card.write(run.path, model, to, out, client)
    return out


def _write_adapter(module: Any, out: Path) -> None:
    """Write the adapter that the module uses. PEFT puts an adapter that is not called "default" into a folder inside.

    Raises:
        InputError: several adapters are in use together.
    """
    name, *more = module.active_adapters
    if more:
        raise InputError(f"--to peft: {quote_names([name, *more])} are used together, expected one adapter: use hf")
    module.save_pretrained(str(out), selected_adapters=[name])
    for file in (out / name).glob("*"):
        file.rename(out / file.name)
    if (out / name).is_dir():
        (out / name).rmdir()
    if others := sorted(set(module.peft_config) - {name}):
        complain(f'--to peft: "{name}" is the adapter that the module uses; {quote_names(others)} is not written')


def is_own(run: Run) -> bool:
    """Whether the run's module comes from the user's own Python code."""
    return run.experiment.own_code or run.experiment.data.name == IN_MEMORY
