"""Rules that span tables of an experiment, with the message for each.

Rules on a single value are bounds of its field (:mod:`fedfm.core.fields`), rules between a method's own fields its
``validate``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, get_type_hints

from fedfm.aggregation import private
from fedfm.aggregation._asynchronous import with_buffer
from fedfm.aggregation.mean import Mean
from fedfm.aggregation.secure import Secure
from fedfm.attacks.attack import halves_of, locals_of
from fedfm.config import dp_sgd
from fedfm.config.cohorts import named_clients
from fedfm.config.registry import name_of, ours, resolve
from fedfm.config.user_code import is_function
from fedfm.core import tasks
from fedfm.core.capabilities import Keeping, Personal, Private, RowsByOptimiser, Sampling, Sealed, TakesLate
from fedfm.core.client import Update
from fedfm.core.method import nested
from fedfm.data.spec import IN_MEMORY
from fedfm.errors import Faults, InputError, listed
from fedfm.linalg.params import Params
from fedfm.linalg.quantised import EXACT
from fedfm.training import TrainsLocally
from fedfm.training.fit_head import HeadSpec
from fedfm.training.personal import TwoModels

_OWN_DATA = ("name", "partition", "val_fraction")  # keys of [data] that rows from a user's function take


def not_late(method: type, name: str) -> str:
    """Why no run of this method is asynchronous; "" if it may be."""
    if "takes_late" in vars(method):
        return ""
    names = [name for name in ours("methods") if "takes_late" in vars(resolve("methods", name))]
    return (
        f'run.asynchronous: method "{name}" needs the answers of a whole cohort to one state; expected {listed(names)}'
    )


def asynchronous(e: Any) -> Any:
    """The aggregation of an experiment with ``run.asynchronous``.

    Raises:
        InputError: something needs whole cohorts.
    """
    late, where = e.run.asynchronous, "run.asynchronous:"
    fraction = e.method.fraction if isinstance(e.method, Sampling) else 1.0
    if (why := not_late(type(e.method), e.method_name)) or not isinstance(e.method, TakesLate):
        raise InputError(why)
    if any(local.personal for local in locals_of(e.method)):
        raise InputError(
            f"{where} with this [method.local] every client ends with a model of its own; drop one of the two"
        )
    if e.privacy is not None:
        raise InputError(f"{where} [privacy] is accounted for rounds of whole cohorts; drop one of the two")
    if e.aggregation.transport.form != "plain":
        raise InputError(f"{where} a hidden sum is of clients that answer together; drop one of the two")
    if fraction < 1:
        raise InputError(
            f"{where} all clients train all the time, and method.fraction = {fraction:g} asks for fewer; drop it"
        )
    if (least := e.aggregation.least()) > late.buffer:
        raise InputError(
            f'{where} buffer = {late.buffer}: aggregation.name = "{_rule(e)}" needs {least} updates; expected at least '
            "so many"
        )
    if e.run.min_clients is not None and e.run.min_clients > late.buffer:
        raise InputError(
            f"run.min_clients = {e.run.min_clients}: a server update takes run.asynchronous.buffer = {late.buffer}"
        )
    if e.run.engine == "folder":
        raise InputError(f'{where} engine = "folder" waits for the answers of whole rounds; drop one of the two')
    if late.speeds and e.run.engine == "deployment":
        raise InputError(f"{where} speeds: on a deployment clients are as fast as they are; drop it")
    if e.data.clients:
        named_clients(late.speeds, e.data.clients)
    return with_buffer(e.aggregation, late.buffer, late.staleness, late.speeds)


def protected(method: Any, privacy: Any) -> Any:
    """A method with a mechanism of its own, under the [privacy] table.

    Raises:
        InputError: its mechanism gives no such guarantee.
    """
    faults = Faults()
    for key in ("noise_multiplier", "clip_norm", "clip_quantile", "halt_at_epsilon"):
        if getattr(privacy, key) is not None:
            faults.say(f"privacy.{key}: the method's own mechanism does not take it; drop it")
    faults.refuse()
    return method.protected(privacy)


def guaranteed(method: Any, aggregation: Any, privacy: Any) -> tuple[Any, Any]:
    """Method and aggregation under a [privacy] table that states an epsilon: here it is decided whose mechanism it is.

    Raises:
        InputError: no mechanism gives this guarantee.
    """
    if isinstance(method, Private):
        return protected(method, privacy), aggregation
    if privacy.mechanism == "dp_sgd":
        return method, dp_sgd.under(method, aggregation, privacy)
    _check_method(method)
    return method, private.under(aggregation, method, privacy)


def _check_method(method: Any) -> None:
    where = 'privacy.unit = "client":'
    if asks := _readable(method):
        raise InputError(
            f"{where} the server looks at replies of single clients ({listed(asks)}), and the noise is on means"
        )
    if not method.means:
        raise InputError(f"{where} this method sends no update that noise could hide; drop [privacy]")
    if isinstance(method, Keeping | Personal) or (isinstance(method, TrainsLocally) and method.local.personal):
        raise InputError(f"{where} every client ends with a model of its own, and the noise is on means")


def _readable(method: Any) -> list[str]:
    """Its client halves whose single replies the server can read."""
    sealed = method.sealed if isinstance(method, Sealed) else ()
    return [name for name in method.asks if name not in sealed]


def _rule(e: Any) -> str:
    """Name of the aggregation."""
    return name_of("aggregation", e.aggregation)


def check_as_asked(e: Any) -> None:
    """Check the rules on the method as the experiment names it.

    Raises:
        InputError: for the first rule that is broken.
    """
    method, needs, adaptation, run = f'method "{e.method_name}"', e.method.needs, e.model.adaptation, e.run
    for local in locals_of(e.method):
        if isinstance(local, TwoModels) and local.momentum and local.optimiser != "sgd":
            raise InputError(f'method.local.momentum: only optimiser = "sgd" has one, not "{local.optimiser}"')
        if local.warmup and local.warmup_steps:
            raise InputError("method.local.warmup_steps: it stands in place of warmup; drop one of the two")
    if (e.data.name == IN_MEMORY) != (e.model.name == IN_MEMORY):
        raise InputError(f'"{IN_MEMORY}": data and model are given by fedfm.federate(...), both or neither')
    if e.own_code or is_function(e.model.name):
        _check_own_code(e, method)
    if e.in_memory and run.engine != "local":
        raise InputError(f'run.engine = "{run.engine}": data and model in memory run on engine = "local" only')
    local_takes = e.method.local.adaptations if isinstance(e.method, TrainsLocally) else ()
    for who, takes in ((needs.because or method, needs.adaptations), ("this client optimiser", local_takes)):
        if takes and adaptation is not None and adaptation.name not in takes:
            raise InputError(f'model.adaptation.name = "{adaptation.name}": {who} takes {listed(takes)} only')
    if needs.tasks and e.model.task not in needs.tasks:
        raise InputError(f"model.task: {needs.because or method} takes {listed(needs.tasks)} only; set it")
    if e.data.classes is not None and run.engine != "deployment":
        raise InputError(
            f'data.classes: a server without rows needs silos that have some, run.engine = "deployment", not '
            f'"{run.engine}"'
        )
    if e.data.augment:
        _check_augmented(e, method)
    unseen = tasks.names(lambda task: task.scores_unseen_classes)
    if e.data.base_classes is not None and e.model.task not in unseen:
        raise InputError(
            f"data.base_classes: only names score classes without training rows; set model.task = {listed(unseen)}"
        )
    if adaptation is not None and (most := max(needs.ranks, default=0)) > adaptation.rank:
        raise InputError(
            f"method.ranks = {list(needs.ranks)}: {most} is above model.adaptation.rank = {adaptation.rank}, the "
            "largest that the model has room for; raise that one, and set alpha"
        )
    if run.superlink is not None and run.engine != "deployment":
        raise InputError(f'run.superlink: only engine = "deployment" attaches to one, not "{run.engine}"')
    _check_folder(e)
    if run.gpus_per_client is not None and run.gpus_per_client > 1 and run.gpus_per_client % 1:
        raise InputError(f"run.gpus_per_client = {run.gpus_per_client}: expected at most 1, or a whole number of GPUs")
    if e.model.compile and run.kernels != "exact":
        raise InputError(
            f'run.kernels = "{run.kernels}": packed clients call no block, and model.compile compiles blocks; drop one'
        )
    if run.engine == "simulation" and ":" in e.model.device:
        raise InputError(
            f'model.device = "{e.model.device}": Ray shows each client\'s process its own GPUs alone; expected "cuda"'
        )
    if run.wire and run.engine != "local":
        raise InputError(f'run.wire: engine = "{run.engine}" always serialises; drop it')
    if needs.pooled and run.engine != "local":
        raise InputError(f'{method} pools all rows in one place: expected run.engine = "local"')
    if needs.local and run.engine != "local":
        raise InputError(f'{needs.local}: all parties are in one place: expected run.engine = "local"')
    if run.local_scores and e.privacy is not None:
        raise InputError("run.local_scores: accuracies of single clients are covered by no [privacy]; drop one")
    if run.patience and e.privacy is not None:
        raise InputError("run.patience: validation losses of single clients are covered by no [privacy]; drop one")
    if run.patience and not e.data.val_fraction:
        raise InputError("run.patience: early stopping needs validation rows; set data.val_fraction, e.g. 0.1")
    if run.patience and not run.evaluate_every:
        raise InputError("run.patience: early stopping evaluates during the run, and run.evaluate_every = 0 does not")
    if isinstance(e.aggregation, Secure):
        _check_secagg(e, method)
    if run.transport != EXACT:
        _check_transport(e, method)


def _check_transport(e: Any, method: str) -> None:
    """Refuse ``run.transport`` where rounding would break a promise, or where no trained values cross."""
    where, halves = f'run.transport = "{e.run.transport}":', halves_of(e.method)
    if isinstance(e.aggregation, Secure):
        raise InputError(f"{where} secure aggregation codes updates itself, as whole numbers that add up; drop one")
    if e.privacy is not None:
        raise InputError(f"{where} [privacy] bounds the exact update of a client, and rounding may exceed it; drop one")
    if (own := vars(e.method).get("transport", EXACT)) != EXACT:
        raise InputError(f'{where} method.transport = "{own}" codes what {method} sends already; drop one')
    if e.method.needs.model == "server":
        raise InputError(f"{where} {method} sends ciphertexts, of which no bit may change; drop it")
    if e.method.needs.pooled:
        raise InputError(f"{where} {method} pools all rows in one place, and nothing crosses; drop it")
    statistics = not locals_of(e.method) and not any(isinstance(v, HeadSpec) for v in vars(e.method).values())
    if statistics or not any({Params, Update} & set(get_type_hints(half).values()) for half in halves):
        raise InputError(f"{where} {method} sends no trained values but statistics or predictions; drop it")


def _check_own_code(e: Any, method: str) -> None:
    if e.data.name != e.model.name:
        raise InputError(
            f'data.name = "{e.data.name or ""}", model.name = "{e.model.name}": one function brings rows and model; '
            "expected the same name twice"
        )
    for where, spec, used in (("data", e.data, _OWN_DATA), ("model", e.model, ("name",))):
        plain = type(spec)()
        for f in dataclasses.fields(spec):
            if f.name not in used and getattr(spec, f.name) != getattr(plain, f.name):
                raise InputError(f"{where}.{f.name}: {e.data.name} brings rows and model as they are; drop it")
    if "local" not in {f.name for f in dataclasses.fields(e.method)}:
        raise InputError(f'{method} has no client optimiser that trains a module; expected one that has, e.g. "fedavg"')


def _check_folder(e: Any) -> None:
    """Refuse what does not go with messages as files, and keys of this engine on another one."""
    run, method = e.run, f'method "{e.method_name}"'
    if run.engine != "folder":
        for key in ("folder", "roster", "identity"):
            if getattr(run, key) is not None:
                raise InputError(f'run.{key}: only engine = "folder" takes it, not "{run.engine}"')
        return
    if run.folder is None:
        raise InputError('run.folder: engine = "folder" needs the folder that carries the messages')
    if run.roster is None:
        raise InputError("run.roster: a file with the silos' public keys is needed; `fedfm silo check` prints each one")
    if e.attack is not None:
        raise InputError(
            f'[attack]: {method} on engine = "folder" has silos of their own, which do not attack; drop it'
        )
    if e.data.base_classes is not None:
        raise InputError('data.base_classes: silos of engine = "folder" train on all of their classes; drop it')


def _check_augmented(e: Any, method: str) -> None:
    adaptation = e.model.adaptation
    if e.in_memory:
        raise InputError("data.augment: the module's own data set changes its rows; drop it")
    if adaptation is not None and adaptation.name in ("head", "side_adapter", "prompt"):
        raise InputError(
            f'data.augment: with model.adaptation.name = "{adaptation.name}" the frozen backbone reads each picture '
            'once, and its features are trained on; drop it, or train what reads pictures, e.g. "lora"'
        )
    declared = (isinstance(m, RowsByOptimiser) and "rows_by_optimiser" in vars(type(m)) for m in _all(e.method))
    if not all(declared):
        raise InputError(
            f"data.augment: the clients of {method} read their pictures beside the local optimiser, which would see "
            "them unchanged; drop it, or take a method whose clients train by it alone, e.g. fedavg"
        )
    if e.privacy is not None and e.privacy.mechanism == "dp_sgd":
        raise InputError("data.augment: DP-SGD bounds one gradient of each row as it is; drop one of the two")


def _all(method: Any) -> tuple[Any, ...]:
    """The method and those in its fields."""
    return (method, *nested(method))


def hidden(aggregation: Any) -> Any:
    """The aggregation under ``privacy.aggregator = "secagg"``.

    Raises:
        InputError: a robust rule.
    """
    if isinstance(aggregation, Secure):
        return aggregation
    if type(aggregation) is not Mean:
        raise InputError(
            'privacy.aggregator = "secagg": a robust rule compares single updates, secure aggregation hides them; '
            f'drop it or "{name_of("aggregation", aggregation)}"'
        )
    return Secure()


def _check_secagg(e: Any, method: str) -> None:
    where = 'privacy.aggregator = "secagg":' if e.privacy is not None else 'aggregation.name = "secure":'
    bare = e.method
    if isinstance(bare, Private) and e.privacy and None not in (e.privacy.target_epsilon, e.privacy.delta):
        with contextlib.suppress(InputError):  # under [privacy] a method may use a mean where it else asks
            bare = protected(e.method, e.privacy)
    if asks := _readable(bare):
        raise InputError(
            f'{where} the server of {method} looks at single replies ({" and ".join(asks)}); expected "plain"'
        )
    if not bare.means:
        raise InputError(f"{where} {method} sends no update that could be hidden; drop it")


def check_as_run(e: Any) -> None:
    """Check the rules on the method under [privacy], which may call other client halves.

    Raises:
        InputError: for the first rule that is broken.
    """
    method, attack = f'method "{e.method_name}"', e.attack
    if attack is not None:
        if e.in_memory or e.own_code:
            raise InputError("[attack]: rows that were given from Python cannot be attacked; drop it")
        halves, needs = halves_of(e.method), e.method.needs
        if needs.model == "server":
            raise InputError(
                f"[attack]: the clients of {method} have no model, and attacks act on rows and updates of clients that "
                "have one; drop it"
            )
        if not e.method.rounds or needs.pooled or not halves:
            raise InputError(f"[attack]: {method} has no client that trains, hence none that attacks; drop it")
        if attack.needs == "update" and all(get_type_hints(fn).get("return") is not Update for fn in halves):
            raise InputError(
                f'attack.name = "{name_of("attacks", attack)}": the clients of {method} send no updates; '
                '"label_shuffle"?'
            )
        if attack.needs == "epochs" and not locals_of(e.method):
            raise InputError(
                f"attack.intensity = {attack.intensity}: {method} has no [method.local] whose epochs it could "
                "multiply; expected 1"
            )
    if not isinstance(e.aggregation, Mean):
        where = f'aggregation.name = "{_rule(e)}":'
        if not e.method.means:
            raise InputError(f"{where} {method} takes no mean; drop it")
        if e.privacy is not None:
            raise InputError(f"{where} [privacy] is accounted for the mean; drop one of the two")
