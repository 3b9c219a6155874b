"""The program of one rank: ``python -m fedfm.training.sharded.rank``, which a client's process or torchrun starts.

It connects to the client's process, then to the other ranks. Rank 0 receives each request and passes it on; all ranks
answer.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Client as connect
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from fedfm.core.rows import Rows
from fedfm.errors import InputError, first_line
from fedfm.models import devices, memory_budget
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.training.sharded import group, lockstep, messages, shards
from fedfm.training.sharded.settings import place_of
from fedfm.version import __version__

_FOREVER = datetime.timedelta(days=3650)  # the client's process decides when a rank hangs
_LAUNCHERS = (  # names of rank, number of ranks, and rank on this machine, by launcher
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


class RankPlace(NamedTuple):
    """Where this rank is: its number, the number of ranks, its number on this machine."""

    rank: int
    ranks: int
    local: int

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> RankPlace:
        """As the launcher's variables say."""
        for names in _LAUNCHERS:
            if names[0] in variables and names[1] in variables:
                rank, ranks = int(variables[names[0]]), int(variables[names[1]])
                return cls(rank, ranks, int(variables.get(names[2], rank)))
        raise SystemExit("the launcher sets neither RANK and WORLD_SIZE nor SLURM_PROCID and SLURM_NTASKS")


class ProgressCount:
    """How far this rank is; another thread tells the client's process."""

    def __init__(self) -> None:
        self.count, self.at = 0, ""

    def __call__(self, text: str) -> None:
        self.count, self.at = self.count + 1, text


def main() -> None:
    """Answer requests until the client's process ends."""
    place, progress = RankPlace.of(os.environ), ProgressCount()
    host, _, port = os.environ[group.ADDRESS].rpartition(":")
    key = bytes.fromhex(os.environ.pop(group.SECRET))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store = _store(place)
    hello = {
        "rank": place.rank,
        "ranks": place.ranks,
        "machine": socket.gethostname(),
        "host": "127.0.0.1" if host == "127.0.0.1" else socket.gethostname(),
        "port": 0 if store is None else store.port,
        "fedfm": __version__,
        "torch": str(torch.__version__),
        "gpu": gpu_of(place.local),
    }
    # Each connection is greeted before the next one is made: the client's process accepts one at a time.
    watch = connect((host, int(port)), authkey=key)
    watch.send_bytes(messages.encode({"rank": place.rank, "ranks": place.ranks, "channel": "watch"}))
    work = connect((host, int(port)), authkey=key)
    work.send_bytes(messages.encode(hello | {"channel": "work"}))
    threading.Thread(target=_tell_progress, args=(watch, progress), daemon=True).start()
    try:
        master = messages.decode(work.recv_bytes())
        store = store or TCPStore(master["host"], master["port"], is_master=False, timeout=_FOREVER)
        Rank(place, work, store, progress).serve()
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        _report(work, error)
    sys.stderr.flush()
    os._exit(0)  # other ranks may be gone, for which torch would wait


def gpu_of(local: int) -> str:
    """The identity of this rank's GPU; "" without GPUs. A launcher may show each rank its own GPU alone."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(local % torch.cuda.device_count()).uuid)


def _store(place: RankPlace) -> TCPStore | None:
    """The store by which ranks find each other; rank 0 has it."""
    if place.rank:
        return None
    return TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=_FOREVER)  # noqa: S104


def _tell_progress(watch: Connection, progress: ProgressCount) -> None:
    """Answer each question for the progress; end this process with the client's process."""
    try:
        while True:
            watch.recv_bytes()
            watch.send_bytes(messages.encode({"count": progress.count, "at": progress.at}))
    except (EOFError, OSError):
        os._exit(1)


def _report(work: Connection, error: BaseException) -> None:
    kind = "refused" if isinstance(error, InputError) else "error"
    text = first_line(error) if isinstance(error, InputError) else f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        kind = "memory"
    elif isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection" in str(error):
        kind = "lost"
    import traceback

    traceback.print_exception(error)
    try:
        work.send_bytes(messages.encode({"failure": text, "kind": kind}))
        work.recv_bytes()  # until the client's process has read it
    except (EOFError, OSError):
        pass


class Rank:
    """Answers requests together with the other ranks.

    Args:
        place: which rank this is.
        work: the connection to the client's process.
        store: the store by which the ranks find each other.
        progress: is told each step.
    """

    def __init__(self, place: RankPlace, work: Connection, store: Store, progress: ProgressCount) -> None:
        self._place, self._work, self._say = place, work, progress
        self._model: Model | None = None
        self._rows = dict[str, Rows]()  # rows of earlier requests, by the digest of the message that brought them
        self._digest = ""  # the digest of the last message
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(place.local % torch.cuda.device_count())
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.ranks, timeout=_FOREVER)
        memory_budget.raise_when_full()
        self._requests: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "build": self.build,
            "load": self.load,
            "train": self.train,
            "collect": self.collect,
            "predict": self.predict,
            "evaluate": self.evaluate,
            "encode": self.encode,
            "generate": self.generate,
            "count_tokens": self.count_tokens,
            "keep": self.keep,
            "forget": self.forget,
        }
        self._answer({})

    def serve(self) -> None:
        """Answer requests until the client's process ends."""
        while True:
            message = self._receive()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._answer(self._requests[message["do"]](message))

    def _receive(self) -> dict[str, Any]:
        """The next request: rank 0 gets its bytes from the client's process, the others from rank 0."""
        raw = self._work.recv_bytes() if not self._place.rank else b""
        raw = _from_first(raw)
        message = messages.decode(raw)
        self._digest = hashlib.sha256(raw).hexdigest() if message["do"] == "keep" else ""
        return message

    def _answer(self, message: Mapping[str, Any]) -> None:
        self._work.send_bytes(messages.encode(message))

    @property
    def model(self) -> Model:
        assert self._model is not None  # noqa: S101 - for mypy; the first request builds it
        return self._model

    def build(self, message: dict[str, Any]) -> dict[str, Any]:
        """Build the model, and read this rank's part of its weights."""
        spec = messages.spec_of(message["spec"])
        device = devices.pick(spec.device)
        if message["deterministic"]:
            devices.make_deterministic()
        # The first rank of another machine, or of another folder, compares the weights themselves.
        own = not self._place.local and place_of(spec.name) != message["place"]
        before, most = _memory(), 0
        model = load_model(
            spec,
            classes=tuple(message["classes"]),
            kind=message["kind"],
            task=message["task"],
            seed=int(message["seed"]),
            head_bias=message["head_bias"],
            bare=True,
            known=None if own else message["fingerprint"],
        )
        self._say("building the model")
        if model.fingerprint != message["fingerprint"]:
            raise InputError(
                f"on {socket.gethostname()} the weights of {spec.name} are {model.fingerprint[:16]}..., and at the "
                f"client's process {message['fingerprint'][:16]}...: copy the same folder to all machines"
            )
        mesh = init_device_mesh(device.type, (self._place.ranks,))

        def read(name: str) -> None:
            nonlocal most
            most = max(most, _memory())
            self._say(f"reading {name}")

        if spec.quantization is not None:
            from fedfm.training.sharded import four_bits

            four_bits.share_maps(model, device, read)
        shards.shard_model(model, mesh, read)
        model.eval_mode()
        self._model = model
        return {"bytes": shards.held_bytes(model), "grown": most - before, "device": devices.about(model.device)}

    def load(self, message: dict[str, Any]) -> dict[str, Any]:
        """Copy trained parameters into the model. Tensors come one at a time, so that no rank holds all of them."""
        shards.load_shards(self.model, self._tensors())
        return {}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, (dtype, shape) in shards.shapes(self.model).items():
            tensor = (
                messages.decode(self._work.recv_bytes())["t"]
                if not self._place.rank
                else torch.empty(shape, dtype=dtype)
            )
            dist.broadcast(tensor, 0)
            yield name, tensor
            self._say(f"loading {name}")

    def keep(self, message: dict[str, Any]) -> dict[str, Any]:
        """Keep rows for later requests, which name the digest of this message."""
        self._rows[self._digest] = messages.rows_of(message["rows"])
        return {}

    def forget(self, message: dict[str, Any]) -> dict[str, Any]:
        """Drop rows that an earlier message brought."""
        del self._rows[message["digest"]]
        return {}

    def train(self, message: dict[str, Any]) -> dict[str, Any]:
        """Train on a client's rows."""
        work = lockstep.ClientPass(
            self._rows[message["rows"]],
            messages.local_of(message["local"]),
            messages.terms_of(message["terms"]),
            int(message["seed"]),
            (message["span"][0], message["span"][1]),
            message["most"],
        )
        return {"loss": lockstep.train(self.model, work, self._say)}

    def collect(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send the trained parameters, one tensor at a time."""
        for name, tensor in shards.whole_tensors(self.model):
            if not self._place.rank:
                self._answer({"t": tensor})
            self._say(f"collecting {name}")
        return {}

    def predict(self, message: dict[str, Any]) -> dict[str, Any]:
        """Logits of this rank's part of the rows."""
        return {"logits": self._share(message, lambda model, part: model.predict(part, message["batch_size"]))}

    def evaluate(self, message: dict[str, Any]) -> dict[str, Any]:
        """Scores on this rank's part of the rows."""
        from fedfm.models import metrics

        if self.model.task.generates:
            self._check_padding(message)
        return {
            "scores": self._share(message, lambda model, part: metrics.evaluate(model, part, message["batch_size"]))
        }

    def generate(self, message: dict[str, Any]) -> dict[str, Any]:
        """The task's answers to this rank's part of the prompts, as JSON: (tokens, text, cut)."""
        task: Any = self.model.task
        self._check_padding(message)
        found = self._share(message, lambda model, part: task.generate(model, part))
        return {"answers": None if found is None else json.dumps([(a.tokens, a.text, a.cut) for a in found])}

    def count_tokens(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sums over the tokens of this rank's part of the rows."""
        from fedfm.models.text_metrics import count_tokens

        return {"sums": self._share(message, lambda model, part: count_tokens(model, part, message["batch_size"]))}

    def _check_padding(self, message: dict[str, Any]) -> None:
        """Find out, on all ranks by the same passes, whether prompts share a batch; see ``Model.answers_alone``.

        The passes have gradients, so a rank cannot make them alone.
        """
        from fedfm.models.influence import reads_padding

        rows, model = self._rows[message["rows"]], self.model
        if model.answers_alone is None and rows.tokens is not None:
            model.answers_alone = reads_padding(model, torch.as_tensor(rows.tokens[0]).long(), rows.pad)

    def encode(self, message: dict[str, Any]) -> dict[str, Any]:
        """The tensors of this rank's part of the rows after the frozen weights."""
        return {"tensors": self._share(message, lambda model, part: model.encode(part).tensors)}

    def _share(self, message: dict[str, Any], of: Callable[[Model, Any], Any]) -> Any:
        """The result for this rank's part of the rows; None if it has none."""
        rows, place = self._rows[message["rows"]], self._place
        some = shards.rows_of(len(rows), place.rank, place.ranks)
        with lockstep.at_own_pace(self.model, rows, self._say):
            return of(self.model, rows.take(range(some.start, some.stop))) if some.stop > some.start else None


def _memory() -> int:
    """Bytes of this process in memory, without mapped files; 0 where the system does not say."""
    try:
        resident, shared = (int(pages) for pages in Path("/proc/self/statm").read_text().split()[1:3])
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _from_first(raw: bytes) -> bytes:
    """The bytes of rank 0, on all ranks."""
    size = torch.tensor(len(raw))
    dist.broadcast(size, 0)
    whole = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(whole, 0)
    return whole.numpy().tobytes()


if __name__ == "__main__":
    main()
