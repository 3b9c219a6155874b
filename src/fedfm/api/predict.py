"""Predictions and exports of a finished run's model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.api import unanswered_rows, user_runs
from fedfm.api.figures_runs import need_model
from fedfm.core import new_folders, output_files, storage
from fedfm.core.attachments import attachments_of
from fedfm.core.capabilities import Predictor
from fedfm.core.libraries import refuse
from fedfm.core.text import complain
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.adapters.pair_names import GATE, is_pair, weighed_by
from fedfm.runtime import predictions, result_match
from fedfm.runtime.disclosure import check_same, profile_of
from fedfm.runtime.progress import Progress
from fedfm.runtime.progress_bar import Bar
from fedfm.runtime.result_match import final_state
from fedfm.runtime.run_directory import Run

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.core.method import Method
    from fedfm.core.rows import Rows
    from fedfm.data.table import Table
    from fedfm.models.export import Target
    from fedfm.models.model import Model
    from fedfm.models.model_task import ModelTask
    from fedfm.models.spec import ModelSpec

_ID = "id"  # column of the file with a name for each row
_SEVERAL, _SURE = 5, 0.9995  # least number of rows for a warning; smallest probability that is shown as 1.000


def load(
    path: str | Path,
    client: str | None = None,
    *,
    last: bool = False,
    processes: int | None = None,
    in_files: Callable[[ModelSpec], bool] = lambda spec: False,
) -> tuple[Run, Any, Params]:
    """The run, its model, and the model's trained parameters.

    Args:
        last: whether to load the last round's model if ``run.patience`` chose the model of another round.
        processes: number of processes that share the model; None for ``run.processes_per_client``.
        in_files: whether a model's frozen weights may stay in their files, since nothing will be computed with them.

    Raises:
        InputError: the run is not finished, or its clients have their own models and ``client`` names none.
    """
    from fedfm.models.adapter_reading import load_adapter, rank_on_disk
    from fedfm.models.adapters.lora import at_rank, rank_of
    from fedfm.models.load import load_model

    run = _find_run(path, client)
    last = last and _another(run, client)
    experiment = run.experiment
    shape, spec = run.manifest["model"], replace(experiment.model, **run.manifest.get("chosen", {}))
    if client or last:
        folder = run.adapter(client or "", last=last)
        result_match.refuse_other_model(run, folder)
        spec = at_rank(spec, rank_on_disk(folder))
    else:
        w: Params = experiment.method.params_for(final_state(run, experiment.method.state_type), "")
        spec = at_rank(spec, rank_of(w))  # w may contain an adapter of higher rank
    about: dict[str, Any] = {"classes": tuple(shape["classes"]), "kind": shape["kind"], "task": experiment.model.task}
    about |= {"seed": experiment.run.seed, "head_bias": experiment.method.needs.bias}
    if (experiment.run.processes_per_client if processes is None else processes) > 1:
        from fedfm.api import group_predictions

        model: Model = group_predictions.load(experiment, spec, processes, about)
    else:
        stays, about["feature_dim"] = in_files(spec), shape["feature_dim"]
        model = load_model(spec, hollow=stays, **about)
        if stays and model.fingerprint != run.manifest["fingerprints"].get("model"):
            model = load_model(spec, **about)  # classes such as Funnel's change a stored row as they load it
    check_same(run, model.fingerprints, f"its weights need the original {spec.name}")
    if client or last:
        w = load_adapter(model, folder)
    if set(w) == set(model.names):
        model.load(w)
    return run, model, w


def _find_run(path: str | Path, client: str | None) -> Run:
    """The run, which must have one model for all clients, or a model of this client.

    Raises:
        InputError: as :func:`load`.
    """
    run = Run.open(path)
    if run.manifest["result"] is None:
        raise InputError(f"{path} is not finished; run `fedfm resume {path}` first")
    need_model(run)
    personal, newcomers = predictions.personal(run.experiment.method), run.manifest.get("newcomers", {})
    known = [*(run.manifest["clients"] if personal else ()), *newcomers]
    if client not in known and personal:
        raise InputError(f"{path}: every client has its own model; name one with --client: {', '.join(known)}")
    if client is not None and client not in known:
        raise InputError(f"{path} has one model for all; drop --client")
    if client is not None and not run.adapter(client).is_dir():
        raise InputError(
            f"{path} has no model of {client}; under [privacy], or by its policy, a client keeps its own model"
        )
    return run


def _another(run: Run, client: str | None) -> bool:
    """Whether the model of the last round differs from the run's model.

    Raises:
        InputError: the two models differ, and the model of the last round is missing.
    """
    details = run.manifest["result"]["details"]
    if details.get("model_of_round", run.manifest["result"]["rounds"]) == run.manifest["result"]["rounds"]:
        return False
    if not (folder := run.adapter(client or "", last=True)).is_dir():
        raise InputError(f"{folder} is missing: {run.path} has only the model of round {details['model_of_round']}")
    return True


@refuse("the run's model cannot predict these rows")
def predict(
    path: str | Path,
    file: Any,
    client: str | None = None,
    *,
    last: bool = False,
    given: Any = None,
    progress: Progress | None = None,
    files: Path | None = None,
    processes: int | None = None,
) -> dict[str, Any]:
    """Predict the rows of a file with the run's model.

    Args:
        file: any source on which the run could have been trained. Labels are neither needed nor used. For a run with
            the user's own module it is a data set, or the name ``module:function`` of a function that returns one.
        last: whether to use the last round's model if ``run.patience`` chose the model of another round.
        given: only for a run of ``fedfm.federate``: its module or Trainer, or a dict of federate's arguments.
        progress: its ``notice`` also gets the warnings; by default they go to stderr.
        files: folder for predictions that are files, such as masks. If it exists, a number is added to its name. By
            default the files are in the folder ``predictions`` of the run.
        processes: number of processes that share the model, each with a part of its weights and of the rows; by
            default ``run.processes_per_client`` of the run.

    Returns:
        ``warnings``, and depending on task and file, in the order of the rows:

        - for classes: ``predictions`` and ``probabilities`` (null for a row that left the intervals of the model's
          polynomials), ``classes``; for a folder of images also ``files``, the
          images' paths relative to the folder;
        - for a file with a column ``id``: ``ids``;
        - for instructions, prompts, or conversations, whose last turn is answered: ``answers``, and ``cut``, the
          indices of answers that reach the limit of tokens. Also ``loss``, ``perplexity``, ``exact_match`` and
          ``rouge_1`` as in the run's evaluation, over the rows that contain an expected output (null if there is none);
        - for several labels per row: ``labels``, ``probabilities`` by label, and ``thresholds``: for each label,
          the least probability at which a row gets it;
        - for segmentation: ``masks``, the paths of PNG files of class numbers, in the size of the images. If ``files``
          is given, the paths are relative to the folder that contains it;
        - for numbers: ``values``; with several targets, each value is a dict by target;
        - for pairs: ``embeddings``, the vectors of the anchors, or of the rows' texts or images. Rows with positives
          also have ``similarities``, the cosines of anchors and positives;
        - for words: ``tags``, null for a word that is cut off; ``entities``, each with the index of its first word, the
          index after its last word, its type and its text; ``words_cut``;
        - for running text: ``loss`` and ``perplexity``;
        - for a user's module that turns an input into text, such as T5: ``answers``, ``losses`` and ``perplexities``;
        - for a user's module that is a language model: ``losses`` and ``perplexities`` of the rows by the run's own
          loss, their mean ``loss``, and the ``perplexity`` of this mean. There are also ``answers`` if rows mark a
          prompt and the module can generate text; if not, ``warnings`` says why;
        - for any other module of a user, if it is not a classifier: ``outputs``, a list for each row. If the module
          returns arrays or several outputs, such as the scores of an answer's start and end, a row has a dict of nested
          lists by name. Padding is left out. Outputs without an entry for each row are left out, too, and ``warnings``
          names them.

    Raises:
        InputError: the run is not finished, or the rows do not match the model.
    """
    if processes is not None and processes < 1:
        raise InputError(f"--processes {processes}: expected at least 1")
    result = _predict(path, file, client, last, given, processes)
    if output_files.has_files(result):
        result = output_files.write_files(result, files or Path(path) / "predictions" / "files", files is not None)
    for text in result["warnings"]:
        (progress or Bar()).notice(text)
    return result


def _predict(
    path: str | Path, file: Any, client: str | None, last: bool, given: Any, processes: int | None
) -> dict[str, Any]:
    from fedfm.data.rows_to_predict import read_inputs
    from fedfm.data.sources._files import existing
    from fedfm.linalg.threads import torch_threads
    from fedfm.models import lost_words
    from fedfm.models.language.generation import left_out, settings_in_force

    if user_runs.is_own(run := _find_run(path, client)):
        if (processes or 1) > 1:
            raise InputError("--processes: a module of your own is in one process; drop it")
        with torch_threads(1):
            result: dict[str, Any] = user_runs.predict(run, file, given, client, last=last and _another(run, client))
        sure = _certain(result.get("probabilities", ()))
        return {"run": str(path)} | result | {"warnings": [*result.get("warnings", ()), *sure]}
    existing(Path(file), "file")  # before the model is loaded, which takes time
    run, model, w = load(path, client, last=last, processes=processes)
    with torch_threads(1), contextlib.closing(model) if hasattr(model, "group") else contextlib.nullcontext():
        shape = run.manifest["model"]
        known: dict[str, Any] = {
            "trained": profile_of(run),
            "classes": () if model.task.own_targets else shape["classes"],
        }
        table = read_inputs(Path(file), run.experiment.data, kind=shape["kind"], **known)
        if shape["feature_dim"] and table.inputs.shape[1] != shape["feature_dim"]:
            raise InputError(
                f"{file} contains vectors of {table.inputs.shape[1]} values; the model takes {shape['feature_dim']}"
            )
        answer = model.task.answer(TrainedRun(run.experiment.method, model, w), table)
        result = {"run": str(path)} | unanswered_rows.withhold_unanswered(answer)
    of_model = [text for text in model.notices if text not in run.manifest.get("notices", ())]  # else said in the run
    if _ID in table.columns:
        result["ids"] = ids = table.columns[_ID].tolist()
        if shared := len(ids) - len(set(ids)):
            of_model.append(f'{shared} of {len(ids)} rows of {file} have the id (column "{_ID}") of an earlier row')
    greedy = [text for text in (left_out(model), settings_in_force(model)) if text]
    of_task, sure = result.get("warnings", ()), _certain(result.get("probabilities", ()))
    lost = lost_words.notices(table, range(len(table)), model)
    result["warnings"] = [*of_model, *table.notices, *lost, *of_task, *greedy, *sure]
    folder = Path(file).expanduser()
    if folder.is_dir() and (names := _files_of(table, model.task)):
        result["files"] = [os.path.relpath(name, folder) for name in names]
    result["warnings"] += unanswered_rows.describe_unanswered(result)
    return result


def _files_of(table: Table, task: ModelTask) -> list[str]:
    """The path of each row's file, for images, and for a task with a column of files; [] for other rows."""
    if table.kind == "image":
        found = list(table.inputs)
    elif any(column.files for column in task.columns):
        found = [next((held.source for held in attachments_of(row)), None) for row in table.inputs]
    else:
        return []
    return found if all(isinstance(name, str) for name in found) else []


def _certain(probabilities: Sequence[Sequence[float]]) -> list[str]:
    """A warning if there are several rows and all have probability 1.000."""
    sure = [max(p) for p in probabilities if p and isinstance(p, list)]  # with several labels per row, p is a dict
    if len(sure) < _SEVERAL or min(sure) < _SURE or len(next(p for p in probabilities if p)) == 1:
        return []
    return [
        f"all {len(sure)} predictions have probability 1.000: the model is overfitted, or the rows are not scaled "
        "as its training rows were; these probabilities do not measure the model's confidence"
    ]


@dataclass(frozen=True)
class TrainedRun:
    """The run's model with its method, in the form that a task needs for predictions."""

    method: Method[Any]
    model: Model
    w: Params

    def encode(self, rows: Rows) -> Rows:
        return predictions.encode_rows(self.method, self.model, rows)

    def logits(self, rows: Rows) -> Tensor:
        return predictions.logits(self.method, self.model, self.w, rows)

    def apply(self, rows: Rows) -> AbstractContextManager[Rows]:
        return predictions.apply_model(self.method, self.model, self.w, rows)


@refuse("the run's model cannot be exported")
def export(
    path: str | Path,
    to: Target,
    out: str | Path,
    client: str | None = None,
    *,
    last: bool = False,
    given: Any = None,
) -> str:
    """Write the run's model for other libraries, with a model card; returns the folder.

    Args:
        path: a finished run.
        to: "peft": the adapter; "hf": a folder of transformers, with the adapter merged; "torch": plain tensors.
        out: a new or empty folder.
        client: the owner of the model, if every client has its own.
        last, given: as for :func:`predict`.

    Raises:
        InputError: the run is not finished, the folder is not empty, or the model cannot have this form.
    """
    out = Path(out)
    new_folders.refuse_used(out)
    run = _find_run(path, client)
    with new_folders.fill(out, "exporting a model") as half:
        _write_export(run, to, half, client, last, given)
    return str(out)


def _write_export(run: Run, to: Target, out: Path, client: str | None, last: bool, given: Any) -> None:
    from fedfm.api import model_card
    from fedfm.models import merged_export
    from fedfm.models.export import export as write

    if user_runs.is_own(run):
        with storage.writing(out):
            user_runs.write(run, to, out, given, client, last=last and _another(run, client))
        return
    run, model, w = load(run.path, client, last=last, in_files=merged_export.can_stay)
    if why := merged_export.needs_whole(model, to):
        complain(f"{run.path}: {why}, so this process loads the whole model")
        run, model, w = load(run.path, client, last=last, processes=1)
    if is_pair(w):
        raise InputError(
            f"{run.path}: {client} has two adapters, not one model; {run.adapter(client or '')} has their mean for "
            "PEFT, and each of them in global/ and local/"
        )
    if set(w) != set(model.names) and weighed_by(w) is None:
        raise InputError(
            f"{run.path}: the result of {run.experiment.method_name} is not a single model, so it cannot be exported; "
            "`fedfm predict` computes with it"
        )
    with storage.writing(out):
        head_takes, scale = predictions.feature_transform(run.experiment.method), run.experiment.data.scale
        folder = write(model, w, to, out, head_takes, scale=scale)
        method = run.experiment.method
        mixture = method.mixture_in_code(model) if isinstance(method, Predictor) and weighed_by(w) == GATE else ()
        model_card.write(run.path, model, to, folder, client, mixture)
