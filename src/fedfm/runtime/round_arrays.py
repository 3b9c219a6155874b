"""A method's arrays of all rounds, joined at a run's end into one file for each name."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedfm.core import storage


def join(folder: Path, clients: Sequence[str], note: Callable[[str], None]) -> dict[str, str]:
    """Stack the rounds' arrays into one file per name; each file also has ``rounds``, ``clients`` and all texts.

    Args:
        folder: the run directory; ``arrays/round-NNNNNN.npz`` has the arrays of one round.
        note: receives a sentence about rounds whose file is damaged, or missing between two others.

    Returns:
        The files' names by the arrays' names.
    """
    loaded: dict[int, dict[str, np.ndarray]] = {}
    found = {int(path.stem.rpartition("-")[2]): path for path in sorted(folder.glob("arrays/round-*.npz"))}
    lost = [t for t in range(min(found, default=0), max(found, default=0)) if t not in found]
    for t, path in found.items():
        try:
            with open(path, "rb") as data, np.load(data, allow_pickle=False) as file:
                loaded[t] = dict(file)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            lost.append(t)
    if lost:
        rounds = ", ".join(map(str, sorted(lost)))
        note(f"arrays/ has damaged or missing files: the joined arrays lack round{'s' * (len(lost) > 1)} {rounds}")
    if not loaded:
        return {}
    last = loaded[max(loaded)]
    text = {name: x for name, x in last.items() if x.dtype.kind == "U"}
    files = {}
    for name in last.keys() - text.keys():
        stacked = np.stack([arrays[name] for arrays in loaded.values()])
        joined = io.BytesIO()
        named = {name: stacked, "rounds": np.array(list(loaded)), "clients": np.array(clients)}
        np.savez_compressed(joined, **named, **text)  # type: ignore[arg-type]
        storage.write_atomic(folder / f"{name}.npz", joined.getvalue())
        files[name] = f"{name}.npz"
    return files
