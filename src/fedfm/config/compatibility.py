"""Rules between tables of an experiment, with their messages.

Rules on a single value are bounds of its field (:mod:`fedfm.core.fields`). Rules between a method's own fields are in
its ``validate``.
"""

from __future__ import annotations

from fedfm.aggregation.mean import Mean
from fedfm.attacks.attack import locals_of
from fedfm.config.parts import ExperimentParts
from fedfm.config.registry import name_of
from fedfm.config.user_code import is_function
from fedfm.core import tasks
from fedfm.data.spec import IN_MEMORY
from fedfm.errors import InputError, quote_names
from fedfm.linalg.precisions import EXACT
from fedfm.training import TrainsLocally


def check_as_asked(e: ExperimentParts) -> None:
    """Check the rules on the method as the experiment specifies it.

    Raises:
        InputError: a rule is broken; the message is about the first one.
    """
    method, needs, adaptation, run = f'method "{e.method_name}"', e.method.needs, e.model.adaptation, e.run
    for local in locals_of(e.method):
        if local.personal:
            from fedfm.config import options

            options.check_momentum(local)
        if local.warmup and local.warmup_steps:
            raise InputError(
                "method.local.warmup_steps: it replaces warmup; drop one of the two",
                key="method.local.warmup_steps",
            )
    if (e.data.name == IN_MEMORY) != (e.model.name == IN_MEMORY):
        raise InputError(
            f'"{IN_MEMORY}": data and model are given by fedfm.federate(...), both or neither', key="data.name"
        )
    if e.own_code or is_function(e.model.name):
        from fedfm.config import options

        options.check_own_code(e, method)
    if e.in_memory and run.engine != "local":
        raise InputError(
            f'run.engine = "{run.engine}": data and model in memory run on engine = "local" only', key="run.engine"
        )
    # The task comes before the adaptation: no adaptation helps if the method does not take the task.
    if needs.tasks and e.model.task not in needs.tasks:
        raise InputError(
            f"model.task: {needs.because or method} takes {quote_names(needs.tasks)} only; set it", key="model.task"
        )
    if e.model.task is not None or tasks.lists_columns(e.data) or e.data.kind is not None:
        from fedfm.config import options

        options.check_task(e)
    local_takes = e.method.local.adaptations if isinstance(e.method, TrainsLocally) else ()
    for who, takes in ((needs.because or method, needs.adaptations), ("this client optimiser", local_takes)):
        if takes and adaptation is not None and adaptation.name not in takes:
            raise InputError(
                f'model.adaptation.name = "{adaptation.name}": {who} takes {quote_names(takes)} only',
                key="model.adaptation.name",
            )
    if e.data.classes is not None and run.engine not in ("deployment", "folder"):
        raise InputError(
            f'data.classes: only silos have rows; run.engine: expected "deployment" or "folder", not "{run.engine}"',
            key="data.classes",
        )
    if e.data.augment:
        from fedfm.config import options

        options.check_augmented(e, method)
    tasks.check_keys(e.model, tasks.task_named(e.model.task))
    if tasks.trained_classes(e.model) is not None and (run.engine == "folder" or e.data.classes is not None):
        raise InputError(
            "model.base_classes selects rows of the server, and here silos train on their own rows; drop it",
            key="model.base_classes",
        )
    if adaptation is not None and (most := max(needs.ranks, default=0)) > adaptation.rank:
        raise InputError(
            f"method.ranks = {list(needs.ranks)}: {most} is above model.adaptation.rank = {adaptation.rank}, the "
            "largest that the model has room for; raise model.adaptation.rank, and set alpha",
            key="method.ranks",
        )
    _check_engine(e, method)
    if run.local_scores and e.privacy is not None:
        raise InputError(
            "run.local_scores: [privacy] does not cover accuracies of single clients; drop one of the two",
            key="run.local_scores",
        )
    if run.evaluate_fraction < 1 and run.asynchronous is not None:
        raise InputError(
            "run.evaluate_fraction: with run.asynchronous every client works, and sends scores with its updates; drop "
            "one of the two",
            key="run.evaluate_fraction",
        )
    if run.patience or getattr(e.privacy, "halt_at_epsilon", None):
        from fedfm.config import options

        options.check_early_end(e, method)
    if e.aggregation.transport.form != "plain":
        from fedfm.config import guarantee

        guarantee.check_hidden(e, method)
    if run.transport != EXACT:
        from fedfm.config import options

        options.check_transport(e, method)


def _check_engine(e: ExperimentParts, method: str) -> None:
    """Refuse keys and models that do not go with the engine, or with its processes."""
    run, needs = e.run, e.method.needs
    if run.superlink is not None and run.engine != "deployment":
        raise InputError(f'run.superlink: only engine = "deployment" takes it, not "{run.engine}"', key="run.superlink")
    if run.ray_address is not None and run.engine != "simulation":
        raise InputError(
            f'run.ray_address: only engine = "simulation" takes it, not "{run.engine}"', key="run.ray_address"
        )
    if run.engine == "folder" or (run.folder, run.roster, run.identity) != (None, None, None):
        from fedfm.config import options

        options.check_folder(e, method)
    if run.gpus_per_client is not None and run.gpus_per_client > 1 and run.gpus_per_client % 1:
        raise InputError(
            f"run.gpus_per_client = {run.gpus_per_client}: expected at most 1, or a whole number of GPUs",
            key="run.gpus_per_client",
        )
    if run.processes_per_client > 1:
        from fedfm.config import processes

        processes.check(e)
    if e.model.compile and run.kernels != "exact":
        raise InputError(
            f'run.kernels = "{run.kernels}": packed clients skip the blocks that model.compile compiles; drop one',
            key="run.kernels",
        )
    if run.engine == "simulation" and ":" in e.model.device:
        raise InputError(
            f'model.device = "{e.model.device}": Ray shows each client\'s process only its own GPUs; expected "cuda"',
            key="model.device",
        )
    if run.wire and run.engine != "local":
        raise InputError(f'run.wire: engine = "{run.engine}" always serialises; drop it', key="run.wire")
    if needs.pooled and run.engine != "local":
        raise InputError(f'{method} pools all rows in one place: expected run.engine = "local"', key="run.engine")
    if needs.local and run.engine != "local":
        raise InputError(
            f'{needs.local}: all parties are in one place: expected run.engine = "local"', key="run.engine"
        )


def check_as_run(e: ExperimentParts) -> None:
    """Check the rules on the method under [privacy], which may make it call other client halves.

    Raises:
        InputError: a rule is broken; the message is about the first one.
    """
    method = f'method "{e.method_name}"'
    if e.attack is not None:
        from fedfm.config import options

        options.check_attack(e, method)
    if not isinstance(e.aggregation, Mean):
        where = f'aggregation.name = "{name_of("aggregation", e.aggregation)}":'
        if not e.method.means:
            raise InputError(f"{where} {method} takes no mean; drop it", key="aggregation.name")
        if e.privacy is not None:
            raise InputError(
                f"{where} the accounting of [privacy] assumes the mean; drop one of the two", key="aggregation.name"
            )
