"""What a user meant by a key that other libraries have, or that stands in another table here."""

from __future__ import annotations

from collections.abc import Collection

from fedfm.errors import close

_SAME = {
    "lr": ("learning_rate",),
    "eta": ("learning_rate",),
    "step_size": ("learning_rate",),
    "batch": ("batch_size",),
    "bs": ("batch_size",),
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
    "lora_dropout": ("dropout",),
    "target_modules": ("targets",),
    "epsilon": ("target_epsilon",),
    "eps": ("target_epsilon",),
    "sigma": ("noise_multiplier",),
    "max_len": ("max_length",),
    "max_seq_length": ("max_length",),
    "label_column": ("label",),
    "text_column": ("text",),
}
_OPTIMISER = ("optimizer", "optimiser", "optim")
_PLACES = {
    "method.local": ("learning_rate", "epochs", "batch_size", "momentum", "weight_decay", "lambda", "micro_batch"),
    "method": ("rounds", "fraction"),
    "data.partition": ("clients",),
    "model.adaptation": ("rank", "dropout", "targets"),
    "model": ("max_length", "device", "dtype", "task"),
    "privacy": ("target_epsilon", "noise_multiplier", "delta", "clip_norm"),
    "run": ("seed", "engine", "workers", "min_clients", "timeout"),
}


def meant(key: str, known: Collection[str], path: str) -> str:
    """Suffix for a message on an unknown key: what was probably meant, or nothing.

    Args:
        known: the keys of the table ``path``.

    Example:
        >>> meant("lr", ["learning_rate", "epochs"], "method.local")
        ' (did you mean "learning_rate"?)'
        >>> meant("lr", ["rounds"], "method")
        ' (did you mean method.local.learning_rate?)'
    """
    word = key.lower()
    if word in _OPTIMISER:
        here = "optimiser" in known
        return ' (did you mean "optimiser"?)' if here else ' (did you mean method.local.name, e.g. "adam"?)'
    if near := [name for name in _SAME.get(word, ()) if name in known]:
        return f' (did you mean "{near[0]}"?)'
    for name in (word, *_SAME.get(word, ())):
        place = next((place for place, names in _PLACES.items() if name in names and place != path), None)
        if place is not None and name not in known:
            return f" (did you mean {place}.{name}?)"
    return close(key, known)
