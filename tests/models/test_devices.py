"""Devices in the manifest and in silo.toml; deterministic algorithms; what does nothing here is said."""

import json

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fedfm
from fedfm.audits.replay import TOLERANCE, open_finished, replay
from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.models import cuda_devices, devices
from fedfm.runtime import own_rows
from fedfm.runtime.run_directory import Run
from fedfm.sites import silo_config

TABLES = {
    "data": {"name": "digits", "limit": 80, "partition": {"name": "iid", "clients": 2}},
    "model": {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 2}},
    "method": {"name": "fedavg", "rounds": 1, "local": {"learning_rate": 0.1}},
    "run": {"workers": 1},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "run"
    fedfm.run(TABLES, path)
    return path


def test_the_manifest_says_on_what_a_run_computed(plain):
    told = Run.open(plain).manifest["device"]
    assert told == {
        "type": "cpu",
        "name": torch.backends.cpu.get_cpu_capability(),
        "tf32": False,
        "deterministic": False,
    }


def test_deterministic_algorithms_are_on_during_the_run_and_no_longer(plain, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []
    begin = torch.use_deterministic_algorithms
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: (seen.append(on), begin(on)))
    result = fedfm.run(TABLES | {"run": {"workers": 1, "deterministic": True}}, tmp_path / "run")
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()
    assert Run.open(tmp_path / "run").manifest["device"]["deterministic"]
    assert result["params_sha256"] == Run.open(plain).manifest["result"]["params_sha256"]  # on a CPU it is not news
    assert replay(open_finished(tmp_path / "run")).replies


def test_cublas_gets_its_workspace_before_it_starts(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with devices.restore_determinism():
        devices.make_deterministic()
        import os

        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.sample("fast-lora-False", "fast-full-True")
@pytest.mark.parametrize(
    ("kernels", "adaptation", "said"),
    [("fast", "head", True), ("fast", "lora", False), ("exact", "head", False), ("fast", "full", True)],
)
def test_kernels_that_do_nothing_are_reported(tmp_path, kernels, adaptation, said):
    tables = TABLES | {"model": {"name": "nano-vit", "adaptation": {"name": adaptation}}}
    tables |= {"method": {"name": "fedavg", "rounds": 0}, "run": {"workers": 1, "kernels": kernels}}
    fedfm.run(tables, tmp_path / "run")
    notices = Run.open(tmp_path / "run").manifest["notices"]
    assert any(f'run.kernels = "{kernels}" does nothing here' in n for n in notices) is said


def test_a_share_of_gpus_without_gpus_is_reported(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    fedfm.run(TABLES | {"run": {"workers": 1, "gpus_per_client": 0.5}}, tmp_path / "run")
    assert any("run.gpus_per_client does nothing" in n for n in Run.open(tmp_path / "run").manifest["notices"])


def as_if_on_a_gpu(path, tmp_path, by):
    """A copy of the run whose manifest says cuda, and whose result is ``by`` of what training moved away."""
    import shutil

    shutil.copytree(path, tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["device"] |= {"type": "cuda", "name": "a GPU"}
    run = Run.open(tmp_path)
    start, end = (storage.load(run.checkpoint(t)) for t in (0, 1))
    moved = end["state"] - start["state"]
    noise = Params(
        {
            n: torch.from_numpy(np.random.default_rng(0).normal(size=tuple(t.shape)).astype("f4"))
            for n, t in moved.items()
        }
    )
    end["state"] = end["state"] + (by * moved.norm() / noise.norm()) * noise
    storage.save(run.checkpoint(1), end, 0o600)
    manifest["result"]["params_sha256"] = end["state"].sha256()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_off_the_cpu_a_replay_is_compared_within_a_tolerance(plain, tmp_path):
    notices = []
    assert replay(open_finished(as_if_on_a_gpu(plain, tmp_path / "near", 0.3 * TOLERANCE)), notices.append).replies
    (said,) = [n for n in notices if "of the change by training" in n]
    assert float(said.split("run by ")[1].split()[0]) == pytest.approx(0.3 * TOLERANCE, rel=0.05)
    with pytest.raises(RunError, match="ends with other parameters"):
        replay(open_finished(as_if_on_a_gpu(plain, tmp_path / "far", 3 * TOLERANCE)))


def test_on_a_cpu_a_replay_is_compared_to_the_bit(plain, tmp_path):
    path = as_if_on_a_gpu(plain, tmp_path / "run", 0.3 * TOLERANCE)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["device"]["type"] = "cpu"
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="ends with other parameters"):
        replay(open_finished(path))


def silo(folder, **keys):
    np.savez(folder / "rows.npz", x=np.random.default_rng(0).normal(size=(20, 4)).astype("f4"), y=np.arange(20) % 2)
    lines = ['name = "a"', 'data = "rows.npz"', *(f'{k} = "{v}"' for k, v in keys.items())]
    (folder / "silo.toml").write_text("\n".join(lines))
    return silo_config.load(folder / "silo.toml")


def test_a_silos_own_device_wins(tmp_path):
    experiment = Experiment.from_dict(
        TABLES | {"data": {"path": str(tmp_path / "rows.npz")}, "model": {"name": "features", "device": "mps"}}
    )
    classes = own_rows.deal(silo(tmp_path).rows, experiment.data, seed=0, task=None).table.classes
    found = own_rows.populate(silo(tmp_path, device="cpu").rows, experiment, classes)
    assert found.model.device == torch.device("cpu")
    if not torch.backends.mps.is_available():
        with pytest.raises(InputError, match="'mps' is not available here"):
            own_rows.populate(silo(tmp_path).rows, experiment, classes)
    with pytest.raises(InputError, match=r'device = "tpu": expected "auto"'):
        silo(tmp_path, device="tpu")


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = (torch.nn.Linear(6, 6) for _ in range(3))
        self.between = None  # the device of b and head

    def forward(self, x):
        x = torch.relu(self.a(x))
        return self.head(self.b(x if self.between is None else x.to(self.between)))


def adapted():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["a", "b"], modules_to_save=["head"], init_lora_weights=False)
    return get_peft_model(Chain(), config)


def test_trained_parameters_of_a_model_on_two_devices_are_on_one():
    """On fake devices: a product of tensors from two devices would raise."""
    module = adapted()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        for name, part in module.named_modules():
            where = "cuda:0" if ".a" in name else "cuda:1"
            for key, p in list(part.named_parameters(recurse=False)):
                fake = torch.nn.Parameter(mode.from_tensor(p.detach()).to(where), requires_grad=p.requires_grad)
                part._parameters[key] = fake
        module.get_base_model().between = "cuda:1"
        x = torch.empty(2, 6, device="cuda:0")
        assert str(module(x).device) == "cuda:1"
        cuda_devices.gather_trained(module, torch.device("cuda:0"))
        trained = {str(p.device) for p in module.parameters() if p.requires_grad}
        frozen = {str(p.device) for p in module.parameters() if not p.requires_grad}
        assert (trained, frozen) == ({"cuda:0"}, {"cuda:0", "cuda:1"})
        assert str(module(x).device) == "cuda:1"
