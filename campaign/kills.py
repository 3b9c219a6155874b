"""Kills at random moments: no committed round is lost, and the final bits are those of a run that was left alone.

On the local engine a run is a fork of a process that has loaded the libraries already, so that a kill meets the run and
not the imports. Between kills the newest checkpoint is damaged now and then. On Flower's deployment the processes of a
federation of kits are killed: a silo's worker, its SuperNode, the SuperLink, the ServerApp, whole kits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gate import Gate, Outcome, scale_tries

import fedfm as library
from every_method import experiment_of
from fedfm.runtime import client as runtime_client
from fedfm.runtime import client_memory
from fedfm.runtime import server as runtime_server
from processes import SAME, fedfm, rounds

KILLS, DAMAGED, FLOWER = 450, 100, 50
SMALLER = 1e-4  # by which ciphertexts may be smaller: they are compressed, and in three runs they differed by 1e-5
PRIVATE = {"unit": "record", "mechanism": "dp_sgd", "clip_norm": 1.0, "target_epsilon": 8.0, "delta": 1e-5}
CLIENTS = {"unit": "client", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 1e-5}
METHODS: dict[str, dict[str, Any]] = {  # what is laid over the small experiment of a method
    "fedpft": {},
    "fedbaf": {},
    "fedbip": {},
    "fedms": {},
    "blindfed": {},
    "blindfed, CKKS": {"method": {"encryption": "ckks"}},
    "scaffold": {},
    "fedavg, secure sums": {"privacy": {"aggregator": "secagg"}},
    "fedavg, DP-SGD": {"privacy": PRIVATE},
    "fedavg, noise of the clients": {
        "privacy": {**CLIENTS, "aggregator": "secagg", "mechanism": "distributed_gaussian"}
    },
    "fedavg, noise of the server": {"privacy": CLIENTS},
}


def experiment(name: str, folder: Path) -> dict[str, Any]:
    """The small experiment of a method, of more rounds where it takes them, with a worker of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    method = name.partition(",")[0]
    tables = experiment_of(method, folder, rounds=4 if method == "blindfed" else 8, run={"workers": 1})
    for key, table in METHODS[name].items():
        tables[key] = {**tables.get(key, {}), **table}
    if name == "fedavg, DP-SGD":
        tables["method"]["local"] = {"learning_rate": 0.1, "batch_size": 8}
    return tables


def begin(experiment: Mapping[str, Any], out: Path, answer: Path) -> int:
    """A fork that runs, or resumes, and writes its result or its error; returns its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        silent = library.Progress()
        started = (out / "manifest.json").exists()
        result = library.resume(out, progress=silent) if started else library.run(experiment, out, progress=silent)
        answer.write_text(json.dumps(result))
        code = 0
    except BaseException:
        answer.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        os._exit(code)
    return 0


def end(child: int, after: float) -> int | None:
    """Kill it after so many seconds, if it still runs: its exit status, or None if it was killed."""
    limit = time.monotonic() + after
    while time.monotonic() < limit:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def checkpoints(out: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; some methods keep them in private/."""
    return sorted([*out.glob("checkpoint/round-*"), *out.glob("private/checkpoint/round-*")], key=lambda p: p.name)


def digest(path: Path) -> bytes:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).digest()


def damage(path: Path, rng: random.Random) -> bytes:
    """Flip one bit of a checkpoint, or cut its end off; returns its digest."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        del data[rng.randrange(len(data)) :]
    path.write_bytes(data)
    return digest(path)


def kill_runs(name: str, kills: int, damaged: int, folder: Path, found: Outcome, rng: random.Random) -> None:
    """Kill runs of one method ``kills`` times, and check that each resumed run loses nothing.

    Half of the kills come at any moment, the others soon after a round is committed, so that a run gets on. The newest
    whole checkpoint is compared before and after each.
    """
    tables = experiment(name, folder / "data")
    answer = folder / "answer.json"
    began = time.monotonic()
    if code := end(begin(tables, folder / "straight", answer), 600):
        found.failures.append(f"{name}: the run that is left alone fails ({code}): {reason(answer)}")
        return
    alone, seconds = json.loads(answer.read_text()), time.monotonic() - began
    met = hurt = number = 0
    while met < kills:
        out, number = folder / f"killed-{number}", number + 1
        answer.unlink(missing_ok=True)
        broken, floor, status = set[bytes](), "", None
        while status is None:
            child = begin(tables, out, answer)
            if rng.random() < 0.5:
                done, limit = rounds(out), time.monotonic() + 60
                while rounds(out) == done and not answer.exists() and time.monotonic() < limit:
                    time.sleep(0.002)
            status = end(child, rng.uniform(0.0, 0.5) * seconds)
            whole = [p.name for p in checkpoints(out) if digest(p) not in broken]
            now = max(whole, default="")
            found.require(now >= floor or status == 0, f"{name}: {floor} is lost after kill {met}")
            floor = now
            if status is None:
                met += 1
                if hurt < damaged and len(whole) > 1 and rng.random() < 0.5:
                    newest = max((p for p in checkpoints(out) if p.name == now), key=str)
                    broken.add(damage(newest, rng))
                    floor, hurt = sorted(whole)[-2], hurt + 1
        if status:
            found.failures.append(f"{name}: a killed run cannot go on ({status}): {reason(answer)}")
            return
        compare(name, json.loads(answer.read_text()), alone, found)
        shutil.rmtree(out)
    found.count("kills on the local engine", met)
    found.count("damaged checkpoints", hurt)
    found.count("methods")


def reason(answer: Path) -> str:
    """The last line of a fork's error."""
    error = answer.with_suffix(".error")
    return error.read_text().strip().splitlines()[-1][:300] if error.exists() else "it says nothing"


def compare(name: str, result: Mapping[str, Any], alone: Mapping[str, Any], found: Outcome) -> None:
    """The bits of a killed run against those of the run that was left alone.

    A batch of BlindFed that was under way is encrypted again, and the members of a secure sum agree on keys again: both
    cross again and are counted. Fresh noise of ciphertexts changes the last digits of BlindFed's weights, so there only
    the scores agree. Clients that share the noise of a sum add fresh noise in a round that is repeated, since its masks
    are others: the models differ, and the ledger must count the round once more.
    """
    hidden, noisy = name == "fedavg, secure sums", name == "fedavg, noise of the clients"
    again = name.startswith("blindfed") or hidden or noisy
    keys = [key for key in SAME if not (again and key.startswith("bytes"))]
    if name == "blindfed, CKKS":
        keys.remove("params_sha256")
    if noisy:
        keys = []
        found.require(result["epsilon"] >= alone["epsilon"], f"{name}: epsilon {result['epsilon']} is below that")
    if again:
        least = alone["bytes_up"] * (1 - (SMALLER if name == "blindfed, CKKS" else 0))
        found.require(result["bytes_up"] >= least, f"{name}: bytes that crossed are not counted")
    differing = [key for key in keys if result[key] != alone[key]]
    found.require(not differing, f"{name}: other {', '.join(differing)} than the run that was left alone")


def kill_kits(kills: int, folder: Path, found: Outcome, rng: random.Random, progress: Callable[[str], None]) -> None:
    """Kill processes of a federation of kits ``kills`` times; its runs must have the bits of undisturbed ones."""
    from kit_sites import SILOS, bits, sites

    while kills > 0:
        (place := folder / f"kits-{kills}").mkdir(parents=True)
        with sites(place, rounds=12) as at:
            alone = fedfm("run", at.alone, "--out", at.folder / "local")
            at.start()
            running, dead = at.begin(), 0
            while running.poll() is None and kills > 0:
                done, limit = rounds(at.folder / "run"), time.monotonic() + 240
                while rounds(at.folder / "run") == done and running.poll() is None and time.monotonic() < limit:
                    time.sleep(0.1)
                if running.poll() is not None:
                    break
                if time.monotonic() >= limit:
                    found.failures.append(f"no round within 240 s after {dead} kills: {at.told()[-300:]}")
                    return
                time.sleep(rng.uniform(0, 4))
                what = rng.choice(["worker", "worker", "SuperNode", "SuperNode", "SuperLink", "ServerApp", "kit"])
                if strike(at, what, rng.choice(SILOS)):
                    found.count(f"kills of a {what}" if what != "kit" else "kills of a silo's kit")
                    dead, kills = dead + 1, kills - 1
                    progress(f"{what} killed at round {done}, {kills} to go")
            try:
                result = at.result(running, 600)
            except BaseException as error:
                found.failures.append(f"a run on Flower with {dead} kills does not end: {str(error)[-500:]}")
                return
            found.require(bits(result) == bits(alone), f"a run on Flower with {dead} kills has other bits")


def strike(at: Any, what: str, silo: str) -> bool:
    """Kill one process; False if it is not there just now."""
    try:
        if what == "worker":
            (lock,) = (at.kits / silo / ".fedfm/runs").glob("*/silo/worker.lock")
            os.kill(int(lock.read_text()), signal.SIGKILL)
        elif what == "SuperNode":
            at.kill(silo, "flower-supernode")
        elif what == "SuperLink":
            at.kill("server", "flower-superlink")
        elif what == "ServerApp":
            os.kill(int((at.folder / "run/private/server.lock").read_text().split()[0]), signal.SIGKILL)
        else:
            at.stop(silo, signal.SIGKILL)
            at.start(silo)
    except (OSError, ValueError):
        return False
    return True


def repeat_secrets() -> None:
    """Draw the same secrets in all runs of a method, since their bits are compared; each client has its own."""
    draw = client_memory.secret

    def secret(root: Path, client: str, name: str) -> bytes:
        client_memory.entropy = lambda n: hashlib.shake_256(f"{client} {name}".encode()).digest(n)
        return draw(root, client, name)

    for module in (runtime_client, runtime_server):
        vars(module)["secret"] = secret


def attempt(size: float, folder: Path, progress: Callable[[str], None]) -> Outcome:
    """Kill runs of all methods, then processes of Flower."""
    torch.set_num_threads(1)
    repeat_secrets()
    found, rng = Outcome(), random.Random(0)
    for name in METHODS:
        progress(name)
        place = folder / name.replace(", ", "-").replace(" ", "-")
        kill_runs(
            name,
            scale_tries(KILLS // len(METHODS), size),
            scale_tries(DAMAGED // len(METHODS), size),
            place,
            found,
            rng,
        )
        shutil.rmtree(place, ignore_errors=True)
    kill_kits(scale_tries(FLOWER, size), folder, found, rng, progress)
    return found


GATE = Gate("no committed round is lost, and the final bits are those of a run that was left alone", attempt)
