"""The local engine: same bits whatever the workers and the wire; clients that fail, hang or die."""

import gc
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedfm.aggregation.base import Aggregator
from fedfm.core.client import Client, Terms, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.messages import Request
from fedfm.core.method import Method
from fedfm.engines.child_processes import run_and_exit
from fedfm.engines.interruption import Interrupted
from fedfm.engines.local.engine import LocalLink, processes
from fedfm.engines.local.worker_pool import Pool
from fedfm.errors import ClientFault, InputError, RunError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.scaffold import Scaffold
from fedfm.runtime.client import Silos
from fedfm.training import SGD, scheduler
from fedfm.training.scheduler import run_chunk
from toy import Toys, federation, run

ROWS = {f"c{i}": [float(i), float(i * i), 1.0][: 1 + i % 3] for i in range(9)}
LINKS = [{"workers": 1}, {"workers": 2}, {"workers": 3}, {"workers": 1, "wire": True}]


@pytest.mark.parametrize(
    "method", [FedAvg(local=SGD(epochs=2, batch_size=2)), Scaffold(local=SGD(batch_size=2), fraction=0.5)]
)
def test_same_bits_and_bytes_on_every_link(tmp_path, method):
    got = set()
    for i, link in enumerate(LINKS):
        fed = federation(method, ROWS, tmp_path / str(i), **link)
        state = run(method, fed, 4)[-1]
        got.add((method.params_for(state, "").sha256(), fed.transcript.bytes_up, fed.transcript.bytes_down))
        fed._link.close()
    assert len(got) == 1


def test_no_process_forks_if_there_is_an_accelerator():
    """A forked process cannot use CUDA that this one has opened: the default is one a core, on a GPU one."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert (processes(0, cpu), processes(3, cpu)) == (os.cpu_count(), 3)
    assert (processes(0, cuda), processes(1, cuda), processes(0, torch.device("mps"))) == (1, 1, 1)
    with pytest.raises(InputError, match=r"run.workers = 2: a model on cuda runs in one process, expected 1"):
        processes(2, cuda)


@dataclass(frozen=True)
class Naughty(FedAvg):
    """Some clients misbehave in the way that their name says."""

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        if client.id.startswith("raises"):
            raise ValueError("no such file: /secret/path")
        if client.id.startswith("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if client.id.startswith("exits"):
            os._exit(3)
        if client.id.startswith("hangs"):
            time.sleep(60)
        if client.id.startswith("writes"):
            w["w"].add_(1.0)
        if client.id.startswith("odd"):
            return {"delta": object()}
        if client.id.startswith("nan"):
            return Update(w * float("nan"), 1)
        return Update(w * 0 + Params({"w": torch.tensor([1.0])}), 1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("name", "code"), [("raises", "E_EXCEPTION"), ("nan", "E_NONFINITE"), ("odd", "E_")])
def test_a_bad_client_is_named_and_the_round_goes_on(tmp_path, workers, name, code):
    method = Naughty()
    fed = federation(method, {"a": [0.0], name: [0.0], "z": [0.0]}, tmp_path, workers=workers)
    states = run(method, fed, 2)
    assert float(states[-1]["w"]) == pytest.approx(3.0)
    assert [e.client for e in fed.excluded] == [name, name]
    assert all(e.code.startswith(code) for e in fed.excluded)
    fed._link.close()


class Unspeakable(Exception):
    """An exception whose text cannot be made, as from a faulty library."""

    def __str__(self):
        raise SystemExit(7)


class OfNoKind(BaseException):
    """No Exception, and no interruption."""


RAISED = {
    "exits": (lambda: SystemExit(3), "SystemExit: 3"),
    "unspeakable": (Unspeakable, "Unspeakable: its text cannot be read (SystemExit)"),
    "of no kind": (lambda: OfNoKind("x"), "OfNoKind: x"),
}


@dataclass(frozen=True)
class Raising(FedAvg):
    """Clients raise what their names say, before or after local training."""

    late: bool = False

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        if self.late:
            self.local(client, w)
        if client.id in RAISED:
            raise RAISED[client.id][0]()
        return Update(Params({"w": torch.tensor([1.0])}), 1)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("link", LINKS, ids=str)
def test_whatever_a_client_half_raises_costs_its_client_the_round(tmp_path, link, late):
    """The same code and text in the server's process and in a worker's: nothing of it ends either."""
    rows = {name: [0.0] for name in ["a", *RAISED, "z"]}
    fed = federation(Raising(late=late), rows, tmp_path, **link)
    states = run(Raising(late=late), fed, 2)
    assert float(states[-1]["w"]) == pytest.approx(3.0)
    told = {(e.client, e.code, e.reason) for e in fed.excluded}
    assert told == {(name, "E_EXCEPTION", text) for name, (_, text) in RAISED.items()}
    assert len(fed.excluded) == 2 * len(RAISED)
    fed._link.close()


def test_an_exception_in_a_batch_of_clients_affects_only_its_client():
    """Clients of a chunk that is trained as one computation take turns in one thread."""

    def call(name):
        if name in RAISED:
            raise RAISED[name][0]()
        return name

    for together in (False, True):
        found = run_chunk([partial(call, name) for name in ["a", *RAISED, "z"]], together=together)
        assert found[0] == "a"
        assert found[-1] == "z"
        assert [type(e) for e in found[1:-1]] == [SystemExit, Unspeakable, OfNoKind]


@pytest.mark.parametrize("together", [False, True])
def test_an_interruption_in_a_client_half_stays_one(together):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_chunk([interrupted, interrupted], together=together)


def _in_itself():
    inner = []
    inner.append(inner)
    return inner


UNTRAVELLED = {
    "complex": lambda: torch.zeros(1, dtype=torch.complex64),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "uint16": lambda: np.zeros(1, np.uint16),
    "integer": lambda: 1 << 63,
    "number key": lambda: {1: 2.0},
    "itself": _in_itself,
}


@dataclass(frozen=True)
class Untravelled(FedAvg):
    """One client's metrics hold what has no place in the wire format."""

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        one = Params({"w": torch.tensor([1.0])})
        return Update(one, 1, {"loss": UNTRAVELLED[client.id]() if client.id in UNTRAVELLED else 1.0})


@pytest.mark.each_value
@pytest.mark.parametrize("link", LINKS, ids=str)
@pytest.mark.parametrize("name", UNTRAVELLED)
def test_a_reply_that_cannot_be_sent_excludes_its_client_on_every_link(tmp_path, link, name):
    fed = federation(Untravelled(), {"a": [0.0], name: [0.0]}, tmp_path, **link)
    states = run(Untravelled(), fed, 1)
    assert float(states[-1]["w"]) == 2.0
    assert [(e.client, e.code) for e in fed.excluded] == [(name, "E_EXCEPTION")]
    assert "cannot be sent" in fed.excluded[0].reason or "text keys" in fed.excluded[0].reason


def test_a_worker_that_dies_between_two_rounds_is_replaced_and_no_client_is_blamed(tmp_path):
    method, found, lines = FedAvg(local=SGD()), [], []
    for killed in (False, True):
        fed = federation(method, ROWS, tmp_path / str(killed), workers=2, notice=lines.append)
        state = method.init(fed)
        for t in (1, 2):
            fed.begin(t)
            state = method.step(fed, state, t)
            if killed and t == 1:
                pid = fed._link._pool._workers[0].pid
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert fed.excluded == []
        found.append(state["w"].item())
    assert found[0] == found[1]
    assert len(lines) == 1
    assert "signal 9" in lines[0]


@pytest.mark.parametrize("letters", [1, 600], ids=["payloads", "names"])
def test_a_chunk_is_cut_where_a_control_message_ends(tmp_path, letters):
    """256 payloads, more descriptors than the system sends at once; and names of 150 kB together."""
    method, rows = FedAvg(local=SGD()), {f"{i:03}" + "n" * letters: [float(i)] for i in range(256)}
    silos = Silos(method, Aggregator(), Toys(rows), memory=tmp_path)
    link = LocalLink(silos, workers=2, timeout=1.0)
    w = silos.population.model.params()
    requests = [Request(c, "train.FedAvg_train", {"w": w * i}, 1, 1) for i, c in enumerate(rows)]
    pids = set()
    replies = []
    for reply in link._pool.exchange(requests, lambda: False, again=True):
        pids |= {worker.pid for worker in link._pool._workers}
        replies.append(reply)
    link.close()
    assert {r.client: r.fault for r in replies} == dict.fromkeys(rows)
    assert len(pids) == 2  # nobody died of it


@pytest.mark.parametrize("workers", [1, 2])
def test_a_method_that_writes_into_its_payload_stops_the_run(tmp_path, workers):
    method = Naughty()
    fed = federation(method, {"a": [0.0], "writes": [0.0], "z": [0.0]}, tmp_path, workers=workers)
    with pytest.raises(RunError, match="read-only"):
        run(method, fed, 1)


@pytest.mark.parametrize(("name", "words"), [("dies", "signal 9"), ("exits", "exit status 3")])
def test_a_client_that_dies_is_reported_at_once_with_its_signal(tmp_path, name, words):
    method = Naughty()
    rows = {"a": [0.0], f"{name}-1": [0.0], f"{name}-2": [0.0], "z": [0.0]}
    lines = []
    fed = federation(method, rows, tmp_path, workers=2, timeout=600, notice=lines.append)
    states = run(method, fed, 2)
    assert [words in line for line in lines] == [True]  # once in eight ends
    assert float(states[-1]["w"]) == pytest.approx(3.0)
    assert [(e.code, e.client) for e in fed.excluded] == [("E_DIED", f"{name}-1"), ("E_DIED", f"{name}-2")] * 2
    # Not E_TIMEOUT: nobody waited for the client's time to end.
    assert all(words in e.reason for e in fed.excluded)
    fed._link.close()


@dataclass(frozen=True)
class Unlike(FedAvg):
    """The server half sends one client an argument of another type."""

    @on_client
    def train(self, client: Client, w: Params, k: int = 0) -> Update:
        return Update(w * 0 + Params({"w": torch.tensor([1.0])}), 1)


def test_a_payload_of_another_type_is_named_and_ends_no_worker(tmp_path):
    lines = []
    fed = federation(Unlike(), {"a": [0.0], "wrong": [0.0], "z": [0.0]}, tmp_path, workers=2, notice=lines.append)
    pids = set()
    for t in (1, 2):
        fed.begin(t)
        k = each({client: "text" if client == "wrong" else 1 for client in fed.clients})
        fed.mean(Unlike().train, w=fed.initial, k=k)
        pids |= {worker.pid for worker in fed._link._pool._workers}
    assert [(e.client, e.code, e.reason) for e in fed.excluded] == [
        ("wrong", "E_FIELD", "k: expected int, got str")
    ] * 2
    assert len(pids) == 2
    assert lines == []


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        (None, 0, ""),
        (SystemExit(4), 4, ""),
        (SystemExit("why"), 1, "why\n"),
        (ValueError("lost"), 1, "ValueError: lost\n"),
    ],
)
def test_a_fork_says_why_it_ends(capfd, end, status, said):
    def body():
        if end is not None:
            raise end

    if not (pid := os.fork()):
        run_and_exit(body)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    err = capfd.readouterr().err
    assert err.endswith(said) if said else not err


def test_clients_that_can_only_train_alone_are_said(monkeypatch):
    """Otherwise the run would only be slow, e.g. where the memory is too small for all of them at once."""

    class OneAtATime:
        def __call__(self, jobs):
            if len(jobs) > 1:
                raise MemoryError("too many")
            return [jobs[0].w]

    monkeypatch.setattr(scheduler, "_trainer_of", lambda job: OneAtATime())
    w = Params({"w": torch.ones(1)})
    asker = SimpleNamespace(model=None)
    calls = [partial(scheduler.train_client, asker, w, None, Terms()) for _ in range(3)]
    with pytest.warns(RuntimeWarning, match="3 clients could not train together.*MemoryError: too many"):
        assert run_chunk(calls, together=True) == [w, w, w]


@pytest.mark.proof
def test_a_client_that_hangs_is_ended_after_its_time(tmp_path):
    method = Naughty()
    fed = federation(method, {"a": [0.0], "hangs": [0.0], "z": [0.0]}, tmp_path, workers=2, timeout=3.0)
    states = run(method, fed, 1)
    assert float(states[-1]["w"]) == pytest.approx(2.0)
    assert [(e.client, e.code) for e in fed.excluded] == [("hangs", "E_TIMEOUT")]
    fed._link.close()


@pytest.mark.sample("dies")
@pytest.mark.parametrize(("name", "code", "timeout"), [("dies", "E_DIED", 600.0), ("hangs", "E_TIMEOUT", 4.0)])
def test_a_client_that_waits_behind_a_failing_one_is_not_blamed(tmp_path, monkeypatch, name, code, timeout):
    """Workers whose clients are quick have a second chunk."""
    monkeypatch.setattr("fedfm.engines.local.worker_pool._QUICK", 600.0)  # on a busy machine, too
    deliver, most = Pool._deliver, []

    def watched(self, slot, *rest):
        done = deliver(self, slot, *rest)
        most.append(len(self._workers[slot].chunks))
        return done

    monkeypatch.setattr(Pool, "_deliver", watched)
    method = Naughty()
    rows = {f"c{i:02}": [0.0] for i in range(40)} | {name: [0.0]}
    fed = federation(method, rows, tmp_path, workers=2, timeout=timeout)
    states = run(method, fed, 2)
    assert max(most) == 2
    assert float(states[-1]["w"]) == pytest.approx(3.0)
    assert [(e.client, e.code) for e in fed.excluded] == [(name, code)] * 2
    assert fed._link._pool._home.keys() == rows.keys()
    fed._link.close()


def test_slow_clients_do_not_wait_behind_each_other(tmp_path):
    """Another worker could have them meanwhile, and a stop would have to wait for them."""

    @dataclass(frozen=True)
    class Slow(FedAvg):
        @on_client
        def train(self, client: Client, w: Params) -> Update:
            time.sleep(0.2)  # long beside what a message takes, on a busy machine too
            return Update(w, 1)

    method, rows = Slow(), {f"c{i:02}": [0.0] for i in range(8)}
    fed = federation(method, rows, tmp_path, workers=2)
    fed.begin(1)
    for _ in fed.exchange("train", method.train, None, {"w": fed.initial}, Update):
        assert all(len(worker.chunks) <= 1 for worker in fed._link._pool._workers)
    fed._link.close()


def test_a_client_stays_with_the_worker_that_has_its_rows(tmp_path):
    """Also where that worker is quick and could have a second one, and where the other one has nothing to do."""

    @dataclass(frozen=True)
    class Where(FedAvg):
        @on_client
        def train(self, client: Client, w: Params) -> Update:
            return Update(Params({"pid": torch.tensor([os.getpid()])}), 1)

    method, found = Where(), []
    fed = federation(method, {"a": [0.0], "b": [0.0]}, tmp_path, workers=2)
    for of in (["a", "b"], ["b"], ["a"], ["a", "b"], ["b"]):
        fed.begin(len(found) + 1)
        replies = fed.exchange("train", method.train, of, {"w": fed.initial}, Update)
        found.append({client: int(update.delta["pid"]) for client, update in replies})
    assert len(set(found[0].values())) == 2
    for pids in found:
        assert pids.items() <= found[0].items()
    fed._link.close()


def test_a_worker_with_nothing_to_do_helps_out(tmp_path, monkeypatch):
    """Two clients whose rows one worker has are answered by both."""
    for pace in ("_QUICK", "_SHORT"):  # a quick worker would have both at once
        monkeypatch.setattr(f"fedfm.engines.local.worker_pool.{pace}", 0.0)
    begun = tmp_path / "begun"  # a file a call, named by its worker and client

    def calls(mine):
        return sum((int(f.name.split()[0]) == os.getpid()) == mine for f in begun.iterdir())

    @dataclass(frozen=True)
    class Slow(FedAvg):
        @on_client
        def train(self, client: Client, w: Params) -> Update:
            (begun / f"{os.getpid()} {client.id}").touch()
            end = time.monotonic() + 120
            while calls(mine=False) < calls(mine=True):  # until the other worker has as many
                assert time.monotonic() < end, "the other worker does nothing"
                time.sleep(0.01)
            return Update(Params({"pid": torch.tensor([os.getpid()])}), 1)

    begun.mkdir()
    method = Slow()
    fed = federation(method, {c: [0.0] for c in "abcd"}, tmp_path, workers=2)
    fed.begin(1)
    first = dict(fed.exchange("train", method.train, None, {"w": fed.initial}, Update))
    by_worker = [
        [c for c in first if first[c].delta["pid"] == pid] for pid in {u.delta["pid"].item() for u in first.values()}
    ]
    assert [len(mine) for mine in by_worker] == [2, 2]
    for call in begun.iterdir():
        call.unlink()
    fed.begin(2)
    second = fed.exchange("train", method.train, by_worker[0], {"w": fed.initial}, Update)
    assert len({int(update.delta["pid"]) for _, update in second}) == 2
    fed._link.close()


def test_a_client_that_takes_too_long_in_this_process_is_left_out_as_in_a_worker(tmp_path):
    """Else the result would depend on the number of workers."""

    class Slow(FedAvg):
        @on_client
        def train(self, client: Client, w: Params) -> Update:
            if client.id == "slow":
                time.sleep(1.2)
            return Update(w, 1)

    method = Slow()
    fed = federation(method, {"a": [0.0], "slow": [0.0], "z": [0.0]}, tmp_path, workers=1, timeout=1.0)
    run(method, fed, 1)
    assert [(e.client, e.code) for e in fed.excluded] == [("slow", "E_TIMEOUT")]
    fed._link.close()


def test_no_worker_is_left_behind(tmp_path):
    method = FedAvg()
    fed = federation(method, ROWS, tmp_path, workers=2)
    run(method, fed, 1)
    pids = [w.pid for w in fed._link._pool._workers]
    assert len(pids) == 2
    fed._link.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's list of open files")
def test_payloads_that_differ_by_client_are_let_go_with_their_replies(tmp_path):
    """Models of clients' own: of forty no more than a few lie in memory files at a time, also where a client dies."""

    @dataclass(frozen=True)
    class Twice(FedAvg):
        @on_client
        def train(self, client: Client, w: Params) -> Update:
            if client.id == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            return Update(2 * w, 1)

    method = Twice()
    fed = federation(method, {f"c{i:02}": [0.0] for i in range(40)} | {"dies": [0.0]}, tmp_path, workers=2)
    fed.begin(1)

    def files():
        there = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum("memfd:fedfm" in os.readlink(fd) for fd in there if os.path.islink(fd))

    before, counts, found = files(), [], {}
    w = each({c: fed.initial * i for i, c in enumerate(fed.clients)})
    for client, update in fed.exchange("train", method.train, None, {"w": w}, Update):
        found[client] = float(update.delta["w"])
        counts.append(files() - before)
    assert [e.client for e in fed.excluded] == ["dies"]
    assert found == {c: 2 * i for i, c in enumerate(fed.clients) if c != "dies"}
    assert 0 < max(counts) < 12
    assert files() - before <= 6  # three for each worker, through which it replies
    fed._link.close()


@dataclass(frozen=True)
class Numbered(FedAvg):
    """Replies with so many numbers that the client's name and the round tell them apart."""

    size: int = 1

    @on_client
    def train(self, client: Client, w: Params, factor: float) -> Update:
        return Update(Params({"v": torch.full((self.size,), factor + int(client.id[1:]))}), 1)


@pytest.mark.parametrize("size", [1, 5001, 600_001], ids=["few", "odd", "several files"])
def test_replies_that_the_server_keeps_are_never_overwritten(tmp_path, size):
    """Tensors are views of the files that workers write to: all replies of eight calls, and half of one, are kept."""
    method, kept, count = Numbered(size=size), {}, 12
    fed = federation(method, {f"c{i:02}": [0.0] for i in range(count)}, tmp_path, workers=2)
    fed.begin(1)
    for call in range(8):
        for client, update in fed.exchange(
            "train", method.train, None, {"w": fed.initial, "factor": 100.0 * call}, Update
        ):
            if call != 5 or client < "c06":
                kept[call, client] = update.delta["v"]
    assert len(kept) == 7 * count + 6
    for (call, client), v in kept.items():
        assert torch.equal(v, torch.full((size,), 100.0 * call + int(client[1:])))
    next(iter(kept.values())).add_(1)  # and is the server's own
    again = dict(fed.exchange("train", method.train, None, {"w": fed.initial, "factor": 0.0}, Update))
    assert float(again["c00"].delta["v"][0]) == 0.0
    fed._link.close()


@pytest.mark.proof
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's list of open files")
def test_files_of_replies_serve_again_and_take_no_descriptors(tmp_path):
    """A mean of a hundred clients in five rounds goes through the few files that each of two workers has; replies that
    are all kept take memory and no descriptors.
    """
    method = Numbered(size=3)
    fed = federation(method, {f"c{i:02}": [0.0] for i in range(100)}, tmp_path, workers=2)

    def mapped():
        with open("/proc/self/maps") as file:
            return sum("memfd:fedfm" in line for line in file)

    gc.collect()  # what other tests left
    before, counts, files = mapped(), [], []
    for t in range(1, 6):
        fed.begin(t)
        for _ in fed.exchange("train", method.train, None, {"w": fed.initial, "factor": 1.0}, Update):
            pass  # those that come before their turn wait, and may need files of their own meanwhile
        counts.append(mapped() - before)
    files.append(len(os.listdir("/proc/self/fd")))
    assert max(counts) <= 2 * 6 + 1  # the loop still has the last one
    kept = [
        dict(fed.exchange("train", method.train, None, {"w": fed.initial, "factor": 1.0}, Update)) for _ in range(20)
    ]
    files.append(len(os.listdir("/proc/self/fd")))
    assert mapped() - before > max(counts)  # of these some have files of their own
    assert files[0] == files[1]
    del kept
    assert mapped() - before <= 2 * 6 + 2
    fed._link.close()


def test_pools_side_by_side_end_in_any_order(tmp_path):
    method = FedAvg()
    feds = [federation(method, ROWS, tmp_path / str(i), workers=2) for i in range(2)]
    for fed in feds:
        run(method, fed, 1)
    for fed in feds:  # the older first: the younger one's workers were forked while its sockets were open
        fed._link.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stop_lets_started_clients_finish_and_starts_no_more(tmp_path, workers):
    method, toys, asked = FedAvg(), Toys(ROWS), []
    silos = Silos(method, Aggregator(), toys, memory=tmp_path)

    def stop():
        asked.append(1)
        return len(asked) > 3

    link = LocalLink(silos, workers=workers, stop=stop)
    fed = Federation(link, model=toys.model, aggregator=Aggregator())
    fed.begin(1)
    with pytest.raises(Interrupted):
        method.step(fed, fed.initial, 1)
    link.close()


def test_a_silos_policy_refuses_what_it_does_not_allow(tmp_path):
    method, toys = FedAvg(), Toys({"a": [0.0], "b": [1.0]})
    silos = Silos(method, Aggregator(), toys, memory=tmp_path, allow=("mean",))
    fed = Federation(LocalLink(silos), model=toys.model, aggregator=Aggregator())
    fed.begin(1)
    assert float(fed.mean(method.train, w=fed.initial)["w"]) == pytest.approx(-0.05)
    with pytest.raises(Exception, match="0 of 2"):
        fed.ask(method.train, w=fed.initial)
    assert {(e.code, e.client) for e in fed.excluded} == {("E_REFUSED", "a"), ("E_REFUSED", "b")}
    assert fed.excluded[0].reason == "FedAvg_train answers train, not query"


def verbs_of(method, folder):
    """The kinds of message that a method's client half ``train`` answers."""
    silos = Silos(method, Aggregator(), toys := Toys({"a": [0.0]}), memory=folder)
    answered = set()
    for kind in ("train", "query", "scores", "reveal", "aggregate", ""):
        name = f"{kind}.{type(method).__name__}_train"
        (value,) = silos.answer([Request("a", name, {"w": toys.model.params()}, 1, 1)])
        answered |= set() if isinstance(value, ClientFault) else {kind}
        assert not isinstance(value, ClientFault) or value.code == "E_REFUSED"
    return answered


@pytest.mark.parametrize(("means", "asks"), [(("train",), ()), ((), ("train",)), (("train",), ("train",)), ((), ())])
def test_a_client_half_answers_as_its_method_declares_it(means, asks, tmp_path):
    class Declared(FedAvg):
        pass

    Declared.means, Declared.asks = means, asks
    assert verbs_of(Declared(), tmp_path) == {kind for kind, half in (("train", means), ("query", asks)) if half}


def test_the_client_half_of_a_method_without_lists_answers_both_verbs(tmp_path):
    class Unlisted(Method):
        rounds = 1

        def init(self, fed):
            return fed.initial

        def step(self, fed, state):
            return state

        def params_for(self, state, client):
            return state

        @on_client
        def train(self, client: Client, w: Params) -> Params:
            return w

    assert verbs_of(Unlisted(), tmp_path) == {"train", "query"}


def test_tensors_pass_by_reference_in_one_process(tmp_path):
    seen = []

    @dataclass(frozen=True)
    class Peek(FedAvg):
        @on_client
        def train(self, client: Client, w: Params) -> Update:
            seen.append(w)
            return Update(w, 1)

    method = Peek()
    fed = federation(method, {"a": [0.0], "b": [0.0]}, tmp_path)
    fed.begin(1)
    fed.mean(method.train, w=fed.initial)
    assert all(w is fed.initial for w in seen)


def test_memory_written_in_a_killed_round_is_discarded(tmp_path):
    from fedfm.runtime.client_memory import DiskMemory

    first = DiskMemory(tmp_path, "c", (1, 1))
    first["c"] = torch.ones(2)
    first.commit()
    aborted = DiskMemory(tmp_path, "c", (2, 1))
    aborted["c"] = torch.zeros(2)
    aborted.commit()
    again = DiskMemory(tmp_path, "c", (2, 1))  # the server was killed before it committed round 2, and asks again
    assert again["c"].tolist() == [1.0, 1.0]
    again["c"] = again["c"] + 1
    again.commit()
    assert DiskMemory(tmp_path, "c", (3, 1))["c"].tolist() == [2.0, 2.0]
    unwritten = DiskMemory(tmp_path, "c", (3, 1))
    unwritten["c"] = torch.zeros(2)  # its handler failed: never committed
    assert DiskMemory(tmp_path, "c", (4, 1))["c"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("reveal", "said"), [(True, "/secret/path"), (False, "errors.log")])
def test_a_silo_with_its_own_rows_reports_only_the_code_of_an_error(tmp_path, reveal, said):
    told = []
    method, toys = Naughty(), Toys({"raises": [0.0], "z": [0.0]})
    silos = Silos(
        method, Aggregator(), toys, memory=tmp_path, reveal=reveal, on_error=lambda client, text: told.append(text)
    )
    fed = Federation(LocalLink(silos), model=toys.model, aggregator=Aggregator())
    fed.begin(1)
    fed.mean(method.train, w=fed.initial)
    (excluded,) = fed.excluded
    assert ("ValueError" in excluded.reason) == reveal
    assert excluded.code == "E_EXCEPTION"
    assert said in excluded.reason
    assert ("/secret/path" in excluded.reason) == reveal
    assert "/secret/path" in told[0]
