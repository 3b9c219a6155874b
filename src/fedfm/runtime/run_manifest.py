"""Write the manifest's entries before the first round: clients, split, fingerprints and notices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfm.core import tasks
from fedfm.core.client import ClientId
from fedfm.core.method import Method
from fedfm.errors import InputError
from fedfm.models import devices
from fedfm.models.model import Model
from fedfm.privacy.accountant import Accountant
from fedfm.runtime import beforehand
from fedfm.runtime.disclosure import check_partition, check_same, fingerprints, tell
from fedfm.runtime.partitioned import REST, Partitioned
from fedfm.runtime.population import feature_dim, operations
from fedfm.runtime.who_scores import scoring_notices, test_rows
from fedfm.training import Local, packed
from fedfm.training.local_job import over_classes
from fedfm.training.scheduler import trains_without

if TYPE_CHECKING:
    from fedfm.config.experiment import Experiment
    from fedfm.config.run_spec import RunSpec
    from fedfm.runtime.progress import Progress
    from fedfm.runtime.run_directory import Run

LORA_ALONE = ("lora",)
_NAMED = 10  # largest number of classes that a notice names
_COMPARED = 10_000  # largest number of clients whose names are compared with each other


def describe(run: Run, population: Partitioned, progress: Progress) -> None:
    """Write clients, split, fingerprints and notices into the manifest; refuse a run that is resumed on other data."""
    table = population.federated.table
    prints = fingerprints(run, table, population.model)
    check_same(run, prints, "a resumed run needs the rows and the model with which it started")
    partition = check_partition(run, population.federated)
    notices = beforehand.check(run.experiment.method, population)
    notices += [*of_rows(run.experiment.method, population), *of_model(run.experiment.run, population.model)]
    notices += [*_elsewhere(run, population.model), *of_delta(run.experiment, population)]
    facts = [*of_method(run.experiment.method), *of_arrival(run.experiment, len(population.clients))]
    facts += scoring_notices(run.experiment, *test_rows(run.experiment, population.federated))
    if run.experiment.run.evaluate_fraction < 1:
        from fedfm.runtime import sampled_clients

        facts += sampled_clients.forewarn(run.experiment)
    for notice in (*notices, *facts, *_on_disk(population)):
        progress.notice(notice)
    run.manifest["notices"] += [text for text in facts if text not in run.manifest["notices"]]
    run.manifest |= {
        "clients": run.manifest["clients"] if run.metrics() else list(population.clients),
        "attackers": list(population.attackers.names) if population.attackers else [],
        "fingerprints": prints,
        "model": {
            "classes": list(table.classes),
            "kind": table.kind,
            "feature_dim": feature_dim(table),
            "trainable": sum(population.model.layout.sizes.values()),
        },
    }
    if run.experiment.model.task is not None:
        from fedfm.runtime import keys_of_rows

        keys_of_rows.keep(run, population.model)
    tell(run, population.summary(), notices, table.profile, partition)
    fits(run.experiment, population.model)
    # Under [privacy] the ledger has no operations, since these would disclose the exact numbers of rows.
    if run.experiment.privacy is None and (costs := operations(run.experiment.method, population)) is not None:
        run.manifest["ledger"]["operations"] = costs
    run.write_manifest()


def of_delta(experiment: Experiment, population: Partitioned) -> list[str]:
    """Return a notice if delta is too large for the number of training rows.

    There is no notice if the unit of privacy is not a row, or if the number of rows is unknown.
    """
    privacy = experiment.privacy
    if privacy is None or not privacy.states_epsilon or privacy.unit != "record":
        return []
    from fedfm.privacy import plausibility

    said = plausibility.of_delta(privacy.delta or 0.0, sum(population.sizes().values()), "training rows")
    return [said] if said else []


def of_privacy(experiment: Experiment, spent: Accountant, clients: int) -> list[str]:
    """Return notices if the privacy guarantee is nearly empty; they depend on public values only."""
    privacy = experiment.privacy
    if privacy is None and spent.epsilon is None:
        return []
    from fedfm.privacy import plausibility

    found = [plausibility.of_epsilon(spent.epsilon)]
    if privacy is not None and privacy.states_epsilon and privacy.unit == "client":
        found.append(plausibility.of_delta(privacy.delta or 0.0, clients, "clients"))
    return [text for text in found if text]


def fits(experiment: Experiment, model: Model) -> None:
    """Refuse a model that the client optimiser cannot train, or that the mechanism of [privacy] cannot protect.

    Raises:
        InputError: the model does not fit; the error names a setting that would work.
    """
    _check_optimiser(experiment.method, model)
    mechanism = experiment.aggregation.mechanism
    mechanism.fits(model)
    if mechanism.plan is not None:
        from fedfm.training import private

        private.fits(model)


def of_method(method: Method[Any], counts: Mapping[ClientId, Sequence[int]] | None = None) -> list[str]:
    """Return notices before round 1. If known, ``counts`` has each client's number of training rows of each class."""
    return method.forewarnings(counts or {})


def of_arrival(experiment: Experiment, clients: int) -> list[str]:
    """Return the method's notices before a run in which updates may be stale."""
    late = experiment.run.asynchronous
    return [] if late is None or late.buffer >= clients else experiment.method.staleness_warnings()


def _similar(names: Sequence[str], of: str) -> list[str]:
    """Return notices about names that are spelled in two ways; none if all names are numbers of one length."""
    numbers = all(n.isascii() and n.removeprefix("client-").isdecimal() for n in names)
    if numbers and len({len(name) for name in names}) < 2:
        return []
    from fedfm.data.similar_names import spellings

    return spellings(names, of)


def of_rows(method: Method[Any], population: Partitioned) -> list[str]:
    """Return notices about the rows: rows that are left out, and probable mistakes."""
    model, found = population.model_or_none, [*population.federated.notices, *_no_task(population)]
    return [
        *found,
        *_similar(population.federated.table.classes, model.task.class_word if isinstance(model, Model) else "class"),
        *(_similar(population.clients, "client") if len(population.clients) <= _COMPARED else []),
        *_classes_without_rows(population),
        *_rows_not_judged(method, population),
        *row_notices(population),
        *beforehand.notices(population),
    ]


def of_silo(method: Method[Any], population: Partitioned) -> list[str]:
    """Return notices about a silo's rows and its model, for the silo's log and for ``fedfm silo check``.

    Raises:
        InputError: for the reasons of :func:`fedfm.runtime.beforehand.check`.
    """
    looked = beforehand.check(method, population)
    model = population.model_or_none
    said: Sequence[str] = () if model is None else model.notices
    return [*row_notices(population), *beforehand.notices(population), *looked, *said, *_notices_of_few(population)]


def _notices_of_few(population: Partitioned) -> list[str]:
    """Return a notice if a silo has too few test or validation rows to report scores on them."""
    from fedfm.runtime.coarse_scores import too_few

    model, found = population.model_or_none, list[str]()
    if not isinstance(model, Model):
        return []
    for rows in population.federated.clients.values():
        for words, part in (("test", rows.test), ("validation", rows.val)):
            why = too_few(len(part), model.task)
            found += [f"{len(part)} {words} rows: {why}"] if why else []
    return found


def row_notices(population: Partitioned) -> list[str]:
    """Return the notices that the model's template and the task give about the rows.

    Raises:
        InputError: for the reason of :func:`template_notices`.
    """
    table, model = population.federated.table, population.model_or_none
    if model is None:
        return []
    if model.tools.tokenizer is None and tasks.row_kind(table.kind) is None:
        if table.targets is None:
            return []
        table = replace(table, inputs=range(len(table)))  # such notices are about targets: images are not copied
        used = _trained_and_tested(population)
        return model.task.forewarnings({name: table.take(index) for name, index in used.items()}, model.tools)
    from fedfm.models import lost_words

    used = _trained_and_tested(population)
    parts = {name: table.take(index) for name, index in used.items()}
    lost = lost_words.notices(table, sorted({i for index in used.values() for i in index}), model)
    return [*template_notices(population), *lost, *model.task.forewarnings(parts, model.tools)]


def _trained_and_tested(population: Partitioned) -> dict[str, list[int]]:
    """Return indices of the rows on which clients train or validate, and of the rows on which any party tests."""
    clients = population.federated.clients.values()
    trained = [int(i) for rows in clients for i in (*rows.train, *rows.val)]
    tested = {*population.federated.test.tolist(), *(int(i) for rows in clients for i in rows.test)}
    return {"training": trained, "test": sorted(tested)}


def template_notices(population: Partitioned) -> list[str]:
    """Return notices about rows that the model's template shortens, because it cuts them or leaves a part out.

    Raises:
        InputError: the model's template cannot write a row.
    """
    table, model = population.federated.table, population.model_or_none
    of = tasks.row_kind(table.kind)
    if of is None or not of.answered or model is None or model.tools.tokenizer is None:
        return []
    from fedfm.models import left_out
    from fedfm.models.language import encoding

    tools, cut, losses = model.tools, [], {}
    for words, index in _trained_and_tested(population).items():
        if count := encoding.cut_rows(table, index, tools.tokenizer, tools.max_length, tools.template):
            cut.append(f"{count} of {len(index)} {words} rows")
        losses[words] = encoding.template_losses(table, index, tools.tokenizer, tools.template), len(index)
    found = left_out.notices(losses)
    if cut:
        found.append(
            f"{' and '.join(cut)} have more than {tools.max_length} tokens (model.max_length) and are cut: prompts "
            "lose their beginning, and answers lose their end, so the model does not learn where these answers end"
        )
    return found


def _on_disk(population: Partitioned) -> list[str]:
    """Return a notice if an earlier run has cached rows of these clients; it concerns this machine, not the run."""
    cache, table = population.cache, population.federated.table
    if cache is None or population.encode is not None or population.client_model is None or table.kind == "features":
        return []
    return cache.notices(table, [rows.train for rows in population.federated.clients.values() if len(rows.train)])


def _no_task(population: Partitioned) -> list[str]:
    """Return a notice if all training rows of all clients have the same label."""
    table = population.federated.table
    if table.labels is None or not population.clients:
        return []
    found = np.unique(table.labels[population.federated.all_rows("train")])
    if len(found) != 1:
        return []
    name = table.classes[found[0]] if found[0] < len(table.classes) else found[0]
    return [
        f'all training rows are of one class, "{name}": there is nothing to distinguish, and accuracies mean nothing'
    ]


def _classes_without_rows(population: Partitioned) -> list[str]:
    """Return a notice about classes without any training row, which no model can learn."""
    table = population.federated.table
    if table.labels is None or not table.classes:
        return []
    counts = np.bincount(table.labels[population.federated.all_rows("train")], minlength=len(table.classes))
    missing = [f'"{name}"' for name, n in zip(table.classes, counts, strict=False) if not n]
    if (
        not missing or len(missing) >= len(table.classes) - 1
    ):  # another notice covers the case that all rows have one class
        return []
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return [f"no client has a training row of {', '.join(missing[:_NAMED])}{more}"]


def _rows_not_judged(method: Method[Any], population: Partitioned) -> list[str]:
    """Return a notice if only clients compute scores, but some of the global test rows belong to no client."""
    if not method.traits.clients_judge or REST not in population.pieces:
        return []
    rest, total = len(population.pieces[REST]), len(population.federated.test)
    return [f"{rest} of {total} global test rows belong to no client: the accuracy covers only the others"]


def of_model(spec: RunSpec, model: Model) -> list[str]:
    """Return notices about settings that have no effect on this model, or that are too large for it."""
    return [*_idle(spec, model), *_too_wide(model)]


def _idle(spec: RunSpec, model: Model) -> list[str]:
    """Return notices about settings that have no effect for this model on this device."""
    found = [*model.notices]
    if model.spec.compile and (model.compiled or model.hollow) and trains_without(model):
        found.append(
            f"model.compile does nothing in training here: {model.adaptation} of {model.spec.name} trains in fedfm's "
            "own loops, which do not call the blocks"
        )
    if spec.kernels != "exact" and not packed.packs(model):
        where = "" if model.device.type == "cpu" else f" and a model on {model.device.type}"
        found.append(
            f'run.kernels = "{spec.kernels}" does nothing here: it packs LoRA of ViT and BERT classifiers in float32 '
            f"on a CPU, but not {model.adaptation} of {model.spec.name}{where}; clients train one at a time"
        )
    if spec.gpus_per_client is not None and model.device.type != "cuda":
        found.append(f"run.gpus_per_client does nothing here: the model is on {model.device.type}")
    return found


def _too_wide(model: Model) -> list[str]:
    """Return a notice if LoRA's rank is above the largest rank that the shape of a layer allows."""
    rank, least = dict[str, int](), dict[str, int]()
    for name, _, shape in model.layout.entries:
        for part, at in ((".lora_A.", 0), (".lora_B.", 1)):
            if part in name and len(shape) == 2:
                layer = name.partition(part)[0]
                rank[layer] = shape[at]
                least[layer] = min(least.get(layer, shape[1 - at]), shape[1 - at])
    wide = [layer for layer, width in least.items() if width < rank[layer]]
    if not wide:
        return []
    more = f" and of {len(wide) - 1} more" if len(wide) > 1 else ""
    return [
        f"model.adaptation.rank = {rank[wide[0]]} is above the width {least[wide[0]]} of {wide[0]}{more}; an update "
        "of a layer never has a higher rank than the layer's width, so a rank equal to the width learns as much with "
        "fewer bytes"
    ]


def _elsewhere(run: Run, model: Model) -> list[str]:
    """Record the device, or a group's devices; return a notice if a run continues on others, or with other settings."""
    before, now = run.manifest.get("device"), getattr(model, "runs_on", None) or devices.about(model.device)
    run.manifest["device"] = before or now
    if before in (None, now):
        return []
    names = (f"{d['type']} ({d['name']})" for d in (before, now))
    return ["the run began on {} and continues on {}: its results are not those of a run on one device".format(*names)]


def _check_optimiser(method: Method[Any], model: Model) -> None:
    """Refuse a client optimiser, or a weighting, that does not fit the model's loss or its trainable parameters."""
    if vars(method).get("weighting") == "tokens" and not model.task.means_over_tokens:
        raise InputError(
            f'method.weighting = "tokens": task "{model.task}" predicts no tokens; expected "size" or "uniform"'
        )
    for value in vars(method).values():
        if isinstance(value, Local):
            over_classes(model, value)
            if value.adaptations == LORA_ALONE:
                from fedfm.models.adapters import lora

                lora.need(model)
            value.fits(model)
        elif isinstance(value, Method):
            _check_optimiser(value, model)
