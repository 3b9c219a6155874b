"""A federation of 1,000 to a million clients, of whom a hundred a round train: what grows with it, and what does not.

    python benchmarks/many_clients.py            # five minutes on one core, 1 GB of disk
    python benchmarks/many_clients.py --quick    # up to 10,000 clients, half a minute

A client has three training rows of 32 features and 0.75 test rows. Heads by FedAvg, 10 rounds, 100 clients a round,
scores of 100 clients at the start and at the end. Each line is a process of its own: its CPU time and its largest
resident size with Python and torch, and the files of its run directory.

A second table is of silos with files of their own on the folder engine, of whom ten a round train: seconds from the
start until the first request to train, and the bytes of hellos until then and in the run. The silos answer one after
the other in the server's process.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

COHORT, ROUNDS, FEATURES = 100, 10, 32
CLIENTS = (1_000, 10_000, 100_000, 1_000_000)
GOAL = 100_000  # clients of the goals
SILOS, ASKED = (10, 100, 1_000), 10  # silos of the folder engine, and those that a round asks


def rows(path: Path, clients: int) -> Path:
    """An npz of three training rows a client, and a fifth of all rows for tests."""
    rng, n = np.random.default_rng(0), clients * 15 // 4
    y = rng.integers(0, 5, n)
    x = (rng.standard_normal((n, FEATURES)) + np.eye(5, FEATURES)[y] * 3).astype(np.float32)
    np.savez(path, x=x, y=y)
    return path


def part(options: Any) -> None:
    """One run, in this process."""
    import fedfm

    share = COHORT / options.clients
    fedfm.run(
        {
            "data": {"path": str(options.path), "partition": {"name": "iid", "clients": options.clients}},
            "model": {"name": "features"},
            "method": {"name": "fedavg", "rounds": ROUNDS, "fraction": share, "local": {"learning_rate": 0.1}},
            "run": {
                "workers": 1,
                "evaluate_every": ROUNDS,
                "evaluate_fraction": 1.0 if options.everybody else share,
            },
        },
        options.out,
    )
    lines = [json.loads(line) for line in (options.out / "metrics.jsonl").read_text().splitlines()]
    ends = [line["seconds"] for line in lines]
    trained = [after - before for before, after in itertools.pairwise(ends[:-1])]
    size = {p.name: p.stat().st_size / 1e6 for p in options.out.rglob("*") if p.is_file()}
    row = {"CPU s": time.process_time(), "s a round": statistics.median(trained), "peak MiB": common.peak_mib()}
    files = {f"{name.partition('.')[0]} MB": size[name] for name in ("manifest.json", "messages.jsonl", "report.html")}
    print(json.dumps(row | {"run directory MB": sum(size.values())} | files))


def run_on_folder_engine(options: Any) -> None:
    """One run on the folder engine, with its silos in a thread of this process."""
    import fedfm
    from fedfm.privacy.crypto import keys
    from fedfm.sites import silo_config
    from fedfm.sites.folder_server import SiloDesk

    root, rng, roster = options.out, np.random.default_rng(0), ""
    disk, private = root / "disk", bytes(range(32))
    server = keys.identity_of(private).hex()
    disk.mkdir(parents=True)
    for number in range(options.silos):
        silo, y = root / f"silo-{number:04d}", rng.integers(0, 5, 40)
        silo.mkdir()
        x = rng.standard_normal((40, FEATURES)) + np.eye(5, FEATURES)[y] * 3
        np.savez(silo / "rows.npz", x=x.astype(np.float32), y=y, classes=np.array(list("abcde")))
        own = f'name = "{silo.name}"\ndata = "rows.npz"\nidentity = "silo.key"\nserver = "{server}"\n'
        (silo / "silo.toml").write_text(own)
        roster += f'{silo.name} = "{silo_config.report(silo / "silo.toml")["public_key"]}"\n'
    (root / "roster.toml").write_text(roster)
    (root / "server.key").write_text(private.hex())
    (root / "server.key").chmod(0o600)
    over, desks, trained = threading.Event(), dict[str, SiloDesk](), list[float]()

    def answer() -> None:
        while not over.wait(0.01):
            for box in sorted((disk / "to").glob("*")):
                if box.name not in desks:
                    desks[box.name] = SiloDesk(root / box.name / "silo.toml", disk)
                desks[box.name].answer()

    class Started(fedfm.Progress):
        def round(self, line: Any) -> None:
            trained.append(time.perf_counter() - began)

    paths = {"folder": disk, "roster": root / "roster.toml", "identity": root / "server.key"}
    thread, began = threading.Thread(target=answer, daemon=True), time.perf_counter()
    thread.start()
    try:
        fedfm.run(
            {
                "data": {"classes": list("abcde"), "kind": "features", "width": FEATURES},
                "model": {"name": "features"},
                "method": {"name": "fedavg", "rounds": 3, "fraction": ASKED / options.silos},
                "run": {"engine": "folder", "evaluate_every": 0, "evaluate_fraction": ASKED / options.silos}
                | {key: str(path) for key, path in paths.items()},
            },
            root / "run",
            progress=Started(),
        )
    finally:
        over.set()
        thread.join()
    lines = [json.loads(line) for line in (root / "run" / "messages.jsonl").read_text().splitlines()]
    hellos = [line for line in lines if line["handler"] == "query.hello"]
    early = [line["bytes"] for line in hellos if line["round"] == 0]
    row = {"s before round 1": trained[0], "kB of hellos before round 1": sum(early) / 1e3}
    row |= {"kB of hellos in 3 rounds": sum(line["bytes"] for line in hellos) / 1e3}
    print(json.dumps(row | {"silos that got a hello": len(hellos) // 2, "s of the run": trained[-1]}))


def main() -> None:
    options = common.arguments(
        __doc__,
        clients={"type": int},
        path={"type": Path},
        out={"type": Path},
        everybody={"action": "store_true"},
        silos={"type": int},
    )
    if options.silos:
        run_on_folder_engine(options)
        return
    if options.clients:
        part(options)
        return
    folder, script = common.scratch(), str(Path(__file__).resolve())

    def measure(clients: int, path: Path, *more: str) -> dict[str, Any]:
        out = str(folder / f"run-{clients}{len(more)}")
        found = common.child(script, "--clients", str(clients), "--path", str(path), "--out", out, *more, limit=3600)
        return {"clients": clients, "scores of": "all" if more else COHORT} | found

    table = []
    for clients in CLIENTS[:2] if options.quick else CLIENTS:
        path = rows(folder / f"{clients}.npz", clients)
        table.append(measure(clients, path))
        if clients <= GOAL:
            table.append(measure(clients, path, "--everybody"))
        path.unlink()
    goals = []
    for row in table:
        if row["clients"] == GOAL and row["scores of"] == COHORT:
            bounds = {"CPU s": 60, "peak MiB": 1024, "run directory MB": 20}
            goals = [common.goal(f"{key}, {GOAL:,} clients", row[key], most=most) for key, most in bounds.items()]
    few = []
    for silos in SILOS[:2] if options.quick else SILOS:
        found = common.child(script, "--silos", str(silos), "--out", str(folder / f"silos-{silos}"), limit=3600)
        few.append({"silos": silos, "asked in a round": ASKED} | found)
    tables = [{"title": "Growth with the federation", "rows": table}, {"title": "Silos of a folder", "rows": few}]
    common.emit("Many clients", tables, goals)


if __name__ == "__main__":
    sys.exit(main())
