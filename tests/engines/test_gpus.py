"""GPUs shared by clients: who sees which, and that no process forks once it has opened one. No GPU is needed: what is
said to be there is their number, all else is real.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fedfm
from fedfm.config.experiment import Experiment
from fedfm.config.run_spec import RunSpec
from fedfm.core.wire import codec, payload
from fedfm.engines.flower import client_stub
from fedfm.engines.flower.simulation import shares
from fedfm.engines.local.engine import LocalLink, silos_of, visible_devices
from fedfm.engines.local.spawned import spawn
from fedfm.errors import InputError, RunError
from fedfm.runtime.judge import judge
from fedfm.runtime.population import populate
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run
from fedfm.runtime.run_manifest import describe
from fedfm.runtime.server import Server

TABLES = {
    "data": {"name": "digits", "limit": 60, "partition": {"name": "iid", "clients": 4}},
    "model": {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 2}},
    "method": {"name": "fedavg", "rounds": 1},
    "run": {"workers": 1},
}
CUDA = torch.device("cuda")


@pytest.fixture
def gpus(monkeypatch):
    def there(count, visible=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return there


def environment(pid):
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().partition("=")[::2] for entry in entries if entry)


@pytest.mark.parametrize(
    ("run", "device", "count", "expected"),
    [
        ({}, "auto", 1, []),  # one GPU: this process does the work
        ({}, "auto", 4, ["0", "1", "2", "3"]),
        ({"workers": 2}, "cuda", 4, ["0", "1"]),
        ({"workers": 1}, "cuda", 4, []),
        ({"gpus_per_client": 0.5}, "auto", 2, ["0", "0", "1", "1"]),
        ({"gpus_per_client": 2}, "auto-map", 4, ["0,1", "2,3"]),
        ({}, "auto-map", 4, []),  # one model on all
        ({}, "cuda:1", 2, []),
        ({"gpus_per_client": 0.25}, "cuda:1", 2, ["1", "1", "1", "1"]),
    ],
)
def test_each_worker_of_the_local_engine_sees_its_own_gpus(gpus, run, device, count, expected):
    gpus(count)
    where = torch.device("cuda", int(device[5:])) if device.startswith("cuda:") else CUDA
    assert visible_devices(RunSpec(**run), device, where) == expected


def test_the_machines_names_of_gpus_are_kept(gpus):
    gpus(2, visible="4,GPU-8932f937")
    assert visible_devices(RunSpec(), "auto", CUDA) == ["4", "GPU-8932f937"]
    assert shares(None, "auto") == (1.0, ["4", "GPU-8932f937"])


def test_more_workers_than_there_is_room_for_are_refused(gpus):
    gpus(2)
    with pytest.raises(
        InputError, match=r"run.workers = 3: with run.gpus_per_client = 1 there is room for 2 on 2 GPUs"
    ):
        visible_devices(RunSpec(workers=3), "auto", CUDA)
    for ask in (lambda: visible_devices(RunSpec(gpus_per_client=4), "auto", CUDA), lambda: shares(4, "cuda")):
        with pytest.raises(InputError, match=r"run.gpus_per_client = 4: this machine has 2"):
            ask()
    with pytest.raises(InputError, match=r"gpus_per_client = 1.5: expected at most 1, or a whole number"):
        Experiment.from_dict(TABLES | {"run": {"gpus_per_client": 1.5}})
    with pytest.raises(InputError, match=r'model.device = "cuda:1": Ray shows each'):
        Experiment.from_dict(
            TABLES | {"model": TABLES["model"] | {"device": "cuda:1"}, "run": {"engine": "simulation"}}
        )


@pytest.mark.deployment
def test_spawned_workers_load_their_own_model_and_give_the_same_bits(tmp_path):
    whole = fedfm.run(TABLES, tmp_path / "whole")
    run = Run.create(Experiment.from_dict(TABLES), tmp_path / "spawned")
    population, places, seen = populate(run.experiment), ["3", "5,6"], {}
    describe(run, population, Progress())

    def start(slot):
        worker = spawn(run.path, places[slot])
        seen[slot] = worker.pid
        return worker

    link = LocalLink(silos_of(run, population), workers=2, spawn=start)
    try:
        scores = judge(population, run.experiment.method, link.judge)
        result = Server(run, link, population.model, judge=scores, progress=Progress()).go()
        found = {slot: environment(pid) for slot, pid in seen.items()}
    finally:
        link.close()
    assert result["params_sha256"] == whole["params_sha256"]
    assert [found[slot]["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == places
    assert not any(Path(f"/proc/{pid}").exists() for pid in seen.values())


@pytest.mark.deployment
def test_a_worker_that_cannot_load_says_why(tmp_path):
    run = Run.create(Experiment.from_dict(TABLES), tmp_path / "run")
    population = populate(run.experiment)
    link = LocalLink(silos_of(run, population), workers=2, spawn=lambda slot: spawn(run.path, "0"))
    manifest = json.loads((run.path / "manifest.json").read_text())
    manifest["experiment"]["model"]["name"] = "/no/such/folder"
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"a worker on a GPU did not start: InputError: model.name: no folder /no/such"):
        Server(run, link, population.model, judge=None, progress=Progress()).go()


_SITES = """
import os, sys, torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
def fork():
    sys.stderr.write("forked")
    os._exit(3)
os.fork = fork
from fedfm.engines.flower import client_worker
client_worker.main()
"""


@pytest.mark.deployment
def test_sites_of_one_machine_on_gpus_are_spawned_before_a_model_is_loaded(tmp_path):
    """The parent would take the GPU and fork, after which no child can use it."""
    text = Experiment.from_dict(TABLES).to_toml()
    folders = []
    for name in ("client-00", "client-01"):
        config, node = {"experiment": text, "key": "k"}, {"client": name, "site": str(tmp_path)}
        folders.append(client_stub.folder_of(config, node, 0))
        client_stub.prepare(folders[-1], config, node)
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    quick = os.environ | {"FEDFM_WORKER_IDLE": "8", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    quick.pop("CUDA_VISIBLE_DEVICES", None)
    with subprocess.Popen(
        [sys.executable, "-c", _SITES, *map(str, folders)], env=quick, stderr=subprocess.PIPE
    ) as parent:
        end, pids = time.monotonic() + 60, []
        for folder in folders:
            while not (folder / "worker.lock").exists() or not (folder / "worker.lock").read_text():
                assert time.monotonic() < end
                assert parent.poll() is None
                time.sleep(0.05)
            pids.append(int((folder / "worker.lock").read_text()))
        seen = [environment(pid)["CUDA_VISIBLE_DEVICES"] for pid in pids]
        head, pieces = payload.encode(codec.envelope(0, 0, {"classes": []}))
        text, _ = client_stub.call(folders[1], "client-01", "query.hello", head, b"".join(pieces))
        _, error = parent.communicate(timeout=60)
    assert (parent.returncode, error) == (0, b"")
    assert seen == ["0", "1"]
    assert len({parent.pid, *pids}) == 3
    assert '"fault"' not in text


_ACTORS = """
import json, os, pathlib, sys
from fedfm.engines.flower.simulation import _ray
with _ray(4, pathlib.Path(sys.argv[1]), 2):
    import ray

    @ray.remote(num_cpus=1, num_gpus=0.5)
    class Actor:
        def sees(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    actors = [Actor.remote() for _ in range(4)]
    seen = ray.get([actor.sees.remote() for actor in actors])
print(json.dumps(seen))
"""


@pytest.mark.simulation
def test_rays_actors_share_gpus(tmp_path):
    """With two GPUs, each of four actors with half a GPU sees one GPU, and two actors see the same one."""
    two = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"}
    command = [sys.executable, "-c", _ACTORS, str(tmp_path / "log")]  # Ray leaves files open in its own process
    found = subprocess.run(command, env=two, capture_output=True, text=True, timeout=300, check=True)
    assert sorted(json.loads(found.stdout.splitlines()[-1])) == ["0", "0", "1", "1"]
