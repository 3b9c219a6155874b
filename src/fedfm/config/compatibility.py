"""What does not go together: the rules that span tables of an experiment, one entry each.

A rule says when it applies to an experiment ``e`` and, then, what is wrong and what would be right. Rules on a single
value are bounds of its field (:mod:`fedfm.core.fields`), rules between a method's own fields its ``validate``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from fedfm.aggregation.mean import Mean
from fedfm.attacks.attack import halves_of, locals_of
from fedfm.config.registry import name_of
from fedfm.core.capabilities import Private, Sampling
from fedfm.core.client import Update
from fedfm.data.spec import IN_MEMORY
from fedfm.errors import InputError, listed
from fedfm.training import TrainsLocally
from fedfm.training.personal import TwoModels

Rule = tuple[Callable[[Any], Any], Callable[[Any], str]]  # of an experiment: whether it is refused, and the message


def check(e: Any, rules: Sequence[Rule]) -> None:
    """Refuse an experiment to which one of the rules applies.

    Raises:
        InputError: with the message of the first.
    """
    for applies, message in rules:
        if applies(e):
            raise InputError(message(e))


def enough(e: Any, clients: int) -> None:
    """Refuse ``run.min_clients`` and an aggregation for which a federation of so many clients is too small.

    Raises:
        InputError: with the number of clients that it needs.
    """
    fraction = e.method.fraction if isinstance(e.method, Sampling) else 1.0
    cohort, least = max(math.floor(fraction * clients + 1e-9), 1), e.aggregation.least()
    if e.run.min_clients > cohort and not e.method.needs.pooled:
        asks = f"a round asks {cohort} of {clients} clients" if cohort < clients else f"there are {clients} clients"
        raise InputError(f"run.min_clients = {e.run.min_clients}: {asks}")
    if cohort < least:
        raise InputError(
            f'aggregation.name = "{_rule(e)}": it needs {least} updates a round, and a round asks {cohort} of '
            f"{clients} clients"
        )


def protected(method: Any, privacy: Any) -> Any:
    """The method under the [privacy] table.

    Raises:
        InputError: it has no mechanism of that kind.
    """
    if not isinstance(method, Private):
        raise InputError("privacy: this method has no mechanism of its own; drop [privacy]")
    return method.protected(privacy)


def _rule(e: Any) -> str:
    """Name of the aggregation."""
    return name_of("aggregation", e.aggregation)


def _robust(e: Any) -> bool:
    return not isinstance(e.aggregation, Mean)


def _refuses(e: Any, takes: Sequence[str]) -> bool:
    """Whether a party that takes only these adaptations (all, where none is named) refuses the model's."""
    adaptation = e.model.adaptation
    return bool(takes) and adaptation is not None and adaptation.name not in takes


def _local_takes(e: Any) -> tuple[str, ...]:
    return e.method.local.adaptations if isinstance(e.method, TrainsLocally) else ()


def _takes_only(who: str, takes: Sequence[str], e: Any) -> str:
    return f'model.adaptation.name = "{e.model.adaptation.name}": {who} takes {listed(takes)} only'


def _above(e: Any) -> int:
    """The largest of ``method.ranks`` where the model has no room for it, else 0."""
    most: int = max(e.method.needs.ranks, default=0)
    return most if e.model.adaptation is not None and most > e.model.adaptation.rank else 0


def _secagg(e: Any) -> bool:
    return e.privacy is not None and e.privacy.aggregator == "secagg"


def _protected(e: Any) -> Any:
    """The method under [privacy], which may need only a mean where the bare one asks; itself where it has none."""
    method = e.method
    if None not in (e.privacy.target_epsilon, e.privacy.delta):
        with contextlib.suppress(InputError):
            method = protected(method, e.privacy)
    return method


def _no_updates(e: Any) -> bool:
    """Whether no client half of the method returns an update, which an attacker could turn or scale."""
    return not any(get_type_hints(fn).get("return") is Update for fn in halves_of(e.method))


def _not_released(key: str) -> Rule:
    return (
        lambda e: e.privacy is not None and getattr(e.privacy, key) is not None,
        lambda e: f"privacy.{key}: no mechanism of this release takes it; drop it",
    )


def _momentum_of(e: Any) -> str:
    """The optimiser of a pair of models that is given a momentum which it has not; empty where all is well."""
    pairs = [local for local in locals_of(e.method) if isinstance(local, TwoModels)]
    return next((p.optimiser for p in pairs if p.momentum and p.optimiser != "sgd"), "")


AS_ASKED: tuple[Rule, ...] = (  # of the method as the experiment names it
    (_momentum_of, lambda e: f'method.local.momentum: only optimiser = "sgd" has one, not "{_momentum_of(e)}"'),
    (
        lambda e: (e.data.name == IN_MEMORY) != (e.model.name == IN_MEMORY),
        lambda e: f'"{IN_MEMORY}": data and model are given by fedfm.federate(...), both or neither',
    ),
    (
        lambda e: e.in_memory and e.run.engine != "local",
        lambda e: f'run.engine = "{e.run.engine}": data and model in memory run on engine = "local" only',
    ),
    (
        lambda e: _refuses(e, e.method.needs.adaptations),
        lambda e: _takes_only(e.method.needs.because or f'method "{e.method_name}"', e.method.needs.adaptations, e),
    ),
    (
        lambda e: _refuses(e, _local_takes(e)),
        lambda e: _takes_only("this client optimiser", _local_takes(e), e),
    ),
    (
        _above,
        lambda e: (
            f"method.ranks = {list(e.method.needs.ranks)}: {_above(e)} is above model.adaptation.rank = "
            f"{e.model.adaptation.rank}, the largest that the model has room for; raise that one, and set alpha"
        ),
    ),
    (
        lambda e: e.run.superlink is not None and e.run.engine != "deployment",
        lambda e: f'run.superlink: only engine = "deployment" attaches to one, not "{e.run.engine}"',
    ),
    (
        lambda e: e.run.wire and e.run.engine != "local",
        lambda e: f'run.wire: engine = "{e.run.engine}" always serialises; drop it',
    ),
    (
        lambda e: e.method.needs.pooled and e.run.engine != "local",
        lambda e: f'method "{e.method_name}" pools all rows in one place: expected run.engine = "local"',
    ),
    (
        lambda e: e.run.local_scores and e.privacy is not None,
        lambda e: "run.local_scores: accuracies of single clients are covered by no [privacy]; drop one",
    ),
    (
        lambda e: e.run.patience and not e.data.val_fraction,
        lambda e: "run.patience: early stopping judges validation rows; set data.val_fraction, e.g. 0.1",
    ),
    (
        lambda e: e.run.patience and not e.run.evaluate_every,
        lambda e: "run.patience: early stopping judges while the run goes on; run.evaluate_every = 0 never does",
    ),
    (
        lambda e: e.run.patience and e.privacy is not None,
        lambda e: "run.patience: validation losses of single clients are covered by no [privacy]; drop one",
    ),
    (
        lambda e: _secagg(e) and _robust(e),
        lambda e: (
            'privacy.aggregator = "secagg": a robust rule compares single updates, secure aggregation hides '
            f'them; drop it or "{_rule(e)}"'
        ),
    ),
    (
        lambda e: _secagg(e) and _protected(e).asks,
        lambda e: (
            f'privacy.aggregator = "secagg": the server of method "{e.method_name}" looks at single replies '
            f'({" and ".join(_protected(e).asks)}); expected "plain"'
        ),
    ),
    (
        lambda e: _secagg(e) and not _protected(e).means,
        lambda e: (
            f'privacy.aggregator = "secagg": method "{e.method_name}" sends no update that could be hidden; drop '
            "[privacy]"
        ),
    ),
    (
        _secagg,
        lambda e: (
            'privacy.aggregator = "secagg": secure aggregation is not in this release, the server sees each '
            'update; expected "plain"'
        ),
    ),
    *map(_not_released, ("noise_multiplier", "clip_norm", "halt_at_epsilon")),
)
AS_RUN: tuple[Rule, ...] = (  # of the method under [privacy], which may call other client halves
    (
        lambda e: e.attack is not None and e.in_memory,
        lambda e: "[attack]: rows that were given from Python cannot be attacked; drop it",
    ),
    (
        lambda e: (
            e.attack is not None
            and (
                not e.method.rounds
                or e.method.needs.pooled
                or e.method.needs.model == "server"
                or not halves_of(e.method)
            )
        ),
        lambda e: f'[attack]: method "{e.method_name}" has no client that trains, hence none that attacks; drop it',
    ),
    (
        lambda e: e.attack is not None and e.attack.needs == "update" and _no_updates(e),
        lambda e: (
            f'attack.name = "{name_of("attacks", e.attack)}": the clients of method "{e.method_name}" send no '
            'updates; "label_shuffle"?'
        ),
    ),
    (
        lambda e: e.attack is not None and e.attack.needs == "epochs" and not locals_of(e.method),
        lambda e: (
            f'attack.intensity = {e.attack.intensity}: method "{e.method_name}" has no [method.local] whose '
            "epochs it could multiply; expected 1"
        ),
    ),
    (
        lambda e: _robust(e) and not e.method.means,
        lambda e: f'aggregation.name = "{_rule(e)}": method "{e.method_name}" takes no mean; drop it',
    ),
    (
        lambda e: _robust(e) and e.privacy is not None,
        lambda e: f'aggregation.name = "{_rule(e)}": [privacy] is accounted for the mean; drop one of the two',
    ),
)
