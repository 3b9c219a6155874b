"""Check that the files of a finished run belong together: its manifest, its last checkpoint and its clients' models.

Each of these files has a checksum of its own, and so is whole if it comes from another run. The result in the manifest
has a digest of the models, and the checkpoint has the experiment's settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfm.core.client import ClientId
from fedfm.core.method import Method
from fedfm.errors import InputError
from fedfm.linalg.params import Params, sha256_of
from fedfm.models.adapter_files import ABOUT, sha256_of_file
from fedfm.runtime.predictions import personal
from fedfm.runtime.resume_changes import check_edits
from fedfm.runtime.run_directory import Run


@dataclass(frozen=True)
class _Models(Mapping[ClientId, Params]):
    """The models that the server knows after a round; each is computed when it is read, since all may exceed memory."""

    method: Method[Any]
    state: Any
    clients: tuple[ClientId, ...]

    def __getitem__(self, client: ClientId) -> Params:
        return self.method.params_for(self.state, client)

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)


def final_state(run: Run, state_type: Any, *, mapped: bool = False) -> Any:
    """Return the state of :meth:`~fedfm.runtime.run_directory.Run.state`, if it is that of a finished run's result.

    Raises:
        InputError: the checkpoint is damaged, missing or of another run, or the manifest was edited.
    """
    state = run.state(state_type, mapped=mapped)
    if run.manifest["result"] is not None and (record := run.newest(mapped=True)[0]) is not None:
        refuse_other(run, record, state)
    return state


def refuse_other(run: Run, record: Mapping[str, Any], state: Any) -> None:
    """Refuse a checkpoint of another run, or a manifest whose experiment was edited after the last round.

    Args:
        record: the content of the checkpoint.
        state: the server's state in it.

    Raises:
        InputError: the two files do not belong together; the message names what differs.
    """
    check_edits(run, record, finished=True)
    method, result = run.experiment.method, run.manifest["result"]
    if (expected := result.get("server_sha256", result.get("params_sha256"))) is None:
        return  # an early version wrote the run
    clients = tuple(run.manifest["clients"]) if personal(method) else ("",)
    if sha256_of(_Models(method, state, clients)) != expected:
        raise InputError(
            f"{run.checkpoint(record['round'])}: these are not the parameters of the result in manifest.json; one of "
            "the two files is of another run: put back a copy of it"
        )


def refuse_other_model(run: Run, folder: Path) -> None:
    """Refuse a folder of a model whose files are not those that the run wrote there.

    Raises:
        InputError: the message names a file.
    """
    if fault := next(other_model(run, folder), None):
        raise InputError(f"{fault}: put back a copy of it")


def other_model(run: Run, folder: Path) -> Iterator[str]:
    """Yield a sentence about each file of a model that is missing, or is not the one that the run wrote."""
    if not isinstance(known := run.manifest.get("model_files"), dict):
        return  # an earlier version wrote the run
    of = f"{folder.relative_to(run.path)}/"
    there = {str(path.relative_to(run.path)) for path in folder.rglob(ABOUT)}
    for name in sorted(there | {name for name in known if name.startswith(of)}):
        if not (path := run.path / name).is_file():
            yield f"{path} is missing"
        elif known.get(name) != sha256_of_file(path):
            yield f"{path} is not the file that this run wrote"
