"""Functions of users that this process may call: an experiment names one as ``module:function``.

:mod:`fedfm.config.user_code` imports them. Code below the experiment only finds functions that were admitted there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fedfm.data.spec import FUNCTION
from fedfm.errors import InputError

_admitted: dict[str, Callable[..., Any]] = {}


def is_function(name: Any) -> bool:
    """Whether a name has the form ``module:function``."""
    return isinstance(name, str) and re.fullmatch(FUNCTION, name) is not None


def keep(name: str, function: Callable[..., Any]) -> None:
    """Admit a function; the name must come from this process's owner."""
    _admitted[name] = function


def function(name: str, where: str) -> Callable[..., Any]:
    """The admitted function of this name.

    Raises:
        InputError: the function was not admitted.
    """
    if name not in _admitted:
        raise InputError(f'{where} = "{name}": code from outside fedfm, which nobody here has admitted', key=where)
    return _admitted[name]
