"""Rules on clients that train with several processes each."""

from __future__ import annotations

from fedfm.attacks.attack import locals_of
from fedfm.config.parts import ExperimentParts
from fedfm.core.capabilities import HiddenModel, Needs
from fedfm.core.method import nested_methods
from fedfm.errors import Faults
from fedfm.training import TrainsLocally
from fedfm.training.sharded import messages, settings


def check(e: ExperimentParts, key: str = settings.KEY) -> None:
    """Refuse what a client's group of processes cannot compute; nothing falls back to one process.

    Args:
        key: the setting that asks for the group.

    Raises:
        InputError: the message has a line for each reason.
    """
    run, faults, method = e.run, Faults(), f'method "{e.method_name}"'

    def refuse(reason: str) -> None:
        faults.say(f"{key}: {reason}", key=key)

    if e.in_memory or e.own_code:
        refuse("a module from Python is in one process; expected a folder or hub id in model.name")
        faults.refuse()
    if run.engine == "simulation" or (run.engine == "deployment" and e.data.classes is None):
        refuse(f'on engine = "{run.engine}" only silos with their own rows start processes; expected engine = "local"')
    if run.workers > 1:
        refuse(f"run.workers = {run.workers}: clients take turns, since each uses all processes; drop run.workers")
    if run.gpus_per_client is not None:
        refuse("run.gpus_per_client: each process takes one GPU; drop it")
    if run.kernels != "exact":
        refuse(f'run.kernels = "{run.kernels}": cohorts are packed in one process; drop it')
    if e.data.augment:
        refuse("data.augment: images are changed in one process; drop it")
    if e.attack is not None:
        refuse("[attack] replaces client halves of one process; drop it")
    if e.privacy is not None and e.privacy.mechanism == "dp_sgd":
        refuse(
            'privacy.mechanism = "dp_sgd": it reads the gradients of single rows inside of layers, and a process '
            'has only a part of each layer; expected one process, or privacy.unit = "client"'
        )
    if not isinstance(e.method, TrainsLocally) or isinstance(e.method, HiddenModel) or e.method.needs != Needs():
        refuse(f"{method} computes with the model outside its client optimiser; expected e.g. fedavg")
    elif not all(m.traits.rows_by_optimiser for m in (e.method, *nested_methods(e.method))):
        refuse(f"{method} does not declare rows_by_optimiser: its clients may compute with the model themselves")
    with faults:
        settings.check_model(e.model, key)
    for local in dict.fromkeys(locals_of(e.method)):
        with faults:
            messages.of_local(local)
    faults.refuse()
