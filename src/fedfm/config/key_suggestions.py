"""Suggestions for unknown keys, which may be keys of other libraries or of another table."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import fields
from functools import cache, cached_property

from fedfm.config.registry import ours, resolve
from fedfm.core import tasks
from fedfm.core.fields import key_of
from fedfm.errors import InputError, close, quote_names

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
    "fraction_fit": ("fraction",),
    "sample_rate": ("fraction",),
    "r": ("rank",),
    "lora_rank": ("rank",),
    "lora_alpha": ("alpha",),
    "lora_dropout": ("dropout",),
    "path": ("name",),  # e.g. the path of a model
    "dataset": ("path", "name"),
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
_LOCAL, _NAME = "method.local.", "method.local.name"
_INSTEAD = {  # for keys whose values mean something else here: the key to set, and an example of its value
    **dict.fromkeys(("optimizer", "optimiser", "optim", "opt"), (_NAME, "adam")),
    **dict.fromkeys(("num_clients", "n_clients"), ("data.partition.clients", 10)),
    **dict.fromkeys(("gpu", "gpus", "cuda", "use_gpu", "use_cuda"), ("model.device", "cuda")),
    **dict.fromkeys(("clients_per_round", "num_clients_per_round", "min_fit_clients"), ("method.fraction", 0.2)),
}
_FEW = 6  # largest number of owners of a key that a hint names
_PLACES = {
    "method.local": ("learning_rate", "epochs", "batch_size", "momentum", "weight_decay", "micro_batch"),
    "method": ("rounds", "fraction", "local"),
    "data.partition": ("clients", "alpha"),
    "model.adaptation": ("rank", "alpha", "dropout", "targets"),
    "model": ("max_length", "device", "dtype", "task"),
    "privacy": ("target_epsilon", "noise_multiplier", "delta", "clip_norm"),
    "run": ("seed", "engine", "workers", "min_clients", "timeout"),
}


class UnknownKey(InputError):
    """A key that its table does not have.

    The message is made only when it is shown, because the user sees only the first of many such faults.

    Attributes:
        known: the keys that the table has.
    """

    def __init__(self, key: str, known: Collection[str], path: str) -> None:
        super().__init__(key=f"{path}.{key}" if path else key)
        self.known, self._key, self._path = tuple(known), key, path

    @cached_property
    def hint(self) -> str:
        """The key that was probably meant, as the suffix of the message; "" if there is no good guess."""
        return suggestion(self._key, self.known, self._path)

    def __str__(self) -> str:
        table_of = f"[{self._path}]" if self._path else "the file"
        taken = quote_names(self.known) or 'a "name" alone'
        return f"{self.key}: unknown key{self.hint}; {table_of} takes {taken}"


def suggestion(key: str, known: Collection[str], path: str) -> str:
    """Suffix for a message on an unknown key: the key that was probably meant, or nothing.

    Args:
        known: the keys of the table ``path``.

    Example:
        >>> suggestion("lr", ["learning_rate", "epochs"], "method.local")
        ' (did you mean "learning_rate"?)'
        >>> suggestion("lr", ["rounds", "local"], "method")
        ' (did you mean method.local.learning_rate?)'
    """
    found = next(_guesses(key, known, path), None)
    if found is not None and path == "method" and found.startswith(_LOCAL) and "local" not in known:
        return " (this method has no client optimiser, hence no [method.local])"
    if found is not None:
        return _question(found, path, _example(key, found))
    owned = _owners(key.lower()) if path.startswith("method") else ""
    return f" ({owned})" if owned else close(key, known)


def _guesses(key: str, known: Collection[str], path: str) -> Iterator[str]:
    """Yield keys of this table and of other tables that may be meant, the best guess first."""
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
    """Text with an example value if the wrong key has another kind of value than the key ``guess``; otherwise ""."""
    found, value = _INSTEAD.get(key.lower(), ("", None))
    return f", e.g. {json.dumps(value)}" if found == guess else ""


def _owners(word: str) -> str:
    """The methods and the client optimisers that have such a key."""
    found = []
    for name in (word, *_SAME.get(word, ())):
        methods = [m for m in ours("methods") if name in _keys("methods", m)]
        if 0 < len(methods) <= _FEW:
            found.append(f"method.{name} is a key of {', '.join(methods)}")
        having = [o for o in ours("optimisers") if name in _keys("optimisers", o)]
        if 0 < len(having) < _FEW:
            found.append(
                f"with method.local.name = {' or '.join(map(json.dumps, having))} there is method.local.{name}"
            )
    return "; ".join(found)


@cache
def _keys(kind: str, name: str) -> set[str]:
    return {key_of(f.name) for f in fields(resolve(kind, name)) if f.init}
