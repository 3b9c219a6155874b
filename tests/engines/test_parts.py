"""The parts of a deployment that need no Flower process: app folder, silo file, keys, children, the worker."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedfm.config.experiment import Experiment
from fedfm.core.messages import Excluded
from fedfm.core.wire import codec, payload
from fedfm.engines.child_processes import Children
from fedfm.engines.flower import (
    app_writer,
    bundle,
    client_stub,
    deployment,
    loopback,
    loopback_keys,
    orphan_cleanup,
    private_api,
    run_config,
    server_app,
)
from fedfm.errors import ClientFault, InputError, RunError
from fedfm.runtime import own_rows
from fedfm.runtime.run_directory import Run
from fedfm.sites import silo_config


def features(path, names, n=30, seed=0):
    """A file of feature vectors with these class names."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % len(names)
    split = np.where(np.arange(n) % 5 == 0, "test", "train")
    np.savez(path, x=rng.normal(size=(n, 4)).astype(np.float32), y=y, classes=np.array(names), split=split)
    return path


def table(path, **change):
    return {
        "name": "try out",
        "data": {"path": str(path), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": "features"},
        "method": {"name": "fedavg", "rounds": 1},
        **change,
    }


# --- the app ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_an_app_holds_the_experiment_and_builds_the_same_bundle_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features(tmp_path / "rows.npz", ["a", "b"])
    exp = tmp_path / "exp.toml"
    exp.write_text(Experiment.from_dict(table("rows.npz", run={"engine": "local", "wire": True})).to_toml())
    told = app_writer.write(tmp_path / "app", exp)
    assert "flwr run" in told
    assert "silo.toml" in told
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    config = dict(run_config.settings(project["tool"]["flwr"]["app"]["config"])) | {"home": str(tmp_path / "app")}
    held = Experiment.from_dict(run_config.with_paths(run_config.merge_settings(config)))
    assert held.data.path == str(tmp_path / "rows.npz")  # other processes read it from other folders
    assert (held.run.engine, held.run.wire) == ("deployment", False)
    assert project["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "fedfm.apps:server",
        "clientapp": "fedfm.apps:client",
    }
    before = private_api.build(tmp_path / "app")
    (tmp_path / "app/runs/run-1").mkdir(parents=True)
    for name in ("experiment.toml", "README.md", "private.py"):
        (tmp_path / "app/runs/run-1" / name).write_text("")
    assert private_api.build(tmp_path / "app") == before  # no run goes to the silos
    bundle.check(before)
    with pytest.raises(InputError, match="already"):
        app_writer.write(tmp_path / "app", exp)


def test_an_app_of_a_long_name_is_one_that_flower_takes(tmp_path):
    tables = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}, "method": {"name": "fedavg"}}
    experiment = Experiment(**tables, name="a name of more than thirty-two letters in all")
    app_writer.write_app(tmp_path, experiment, out=tmp_path)
    name = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["name"]
    assert re.fullmatch(r"fedfm-[a-z0-9-]*[a-z0-9]", name)
    assert len(name) <= 32


def test_a_method_that_pools_rows_has_no_app(tmp_path):
    exp = tmp_path / "exp.toml"
    exp.write_text(Experiment.from_dict(table("x.npz", method={"name": "centralised"})).to_toml())
    with pytest.raises(InputError, match="trains on pooled rows"):
        app_writer.write(tmp_path / "app", exp)


def test_a_server_app_reports_rounds_and_clients_to_its_follower(tmp_path, capsys):
    run = Run.create(Experiment.from_dict(table(features(tmp_path / "rows.npz", "ab"))), tmp_path / "run")
    told = server_app.ProgressLines()
    told.started(run, 3, 0)
    told.excluded(Excluded(1, "north\nfedfm: fine", "E_DIED", "no node of that name is connected"))
    told.round({"round": 1, "accuracy": 0.5, "perplexity": None})
    told.round({"round": 2, "accuracy": None})
    told.finished()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"fedfm: round 0 of 3 is done; the run is in {tmp_path / 'run'}",
        "fedfm: round 1: north\\u000afedfm: fine left out, E_DIED: no node of that name is connected",
        "fedfm: round 1, accuracy 0.500",
        "fedfm: round 2",
    ]


def test_a_runs_folder_at_the_sites_is_its_own(tmp_path):
    def run(path, created):
        return SimpleNamespace(path=path, manifest={"created": created}, experiment=SimpleNamespace(name="x"))

    keys_ = {deployment.key_of(run(tmp_path / p, c)) for p, c in (("a", "1"), ("a", "2"), ("b", "1"), ("a", "1"))}
    assert len(keys_) == 3


# --- a silo's file ---------------------------------------------------------------------------------------------------


def silo(folder, text):
    path = folder / "silo.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "name"),
        ('name = "a b"\ndata = "x.npz"', "letters"),
        ('name = ".."\ndata = "x.npz"', "letters"),
        ('name = "a"', "data is missing"),
        ('name = "a"\ndata = "x.npz"\nalow = ["*"]', r'silo.toml: \w+: unknown key \(did you mean "allow"'),
        ('name = "a"\ndata = "x.npz"\nallow = ["maen"]', 'not a word of exposure.*did you mean "mean"'),
        (
            'name = "a"\ndata = "x.npz"\nallow = ["trian.*"]',
            '"trian.*" is not a word of exposure: expected "mean", "reply"',
        ),
        ('name = "a"\ndata = "x.npz"\nallow = "*"', "a list"),
        (
            'name = "a"\ndata = "x.npz"\n[allow_by_method]\nfedpft = ["men"]',
            "allow_by_method.fedpft: .men. is not a word",
        ),
        ('name = "a"\ndata = "x.npz"\n[allow_by_method]\nfedptf = ["mean"]', 'fedptf.*did you mean "fedpft"'),
        ("name = ", "not TOML"),
    ],
)
def test_a_silos_file_that_makes_no_sense_is_refused(tmp_path, text, word):
    with pytest.raises(InputError, match=word):
        silo_config.load(silo(tmp_path, text))
    with pytest.raises(InputError, match="no such file"):
        silo_config.load(tmp_path / "none.toml")


def test_a_silo_reports_its_rows_and_its_policy(tmp_path):
    features(tmp_path / "rows.npz", ["a", "b"])
    text = 'name = "north"\ndata = "rows.npz"\nallow = ["mean", "scores"]'
    told = silo_config.report(silo(tmp_path, text))
    assert told["rows"] == {"train": 24, "val": 0, "test": 6}
    assert (told["takes_part"], told["shows_single_replies"]) == (True, False)
    assert "exposes: its update, in a mean, scores on its own rows\n" in silo_config.render(told)
    told = silo_config.report(silo(tmp_path, text + '\nallow_by_method = { fedpft = ["reply"], fedavg = [] }'))
    assert told["shows_single_replies"]
    said = silo_config.render(told)
    assert "exposes under method fedpft: single replies, which the server sees one by one\n" in said
    assert "exposes under method fedavg: nothing\n" in said
    told = silo_config.report(silo(tmp_path, 'name = "north"\ndata = "rows.npz"\nallow = []'))
    assert not told["takes_part"]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["*"], ["mean", "reply", "scores", "reveal"]),
        (["train.*", "query.hello"], ["mean"]),
        (["train.*", "query.hello", "query.FedAvg_evaluate"], ["mean", "scores"]),
        (["query.*"], ["reply", "scores", "reveal"]),
        (["mean", "query.*_reveal"], ["mean", "reveal"]),
        (["train.FedAvg_train", "query.FedPFT_summarise"], ["mean", "reply"]),
        (["query.hello"], []),
    ],
)
def test_patterns_of_handlers_are_refused_with_the_words_to_write(tmp_path, patterns, words):
    path = silo(tmp_path, f'name = "a"\ndata = "x.npz"\nallow = {json.dumps(patterns)}')
    with pytest.raises(InputError, match=re.escape(f"here allow = {json.dumps(words)}")):
        silo_config.load(path)
    assert silo_config.load(silo(tmp_path, f'name = "a"\ndata = "x.npz"\nallow = {json.dumps(words)}')).allow == (
        *words,
    )


def test_a_silos_classes_are_those_of_the_server(tmp_path):
    features(tmp_path / "rows.npz", ["cat", "dog"])
    experiment = Experiment.from_dict(table("elsewhere.npz"))
    mine = silo_config.load(silo(tmp_path, 'name = "north"\ndata = "rows.npz"'))
    own = own_rows.populate(mine.rows, experiment, ["cat", "dog"])
    with pytest.raises(InputError, match='the server\'s classes are "cat", "cow", but this silo\'s are "cat", "dog"'):
        own_rows.populate(mine.rows, experiment, ["cat", "cow"])
    agreed = silo_config.load(silo(tmp_path, 'name = "north"\ndata = "rows.npz"\nclasses = ["ant", "cat", "dog"]'))
    theirs = own_rows.populate(agreed.rows, experiment, ["ant", "cat", "dog"])
    assert theirs.model.classes == ("ant", "cat", "dog")
    assert (theirs.data("north").train.labels == own.data("north").train.labels + 1).all()


# --- keys and children -----------------------------------------------------------------------------------------------


def test_keys_are_private_fresh_and_of_the_right_kind(tmp_path):
    os.umask(0o022)
    loopback_keys.write_certificates(tmp_path)
    public = loopback_keys.write_node_key(tmp_path / "node.key")
    assert public.startswith(b"-----BEGIN PUBLIC KEY-----")
    key = load_ssh_private_key((tmp_path / "node.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    root, leaf = (x509.load_pem_x509_certificate((tmp_path / n).read_bytes()) for n in ("ca.crt", "server.pem"))
    leaf.verify_directly_issued_by(root)
    assert len(loopback_keys.write_secret(tmp_path / "s").read_bytes()) == 64
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ca.crt", "node.key", "s", "server.key", "server.pem"]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid):
    end = time.monotonic() + 60
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux's sockets do")
def test_a_port_is_nobody_elses_until_our_server_listens_there():
    def listening(port):  # as asyncio's servers do
        return socket.create_server(("127.0.0.1", port))

    with loopback.reserve_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with (
            listening(port) as server,
            socket.create_connection(("127.0.0.1", port)) as there,
            server.accept()[0] as end,
        ):
            assert end.getpeername() == there.getsockname()
    listening(port).close()


def test_children_end_with_us_and_tell_how_they_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("fedfm.engines.child_processes._GRACE", 0.5)
    children = Children(tmp_path / "logs", os.environ)
    stubborn = children.start("stubborn", [sys.executable, "-c", STUBBORN])
    children.start("brief", [sys.executable, "-c", "print('so long'); raise SystemExit(3)"])
    ended = []
    while not ended:
        ended = list(children.reap())
    assert ended == [("brief", "exit status 3")]
    assert children.tail("brief") == "so long"
    while "up" not in children.tail("stubborn"):
        time.sleep(0.02)
    assert children.pids() == {"stubborn": stubborn}
    children.end()
    assert gone(stubborn)


@pytest.mark.skipif(sys.platform != "linux", reason="the system ties a process to its parent on Linux only")
def test_a_killed_parent_takes_its_children_along(tmp_path):
    code = (
        "import os, sys, time; from pathlib import Path; from fedfm.engines.child_processes import Children;"
        f"c = Children(Path({str(tmp_path)!r}), os.environ);"
        f"print(c.start('x', [sys.executable, '-c', {STUBBORN!r}]), flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert gone(child)


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has started is found in Linux's /proc")
def test_processes_of_a_simulation_end_before_its_folder_is_removed(tmp_path):
    folder = tmp_path / "ray"
    folder.mkdir()
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    children = [
        subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"WITH": where})
        for where in (f"{folder}/flwr", "elsewhere")
    ]
    orphan_cleanup.end_all(str(folder))
    assert children[0].wait(timeout=60) == -signal.SIGKILL
    assert not folder.exists()
    assert children[1].poll() is None
    children[1].kill()
    children[1].wait()


def test_a_start_that_fails_shows_the_log(tmp_path):
    children = Children(tmp_path / "logs", os.environ)
    children.start("superlink", [sys.executable, "-c", "raise SystemExit('no such port')"])
    with pytest.raises(RunError, match=r"(?s)superlink did not start .*no such port"):
        loopback._until(lambda: False, children, lambda: False, "no answer")


# --- the warm worker -------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_a_worker_is_started_answers_stays_and_ends_when_idle(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDFM_WORKER_IDLE", "5")
    features(tmp_path / "rows.npz", ["a", "b"])
    config = {"experiment": Experiment.from_dict(table(tmp_path / "rows.npz")).to_toml(), "key": "k"}
    node = {"client": "client-01", "site": str(tmp_path / "site")}
    place = client_stub.folder_of(config, node, 1)
    client_stub.prepare(place, config, node)
    head, pieces = payload.encode(codec.envelope(0, 0, {"classes": ["a", "b"]}))

    def ask(handler):
        return payload.decode(*client_stub.call(place, node["client"], handler, head, b"".join(pieces)), None)

    assert ask("query.hello")["body"]["name"] == "client-01"
    pid = int((place / "worker.lock").read_text())
    assert stat.S_IMODE(os.stat(client_stub.address(place)).st_mode) == 0o600
    assert ask("train.nothing")["fault"]["code"] == "E_REFUSED"
    assert int((place / "worker.lock").read_text()) == pid  # the same one
    os.kill(pid, signal.SIGKILL)
    assert gone_lock(place)
    assert ask("query.hello")["body"]["name"] == "client-01"  # another one, by itself
    end = time.monotonic() + 60
    while client_stub.running(place) and time.monotonic() < end:
        time.sleep(0.1)
    assert not client_stub.running(place)
    assert not os.path.exists(client_stub.address(place))


def gone_lock(place):
    end = time.monotonic() + 60
    while client_stub.running(place) and time.monotonic() < end:
        time.sleep(0.02)
    return not client_stub.running(place)


@pytest.mark.proof
def test_a_worker_that_cannot_load_says_so_at_hello(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDFM_WORKER_IDLE", "1")
    config = {"experiment": Experiment.from_dict(table(tmp_path / "none.npz")).to_toml(), "key": "k"}
    silo(tmp_path, 'name = "north"\ndata = "secret-place.npz"')
    node = {"silo": str(tmp_path / "silo.toml")}
    place = client_stub.folder_of(config, node, 1)
    client_stub.prepare(place, config, node)
    head, pieces = payload.encode(codec.envelope(0, 0, {"classes": ["a"]}))
    answer = payload.decode(*client_stub.call(place, None, "query.hello", head, b"".join(pieces)), None)
    assert answer["fault"]["code"] == "E_EXPERIMENT"
    assert "secret-place" not in answer["fault"]["reason"]
    assert "secret-place.npz" in (tmp_path / ".fedfm" / "silo.log").read_text()
    assert "secret-place.npz" in (place / "private" / "errors.log").read_text()
    assert "secret-place" not in str(answer)


def dying(place):
    """What ends like a worker that is killed when it has got a message."""
    code = (
        "import fcntl, os, socket, sys; lock = open(sys.argv[2], 'w'); fcntl.flock(lock, fcntl.LOCK_EX);"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen();"
        "print('up', flush=True); s.accept()[0].recv(1); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, client_stub.address(place), place / "worker.lock"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


@pytest.mark.proof
def test_another_worker_takes_the_task_of_a_killed_one(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDFM_WORKER_IDLE", "2")
    features(tmp_path / "rows.npz", ["a", "b"])
    config = {"experiment": Experiment.from_dict(table(tmp_path / "rows.npz")).to_toml(), "key": "k"}
    node = {"client": "client-01", "site": str(tmp_path / "site")}
    place = client_stub.folder_of(config, node, 1)
    client_stub.prepare(place, config, node)
    head, pieces = payload.encode(codec.envelope(0, 0, {"classes": ["a", "b"]}))
    with dying(place) as first:
        answer = payload.decode(*client_stub.call(place, node["client"], "query.hello", head, b"".join(pieces)), None)
        assert first.wait() == -signal.SIGKILL
    assert answer["body"]["name"] == "client-01"
    os.kill(int((place / "worker.lock").read_text()), signal.SIGKILL)


@pytest.mark.proof
@pytest.mark.parametrize("silo", [None, "silo.toml"])
def test_a_worker_that_dies_twice_is_a_fault_whose_signal_silos_do_not_report(tmp_path, monkeypatch, capfd, silo):
    """How a silo's worker ended may depend on its rows; so only its owner reads it."""
    place = tmp_path / "p"
    place.mkdir()
    (place / "site.json").write_text(json.dumps({"silo": silo}))
    (tmp_path / "sitecustomize.py").write_text(  # the system ends workers when they have got a message
        "import os, sys, types\n"
        "if 'fedfm.engines.flower.client_worker' in sys.orig_argv:\n"
        "    from fedfm.engines.flower import client_host, client_stub\n"
        "    client_stub.receive = lambda link: os.kill(os.getpid(), 9)\n"
        "    client_host.of_folder = lambda folder: (types.SimpleNamespace(warm=lambda *shared: None), None)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with dying(place) as first, pytest.raises(ClientFault) as fault:
        client_stub.call(place, "c", "train.x", "{}", b"")
    assert first.returncode == -signal.SIGKILL
    assert fault.value.code == "E_DIED"
    how = ": signal 9 (SIGKILL, likely out of memory)"
    assert fault.value.reason.endswith(f"so did a second one{'' if silo else how}")
    assert (how in capfd.readouterr().err) == bool(silo)
