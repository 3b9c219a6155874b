"""Functions of users that an experiment names as ``module:function``, in ``data.name`` and ``model.name``.

As with classes (see :mod:`fedfm.config.registry`), an experiment never makes Python import a function. The owner
of the process must first admit it: by writing the experiment, or by naming the function in a silo's file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from fedfm.data.user_functions import function as function
from fedfm.data.user_functions import is_function as is_function
from fedfm.data.user_functions import keep
from fedfm.errors import InputError


def admit_function(name: str, where: str) -> Callable[..., Any]:
    """Import ``module:function``. This runs the module, so the name must come from this process's owner.

    Raises:
        InputError: the function cannot be imported, or cannot be called.
    """
    module, _, attribute = name.partition(":")
    try:
        found = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # the import runs the module's own code, which may raise any error
        from fedfm.core.error_places import of_import

        raise InputError(f'{where} = "{name}": {of_import(error)}', key=where) from None
    if not callable(found):
        raise InputError(f'{where} = "{name}": a {type(found).__name__}; expected a function', key=where)
    keep(name, found)
    return found


def fill_from_trainer(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Complete an experiment whose ``data.name`` is a function that returns a transformers Trainer.

    The Trainer's arguments set ``[method.local]`` and ``run.seed`` where the experiment does not. Other experiments are
    returned unchanged.

    Raises:
        InputError: the function cannot be called, or its Trainer has an argument that clients cannot apply.
    """
    data, method, run = (tables.get(key) for key in ("data", "method", "run"))
    name = data.get("name") if isinstance(data, Mapping) else None
    if name is None or not is_function(name) or not isinstance(method, Mapping) or not isinstance(run or {}, Mapping):
        return tables
    local, run = method.get("local", {}), run or {}
    if not isinstance(local, Mapping):
        return tables
    from fedfm.models.user.function_calls import call
    from fedfm.models.user.user_inputs import read_inputs

    made = admit_function(name, "data.name")
    try:
        user_inputs = read_inputs(call(made, name, run.get("seed", 0)), local)
    except InputError as error:
        raise InputError(f"data.name: {name}: {error}", key="data.name") from None
    if user_inputs.seed is None:
        return tables
    from_trainer = {"method": {**method, "local": dict(user_inputs.local)}, "run": {"seed": user_inputs.seed, **run}}
    return {**tables, **from_trainer}
