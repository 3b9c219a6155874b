"""Runs on a Ray cluster that is running: the local engine's bits, what nodes lack in one line, nodes that are lost."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from fedfm.config.experiment import Experiment
from fedfm.engines.flower import base_memory, node_probe, ray_cluster, simulation
from fedfm.engines.flower.ray_cluster import RayNode, faults_of, gpus_each, places
from fedfm.errors import InputError
from processes import begin, experiment, fedfm, here, mentioning, rounds, same, until

TABLES = {
    "data": {"name": "digits", "partition": {"name": "iid", "clients": 3}},
    "model": {"name": "nano-vit"},
    "method": {"name": "fedavg", "rounds": 1},
    "run": {"engine": "simulation", "ray_address": "127.0.0.1:1"},
}
SCAFFOLD = 'name = "scaffold"\nrounds = {}\nlocal = {{ learning_rate = 0.03, epochs = 2 }}'


# --- without Ray -----------------------------------------------------------------------------------------------------


def of(**tables: dict) -> Experiment:
    return Experiment.from_dict({name: table | tables.get(name, {}) for name, table in TABLES.items()})


def test_only_the_simulation_takes_an_address():
    for engine in ("local", "deployment", "folder"):
        with pytest.raises(InputError, match=r"run.ray_address: only engine = \"simulation\"") as caught:
            of(run={"engine": engine})
        assert caught.value.key == "run.ray_address"


@pytest.mark.parametrize("address", ["head", "ray://head:10001", "auto", ":6379", "head:", "head:port"])
def test_an_address_of_another_form_is_refused(address):
    with pytest.raises(InputError, match="expected host:port"):
        ray_cluster._check_answer(address)


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_without_a_cluster_is_reported_within_a_limit(answer, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def reply() -> None:
            with server.accept()[0] as connection:
                connection.sendall(answer)
                connection.recv(1 << 10)

        thread = threading.Thread(target=reply, daemon=True)
        if answer is None:
            server.close()
        else:
            thread.start()
        with pytest.raises(InputError, match=f"^run.ray_address = '127.0.0.1:{port}': no") as caught:
            ray_cluster._check_answer(f"127.0.0.1:{port}")
    assert "\n" not in str(caught.value)


def test_a_cluster_that_no_longer_answers_ends_the_run_in_one_line(monkeypatch):
    monkeypatch.setattr(simulation, "_LOOK", 0.0)
    ended, outcome = threading.Event(), {}
    place = simulation._Place(1, 0.0, "", silent=lambda: True)
    simulation._run_watched(ended.wait, outcome, place, ended)
    assert str(outcome["error"]) == (
        "the Ray cluster no longer answers; start it again, and continue with `fedfm resume`"
    )
    assert ended.is_set()


def looked(path: str) -> dict:
    return node_probe.look([path])


@pytest.mark.parametrize("package", ["python", *node_probe.PACKAGES])
@pytest.mark.parametrize("version", [None, "0.0.1"])
def test_a_node_with_another_version_of_any_package_is_named(package, version, tmp_path):
    own = looked(str(tmp_path))
    theirs = own | {"versions": own["versions"] | {package: version}}
    assert faults_of("n1", own, own, {str(tmp_path): "data.path"}, None) == []
    (fault,) = faults_of("n1", theirs, own, {str(tmp_path): "data.path"}, None)
    has = f"{package} {version}" if version else f"no {package}"
    assert fault.startswith(f"node n1 has {has}, and this machine has {package} {own['versions'][package]}")


def test_a_node_that_lacks_a_file_or_has_another_one_or_does_not_share_the_folder_is_named(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n")
    own, names = looked(str(file)), {str(file): "data.path"}
    file.write_text("a,c\n")
    other = looked(str(file))
    file.unlink()
    absent = looked(str(file))
    said = [faults_of("n1", found, own, names, None)[0] for found in (other, absent)]
    assert said == [
        f"node n1 has another {file} (data.path) than this machine",
        f"node n1 cannot read {file} (data.path); every node needs it under this path",
    ]
    token = tmp_path / "private" / ".ray"
    token.parent.mkdir()
    token.write_text("one")
    assert node_probe.look([], (str(token), "one"))["shares"]
    for text in ("two", "one"):
        if text == "one":
            token.unlink()
        found = node_probe.look([], (str(token), text))
        assert "on a disk that all nodes mount" in faults_of("n1", found, own | {"marks": {}}, {}, tmp_path)[0]
    assert faults_of("n1", "did not answer", own, names, None) == ["node n1 did not answer"]


def test_a_mark_changes_with_the_beginning_the_end_and_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr(node_probe, "_ENDS", 4)
    (tmp_path / "d").mkdir()
    file, seen = tmp_path / "d" / "f", set()
    for text in ("abcdefghij", "xbcdefghij", "abcdefghix", "abcdefghijk", "", "a"):
        file.write_text(text)
        assert node_probe.mark(str(file)) == node_probe.mark(str(file))
        seen.add(node_probe.mark(str(file)))
    assert len(seen) == 6
    folder = node_probe.mark(str(tmp_path / "d"))
    (tmp_path / "d" / "g").touch()
    assert node_probe.mark(str(tmp_path / "d")) != folder


def node(name: str, cores: int = 4, gpus: float = 0.0) -> RayNode:
    return RayNode(name, name, ("127.0.0.1", 1), cores, gpus)


@pytest.mark.parametrize(
    ("device", "each", "gpus", "expected", "slots"),
    [
        ("auto", None, (0, 0), 0.0, 8),
        ("cpu", None, (2, 2), 0.0, 8),
        ("auto", None, (2, 0), 1.0, 2),
        ("cuda", 0.5, (2, 1), 0.5, 6),
        ("cuda", 2, (2, 1), 2, 1),
        ("auto-map", None, (4, 2), 2.0, 3),
        ("cuda", 0.1, (1, 0), 0.1, 4),
    ],
)
def test_each_node_takes_as_many_clients_as_its_cores_and_gpus_allow(device, each, gpus, expected, slots):
    nodes = [node("a", gpus=gpus[0]), node("b", gpus=gpus[1])]
    run = {} if each is None else {"gpus_per_client": each}
    found = gpus_each(of(model={"device": device}, run=run), nodes)
    assert (found, sum(places(n, found) for n in nodes)) == (expected, slots)


def test_more_gpus_than_a_node_has_are_refused():
    for device, each, gpus in (("cuda", 1, 0), ("auto", 4, 2)):
        with pytest.raises(InputError, match=f"needs {each} GPUs, and no node of the Ray cluster has more than {gpus}"):
            gpus_each(of(model={"device": device}, run={"gpus_per_client": each}), [node("a", gpus=gpus)])


def test_actors_get_complete_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("text,label\na,b\n")
    Path("digits").mkdir()  # a built-in name stays a name
    exp = Experiment.from_dict(TABLES | {"data": {"path": "rows.csv"}})
    found = tomllib.loads(ray_cluster.for_actors(exp))
    assert (found["data"]["path"], found["model"]["name"]) == (str(tmp_path / "rows.csv"), "nano-vit")
    assert ray_cluster.read_by_clients(exp) == {str(tmp_path / "rows.csv"): "data.path"}
    assert Experiment.from_dict(found) == exp.__class__.from_dict(
        TABLES | {"data": {"path": str(Path("rows.csv").resolve())}}
    )


def test_only_named_variables_reach_the_nodes(monkeypatch):
    monkeypatch.setenv("A_SECRET", "x")
    assert ray_cluster._environment().keys() <= {*ray_cluster._KEPT, *ray_cluster._SET, "PYTHONPATH"}


def memory_of(parameter: nn.Parameter) -> str:
    """Inode of the file in which a parameter lies."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= parameter.data_ptr() < end:
            return line.split()[4]
    raise AssertionError


def frozen(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(700, 700), nn.Linear(700, 2))
    return module.requires_grad_(False)


def test_equal_frozen_weights_lie_in_one_file_and_others_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(base_memory, "_OPEN", {})
    first, second, other, small = frozen(0), frozen(0), frozen(1), nn.Linear(2, 2).requires_grad_(False)
    second[1].requires_grad_(True)
    try:
        nbytes = sum(p.nbytes for p in first.parameters())
        assert base_memory.share(first, "run") == nbytes
        assert base_memory.share(first, "run") == 0  # they are in a file already
        again = frozen(0)
        assert base_memory.share(again, "run") == nbytes
        assert base_memory.share(other, "run") == 0
        assert base_memory.share(small, "run") == 0
        assert base_memory.share(second, "run") == sum(p.nbytes for p in second[0].parameters())
        assert second[1].weight.requires_grad
        for mine, same_, others, fresh in zip(*(m.parameters() for m in (first, again, other, frozen(1))), strict=True):
            assert torch.equal(mine, same_)
            assert memory_of(mine) == memory_of(same_) != "0"
            assert torch.equal(others, fresh)
        with torch.no_grad():
            first[0].weight += 1  # a write stays in this process's model
        assert torch.equal(again[0].weight, frozen(0)[0].weight)
    finally:
        for fd in base_memory._OPEN.values():
            os.close(fd)


# --- two nodes -------------------------------------------------------------------------------------------------------

_CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
small = {"num_cpus": 1, "object_store_memory": 10**8}
cluster = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
nodes = []
print(cluster.address, flush=True)
for line in sys.stdin:
    word, _, env = line.strip().partition(" ")
    if word == "add":
        nodes.append(cluster.add_node(env_vars=json.loads(env), **small))
    else:
        cluster.remove_node(nodes.pop(), allow_graceful=word == "remove")
    print(word, flush=True)
cluster.shutdown()
"""


class TwoNodes:
    """A Ray cluster on this machine; it is a process of its own, because Ray leaves files open in its process."""

    def __init__(self) -> None:
        env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", _CLUSTER], env=env, start_new_session=True, **pipes)
        self.address = self._read(r"[\d.]+:\d+")
        self.do("add")

    def do(self, word: str, **env: str) -> None:
        """add a node, remove the newest, or kill it."""
        self.process.stdin.write(f"{word} {json.dumps(env)}\n")
        self.process.stdin.flush()
        self._read(word)

    def kill(self) -> None:
        """Kill the head, both nodes and what they started, as a power cut does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Wait until the cluster's process has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()

    def _read(self, pattern: str) -> str:
        for line in self.process.stdout:
            if re.fullmatch(pattern, line.strip()):
                return line.strip()
        raise AssertionError("the cluster did not start")


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray", reason="Ray is not installed (the extra simulation)")
    two = TwoNodes()
    yield two
    two.close()


@pytest.mark.simulation
def test_two_nodes_give_the_local_bits_and_keep_running(cluster, tmp_path):
    exp = experiment(
        tmp_path, method=SCAFFOLD.format(2), run=f'ray_address = "{cluster.address}"\nengine = "simulation"'
    )
    rays = set(mentioning(Path(cluster.address)))  # other tests have clusters of their own
    found = fedfm("check", exp)
    assert re.match(rf"Ray cluster {cluster.address}: 2 nodes \(.*\), 2 cores, 2 clients at once", found["notices"][0])
    simulated = fedfm("run", exp, "--out", tmp_path / "simulated")
    local = experiment(tmp_path, method=SCAFFOLD.format(2))
    same(simulated, here("run", local, "--out", tmp_path / "local"))
    assert set(mentioning(Path(cluster.address))) == rays
    until(lambda: not mentioning(tmp_path))
    assert not (tmp_path / "simulated/private/.ray").exists()


@pytest.mark.simulation
def test_a_node_with_another_version_is_reported_before_the_model_is_read(cluster, tmp_path):
    fake = tmp_path / "site" / "peft-0.0.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.0.1\n")
    exp = experiment(tmp_path, method='name = "fedavg"', run='engine = "simulation"')
    exp.write_text(exp.read_text().replace('"nano-vit"', '"no-such-model"'))
    cluster.do("add", PYTHONPATH=str(fake.parent))
    try:
        error = fedfm("check", exp, "--set", f"run.ray_address={cluster.address}", code=2)["stderr"]
    finally:
        cluster.do("remove")
    assert re.search(r"node [\d.:]+ has peft 0.0.1, and this machine has peft", error)


@pytest.mark.simulation
def test_a_lost_node_is_named_and_the_run_goes_on(cluster, tmp_path):
    exp = experiment(tmp_path, method=SCAFFOLD.format(400), run=f'ray_address = "{cluster.address}"')
    out = tmp_path / "run"
    running = begin("run", exp, "--out", out, "--engine", "simulation")
    until(lambda: rounds(out) >= 3 or running.poll() is not None)
    cluster.do("kill")
    try:
        before = rounds(out)  # the processes of a killed node live on for a moment, and answer short rounds
        until(lambda: rounds(out) >= before + 40 or running.poll() is not None)
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=300)
    finally:
        cluster.do("add")
    assert running.returncode == 130, error[-2000:]
    assert re.search(r"node [\d.:]+ of the Ray cluster is lost; client-0\d is asked again on another node", error)
    assert "left out" not in error


@pytest.mark.release
def test_a_cluster_that_dies_ends_the_run_by_name_and_it_goes_on_with_a_new_one(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed (the extra simulation)")
    two = TwoNodes()
    exp = experiment(tmp_path, method=SCAFFOLD.format(30), run=f'ray_address = "{two.address}"')
    out = tmp_path / "run"
    running = begin("run", exp, "--out", out, "--engine", "simulation")
    until(lambda: rounds(out) >= 3 or running.poll() is not None)
    two.kill()
    _, error = running.communicate(timeout=300)
    assert running.returncode == 1, error[-2000:]
    assert error.strip().splitlines()[-1] == (
        "fedfm: the Ray cluster no longer answers; start it again, and continue with `fedfm resume`"
    )
    assert "Traceback" not in error
    done, two = rounds(out), TwoNodes()
    try:
        resumed = fedfm("resume", out, "--set", f"run.ray_address={two.address}")
    finally:
        two.close()
    assert done < resumed["rounds"] == 30
    straight = here("run", experiment(tmp_path, method=SCAFFOLD.format(30)), "--out", tmp_path / "straight")
    same(resumed, straight)
