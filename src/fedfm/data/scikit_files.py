"""Read data files of scikit-learn without importing it, since the import takes longer than a small run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fedfm.errors import FedfmError


def scikit_file(name: str) -> Path:
    """Return the full path of a data file, given its path inside the installed package.

    Raises:
        FedfmError: scikit-learn is not installed, or has no such file.
    """
    spec = find_spec("sklearn")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (path := Path(folder, name)).is_file():
            return path
    raise FedfmError(f"scikit-learn, which fedfm needs, is not installed with its file {name}: install it again")
