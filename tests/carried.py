"""A federation whose messages are files: two silos with rows, files and keys of their own, in this process.

The engine asks its ``stop`` while it waits. There the silos answer, so that no thread and no clock decides what comes
first.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fedfm
from fedfm.cli.entry import main
from fedfm.linalg.params import Params
from fedfm.privacy.crypto import keys
from fedfm.runtime.run_directory import Run
from fedfm.sites import silo_config
from fedfm.sites.folder_server import SiloDesk
from small import features

NAMES = ("north", "south")


class Heard(fedfm.Progress):
    """Keeps what the operator is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def notice(self, text: str) -> None:
        self.lines.append(text)


class Carried:
    """The silos, the server's files, and the folder between them.

    Attributes:
        disk: the folder that carries the messages.
        desks: the silos' sides, by name; a silo that is not there does not answer.
        told: what the silos' owners saw.
    """

    def __init__(self, root: Path, tables: str = "", names: tuple[str, ...] = NAMES) -> None:
        self.root, self.disk, self.told = root, root / "disk", list[str]()
        self.disk.mkdir()
        self.server = keys.identity_of(bytes(range(32))).hex()
        (root / "server.key").write_text(bytes(range(32)).hex())
        (root / "server.key").chmod(0o600)
        roster = ""
        for number, name in enumerate(names):
            (root / name).mkdir()
            self.file(name).write_text(
                f'name = "{name}"\n{self.rows(name, number)}identity = "silo.key"\nserver = "{self.server}"\n{tables}'
            )
            roster += f'{name} = "{silo_config.report(self.file(name))["public_key"]}"\n'
        (root / "roster.toml").write_text(roster)
        self.desks = {name: self.desk(name) for name in names}

    def rows(self, name: str, number: int) -> str:
        """Write a silo's rows; the lines of its file about them."""
        features(self.root / name, n=60, d=4, classes=2, seed=number)
        return 'data = "rows.npz"\n'

    def file(self, name: str) -> Path:
        return self.root / name / "silo.toml"

    def desk(self, name: str) -> SiloDesk:
        """A silo's side as a new process has it."""
        return SiloDesk(self.file(name), self.disk, self.told.append)

    def pump(self) -> None:
        """Let the silos answer what is there."""
        for desk in self.desks.values():
            desk.answer()

    def tables(self, **changes: Any) -> dict[str, Any]:
        """The experiment of the local engine; the silos' rows are its clients'."""
        known: dict[str, Any] = {
            "data": {"clients": {name: str(self.root / name / "rows.npz") for name in self.desks}},
            "model": {"name": "features"},
            "method": {"name": "fedavg", "rounds": 2},
            "run": {"seed": 3, "workers": 1},
        }
        for table, values in changes.items():
            known[table] = {**known.get(table, {}), **values}
        return known

    def local(self, **changes: Any) -> dict[str, Any]:
        return fedfm.run(self.tables(**changes), self.root / "local", progress=fedfm.Progress())

    def engine(self, **changes: Any) -> dict[str, Any]:
        """The same on the folder engine."""
        return self.engine_of(self.tables(**changes))

    def engine_of(self, tables: dict[str, Any]) -> dict[str, Any]:
        """An experiment on the folder engine."""
        found = dict(tables)
        paths = {"folder": self.disk, "roster": self.root / "roster.toml", "identity": self.root / "server.key"}
        found["run"] = {**found["run"], "engine": "folder", "workers": 0, **{k: str(v) for k, v in paths.items()}}
        return found

    def letters(self, way: str, name: str) -> list[Path]:
        """The run's own files in a box."""
        return [
            path for path in self.disk.glob(f"{way}/{name}/*.letter") if path.name.startswith(("fedavg", "scaffold"))
        ]

    def left(self, name: str) -> list[dict[str, Any]]:
        """The silo's ledger."""
        return [json.loads(line) for line in (self.root / name / "silo.ledger.jsonl").read_text().splitlines()]

    def log(self, name: str) -> str:
        return (self.root / name / ".fedfm" / "silo.log").read_text()


def waiting(monkeypatch: Any, what: Callable[[], bool | None]) -> None:
    """Let the engine call this while it waits; True stops the run as Ctrl-C does."""
    import contextlib

    from fedfm.api import execute
    from fedfm.engines.folder import link

    @contextlib.contextmanager
    def flag() -> Any:
        yield lambda: bool(what())

    monkeypatch.setattr(execute, "_stop_flag", flag)
    monkeypatch.setattr(link, "_POLL", (0.001, 0.01))


class Summed:
    """Silos with files of their own and a finished run on the folder engine, whose server has no rows.

    Attributes:
        run: the run's folder, in ``root``.
    """

    def __init__(
        self,
        root: Path,
        monkeypatch: Any,
        tables: str = "",
        names: tuple[str, ...] = ("east", "north", "south"),
        **changes: Any,
    ) -> None:
        self.carried = Carried(root, tables, names)
        waiting(monkeypatch, self.carried.pump)
        self.tables: dict[str, Any] = changes | {"run": {"min_clients": 2}}
        fedfm.run(self.carried.engine(**self.tables), root / "run", progress=fedfm.Progress())
        self.run, self.root = root / "run", root

    def without(self, *names: str) -> Params:
        """The state of a run in which these silos never took part."""
        tables = self.carried.tables(**self.tables)
        for name in names:
            del tables["data"]["clients"][name]
        place = self.root / f"without-{'-'.join(names)}"
        fedfm.run(tables, place, progress=fedfm.Progress())
        state: Params = Run.open(place).state(Params)
        return state

    def sums(self, name: str) -> int:
        """The exit code of ``fedfm silo sums``, which has the manifest only; the file is ``{name}.sums``."""
        (self.root / "copy").mkdir(exist_ok=True)
        shutil.copy(self.run / "manifest.json", self.root / "copy")
        out = self.root / f"{name}.sums"
        return main(["silo", "sums", str(self.carried.file(name)), str(self.root / "copy"), "--out", str(out)])
