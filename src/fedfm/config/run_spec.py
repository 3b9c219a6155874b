"""The [run] table of an experiment."""

from __future__ import annotations

from dataclasses import dataclass

from fedfm.core.fields import setting
from fedfm.linalg.precisions import CODED, EXACT

ENGINES = ("local", "simulation", "deployment", "folder")
TRACKERS = ("mlflow", "tensorboard", "wandb")


@dataclass(frozen=True)
class AsynchronousSpec:
    """Buffered asynchronous rounds: see :mod:`fedfm.aggregation._asynchronous`."""

    buffer: int = setting(0, "K, updates per server update; later updates go into the next one", required=True, ge=1)
    staleness: float = setting(
        0.5, "a: an update that began tau server updates ago is weighted by (1 + tau)^-a", ge=0, finite=True
    )
    speeds: dict[str, float] = setting(
        dict, "relative speed of each client, if the engine simulates arrival", gt=0, finite=True
    )


@dataclass(frozen=True)
class RunSpec:
    """The [run] table."""

    engine: str = setting("local", "local, simulation, deployment or folder", choices=ENGINES)
    seed: int = setting(0, "seed of all random streams except secrets", ge=0)
    min_clients: int | None = setting(
        None, "the run stops if fewer clients give a valid reply [half of those that were asked]", ge=1
    )
    timeout: float = setting(600.0, "largest number of seconds for a client's answer", gt=0)
    extend_timeout: bool | None = setting(
        None, "wait longer if the measured time of the client's steps requires it [true; false if timeout is given]"
    )
    kernels: str = setting(
        "exact",
        "exact, or fast: clients are computed together, with equal results within a tolerance; fast_bf16 also "
        "multiplies in bfloat16, which is fast on some processors only (see `fedfm doctor`)",
        choices=("exact", "fast", "fast_bf16"),
    )
    workers: int = setting(
        0, "processes on the local engine; 0: one per core; on GPUs as many as run.gpus_per_client allows", ge=0
    )
    loader_workers: int = setting(
        0,
        "processes that decode images in advance for each training client, if the images do not fit in memory; the "
        "results do not depend on it",
        ge=0,
    )
    processes_per_client: int = setting(
        1,
        "processes that train one client together, each with a part of every weight; for silos, the least number",
        ge=1,
        le=4096,
    )
    gpus_per_client: float | None = setting(
        None, "GPUs per working client: with 0.5 two clients share one, with 2 a model uses two [1]", gt=0, finite=True
    )
    ray_address: str | None = setting(
        None, "simulation engine: host:port of a running Ray cluster; this machine must be one of its nodes"
    )
    deterministic: bool = setting(
        False, "on a GPU: use deterministic algorithms, which are slower; an operation that has none is an error"
    )
    wire: bool = setting(False, "local engine: serialise every message as a network would")
    transport: str = setting(
        EXACT,
        "type of trained values in messages, both ways: float32, bfloat16 (half of the bytes), or int8 (a quarter, "
        "with a step for each 256 values); the result states the error",
        choices=(EXACT, *CODED),
    )
    asynchronous: AsynchronousSpec | None = setting(
        None, "a round is a server update from the first updates that arrive: { buffer = 4 }"
    )
    superlink: str | None = setting(None, "deployment engine: host:port of a running SuperLink to use")
    root_certificates: str | None = setting(
        None, "PEM file of the certificate authority that signed the SuperLink's certificate"
    )
    folder: str | None = setting(None, "folder engine: the folder for messages; it must exist on both sides")
    roster: str | None = setting(None, "folder engine: TOML or JSON file with the silos' public keys by name")
    identity: str | None = setting(
        None, "folder engine: the file of the server's key, made if absent [~/.config/fedfm/server.key]"
    )
    shared: bool = setting(
        False, "let others read the run directory, as far as your umask allows [only its owner]; private/ stays closed"
    )
    evaluate_every: int = setting(1, "rounds between evaluations; 0: only at the end", ge=0)
    evaluate_fraction: float = setting(
        1.0,
        "share of the clients that are asked for scores, at least one; drawn once from run.seed, so all evaluations of "
        "a run ask the same clients, and their means are of this sample",
        gt=0,
        le=1,
    )
    patience: int = setting(
        0, "stop after this many rounds without a better validation loss; the best round's model is kept", ge=0
    )
    track: tuple[str, ...] = setting(
        (),
        "also write metrics, settings and the result to these trackers: mlflow, tensorboard, wandb (extras of the same "
        "names)",
        choices=TRACKERS,
    )
    local_scores: bool = setting(False, "clients send their model's accuracy after local training, before aggregation")
    target_accuracy: float | None = setting(
        None, "accuracy until which the ledger counts rounds and multiply-accumulates", gt=0, le=1
    )
