"""Suggestions for unknown keys: keys of other libraries, or keys of another table."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import fields
from functools import cache, cached_property
from typing import Protocol

from fedfm.config.registry import ours, resolve
from fedfm.core import tasks
from fedfm.core.fields import key_of
from fedfm.errors import InputError, close, closest, quote_names

_SAME = {
    "lr": ("learning_rate",),
    "eta": ("learning_rate",),
    "step_size": ("learning_rate",),
    "batch": ("batch_size",),
    "bs": ("batch_size",),
    "batchsize": ("batch_size",),
    "file": ("path",),
    "n_jobs": ("workers",),
    "local_epochs": ("epochs",),
    "num_epochs": ("epochs",),
    "num_train_epochs": ("epochs",),
    "wd": ("weight_decay",),
    "lambda": ("mu",),
    "lambda_": ("lambda", "mu"),
    "proximal_mu": ("mu",),
    "num_rounds": ("rounds",),
    "n_rounds": ("rounds",),
    "num_clients": ("clients",),
    "n_clients": ("clients",),
    "fraction_fit": ("fraction",),
    "sample_rate": ("fraction",),
    "r": ("rank",),
    "lora_rank": ("rank",),
    "lora_alpha": ("alpha",),
    "lora_dropout": ("dropout",),
    "path": ("name",),  # of a model
    "dataset": ("name", "path"),
    "target_modules": ("targets",),
    "epsilon": ("target_epsilon",),
    "eps": ("target_epsilon",),
    "sigma": ("noise_multiplier",),
    "max_len": ("max_length",),
    "max_seq_length": ("max_length",),
    "label_column": ("label",),
    "text_column": ("text",),
}
_KIND = ("rule", "method", "type", "kind", "strategy", "algorithm")
_NAMED = ("aggregation", "attack", "method", "data.partition", "model.adaptation")  # tables whose keys depend on a name
_NAME = "method.local.name"
_INSTEAD = {  # keys whose value means something else here, and a value
    **dict.fromkeys(("optimizer", "optimiser", "optim", "opt"), (_NAME, "adam")),
    **dict.fromkeys(("gpu", "gpus", "cuda", "use_gpu", "use_cuda"), ("model.device", "cuda")),
    **dict.fromkeys(("clients_per_round", "num_clients_per_round", "min_fit_clients"), ("method.fraction", 0.2)),
}
_FEW = 6  # largest number of owners of a key that a hint names
_PLACES = {
    "method.local": ("learning_rate", "epochs", "batch_size", "momentum", "weight_decay", "lambda", "micro_batch"),
    "method": ("rounds", "fraction", "local"),
    "data.partition": ("clients", "alpha"),
    "model.adaptation": ("rank", "alpha", "dropout", "targets"),
    "model": ("max_length", "device", "dtype", "task"),
    "privacy": ("target_epsilon", "noise_multiplier", "delta", "clip_norm"),
    "run": ("seed", "engine", "workers", "min_clients", "timeout"),
}


class TakenKeys(Protocol):
    """Which keys the other tables of a file take."""

    method: str

    def refusal(self, key: str, **names: str) -> InputError | None:
        """Why a key ``a.b.c`` would be refused if the user wrote it; None if it would be accepted.

        Args:
            names: name of an inner table -> the name to assume for it, as ``local="adam"``.
        """


class UnknownKey(InputError):
    """A key that its table does not have.

    The message is only made when it is shown, because of many such faults the user sees only the first ones.

    Attributes:
        known: the keys that the table has.
    """

    def __init__(self, key: str, known: Collection[str], path: str, hint: str | None = None) -> None:
        super().__init__(key=f"{path}.{key}" if path else key)
        self.known, self._key, self._path = tuple(known), key, path
        if hint is not None:
            self.hint = hint

    @cached_property
    def hint(self) -> str:
        """What was probably meant, as the suffix of the message; "" if there is no good guess."""
        return suggestion(self._key, self.known, self._path)

    def __str__(self) -> str:
        table_of = f"[{self._path}]" if self._path else "the file"
        taken = quote_names(self.known) or 'a "name" alone'
        return f"{self.key}: unknown key{self.hint}; {table_of} takes {taken}"

    def among(self, taken: TakenKeys) -> UnknownKey:
        """The same error with a hint that fits the other tables: it does not name a key that they refuse."""
        return UnknownKey(self._key, self.known, self._path, _meant_among(self._key, self.known, self._path, taken))


def suggestion(key: str, known: Collection[str], path: str) -> str:
    """Suffix for a message on an unknown key: what was probably meant, or nothing.

    Args:
        known: the keys of the table ``path``.

    Example:
        >>> suggestion("lr", ["learning_rate", "epochs"], "method.local")
        ' (did you mean "learning_rate"?)'
        >>> suggestion("lr", ["rounds"], "method")
        ' (did you mean method.local.learning_rate?)'
    """
    found = next(_guesses(key, known, path), None)
    return close(key, known) if found is None else _question(found, path, _example(key, found))


def _guesses(key: str, known: Collection[str], path: str) -> Iterator[str]:
    """Keys of this and of other tables that may be meant, the best first."""
    word, inside = key.lower(), f"{path}." if path else ""
    if word in _INSTEAD:
        found = _INSTEAD[word][0]
        yield f"{inside}optimiser" if found == _NAME and "optimiser" in known else found
        return
    if word in _KIND and path in _NAMED:
        yield f"{path}.name"
    yield from (f"{inside}{name}" for name in _SAME.get(word, ()) if name in known)
    for name in (word, *_SAME.get(word, ())):
        having = {**_PLACES, "model": (*_PLACES["model"], *tasks.model_settings())}
        places = [place for place, names in having.items() if name in names and place != path]
        yield from (f"{place}.{name}" for place in sorted(places, key=lambda p: not (path and p.startswith(inside))))


def _question(key: str, path: str, rest: str = "") -> str:
    inside = f"{path}." if path else ""
    name = key.removeprefix(inside)
    shown = f'"{name}"' if path and key.startswith(inside) and "." not in name and key != _NAME else key
    return f" (did you mean {shown}{rest}?)"


def _example(key: str, guess: str) -> str:
    """An example value, if the value of the wrong key means something else."""
    found, value = _INSTEAD.get(key.lower(), ("", None))
    return f", e.g. {json.dumps(value)}" if found == guess else ""


def _meant_among(key: str, known: Collection[str], path: str, taken: TakenKeys) -> str:
    without = False  # a client optimiser
    for guess in _guesses(key, known, path):
        why = taken.refusal(guess)
        if why is None:
            return _question(guess, path, _example(key, guess))
        if why.owners:  # another kind of the same table takes it
            return _question(guess, "", f', with {guess.rpartition(".")[0]}.name = "{why.owners[0]}"')
        without |= why.key == "method.local"
    if without:
        return f" ({taken.method} has no client optimiser, hence no [method.local])"
    if owned := _owners(key.lower(), taken):
        return f" ({owned})"
    near = closest(key, known)
    return "" if near is None or taken.refusal(f"{path}.{near}" if path else near) else close(key, known)


def _owners(word: str, taken: TakenKeys) -> str:
    """The methods, and the optimisers of this method, that have such a key."""
    found = []
    for name in (word, *_SAME.get(word, ())):
        methods = [m for m in ours("methods") if name in _keys("methods", m)]
        if 0 < len(methods) <= _FEW:
            found.append(f"method.{name} is a key of {', '.join(methods)}")
        having, at = [o for o in ours("optimisers") if name in _keys("optimisers", o)], f"method.local.{name}"
        fit = [o for o in having if taken.refusal(at, local=o) is None]
        if 0 < len(fit) < _FEW:
            found.append(f"with method.local.name = {' or '.join(json.dumps(o) for o in fit)} there is {at}")
    return "; ".join(found)


@cache
def _keys(kind: str, name: str) -> set[str]:
    return {key_of(f.name) for f in fields(resolve(kind, name)) if f.init}
