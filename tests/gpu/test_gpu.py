"""What only a GPU shows: `make test-gpu`, on a machine that has one."""

import json
import warnings

import pytest
import torch

import fedfm
import tiny_text
from every_method import METHODS, experiment_of
from fedfm.linalg.params import Params

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
]
SILENT = fedfm.Progress()


def llama(folder, **model):
    """Tables of LoRA on a LLaMA of two blocks."""
    if not (folder / "llama").exists():
        tiny_text.save_llama(folder / "llama")
        tiny_text.texts(folder / "rows.jsonl")
    return {
        "data": {"path": str(folder / "rows.jsonl"), "partition": {"name": "iid", "clients": 3}},
        "model": {
            "name": str(folder / "llama"),
            "task": "language_modelling",
            "device": "cuda",
            "adaptation": {"name": "lora", "rank": 2},
            **model,
        },
        "method": {
            "name": "fedavg",
            "rounds": 2,
            "local": {"name": "adamw", "learning_rate": 0.01, "batch_size": 8},
        },
        "run": {"workers": 1, "evaluate_every": 0},
    }


def on(device, tables):
    """The same experiment with its model there; a method without a model takes it from its own table."""
    if "model" in tables:
        return tables | {"model": tables["model"] | {"device": device}}
    return tables


def ran(tables, out, progress=SILENT):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fedfm.run(tables, out, progress=progress)


def adapter(run):
    """The parameters that a run ended with, on the CPU."""
    from safetensors.torch import load_file

    return load_file(run / "adapter" / "model.safetensors")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_comes_to_what_it_comes_to_on_the_cpu(name, tmp_path, monkeypatch):
    monkeypatch.setattr("fedfm.runtime.client_memory.entropy", lambda n: b"k" * n)
    tables = experiment_of(name, tmp_path, rounds=2)
    cpu, gpu = (ran(on(device, tables), tmp_path / device) for device in ("cpu", "cuda"))
    for key in ("loss", "accuracy", "local_loss", "local_accuracy"):
        if cpu.get(key) is not None:
            assert gpu[key] == pytest.approx(cpu[key], rel=0.05, abs=0.03), key
    if "model" in tables:
        assert json.loads((tmp_path / "cuda" / "manifest.json").read_text())["device"]["type"] == "cuda"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adaptation", [{"name": "lora", "rank": 2}, {"name": "full"}])
def test_training_lowers_the_loss_as_on_the_cpu(adaptation, dtype, tmp_path):
    tables = llama(tmp_path, adaptation=adaptation, dtype=dtype)
    cpu, gpu = (ran(on(device, tables), tmp_path / device)["loss"] for device in ("cpu", "cuda"))
    assert gpu == pytest.approx(cpu, rel=0.002 if dtype == "float32" else 0.02)


def test_a_deterministic_run_has_the_same_bits_every_time_and_in_two_processes_on_one_gpu(tmp_path):
    tables = llama(tmp_path)
    runs = [
        ran(tables | {"run": tables["run"] | {"deterministic": True} | more}, tmp_path / str(i))
        for i, more in enumerate([{}, {}, {"workers": 2, "gpus_per_client": 0.5}])
    ]
    assert len({run["params_sha256"] for run in runs}) == 1


@pytest.mark.parametrize("bits", ["nf4", "int8"])
def test_a_quantised_base_trains_close_to_the_whole_one(bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    whole = ran(llama(tmp_path, dtype="bfloat16"), tmp_path / "whole")["loss"]
    quantised = ran(llama(tmp_path, dtype="bfloat16", quantization=bits), tmp_path / bits)["loss"]
    assert quantised == pytest.approx(whole, rel=0.1)


class Notices(fedfm.Progress):
    def __init__(self):
        self.said = []

    def notice(self, text):
        self.said.append(text)


def test_a_batch_that_finds_no_memory_is_halved_and_comes_to_the_same(tmp_path, monkeypatch):
    """The card's own error, at a share of its memory that holds the model and half a batch of logits."""
    tables = llama(tmp_path)
    tables["data"] |= {"path": str(tmp_path / "long.jsonl"), "partition": {"name": "iid", "clients": 1}}
    rows = [{"text": "the cat saw a dog " * 60, "split": "test" if i % 5 == 0 else "train"} for i in range(80)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables["method"]["local"] |= {"batch_size": 64}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    whole = ran(tables, tmp_path / "whole")
    peak, all_of_it = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    share = (torch.cuda.memory_reserved() + 0.7 * (peak - torch.cuda.memory_allocated())) / all_of_it
    torch.cuda.set_per_process_memory_fraction(share)
    said = Notices()
    try:
        halved = ran(tables, tmp_path / "halved", said)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("out of memory" in text for text in said.said)
    assert halved["loss"] == pytest.approx(whole["loss"], rel=0.001)


def test_gradient_checkpointing_takes_less_memory_and_comes_to_the_same(tmp_path):
    peaks, losses = [], []
    for name, checkpointed in (("whole", False), ("less", True)):
        tables = llama(tmp_path, gradient_checkpointing=checkpointed)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        losses.append(ran(tables, tmp_path / name)["loss"])
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_run_is_audited_resumed_exported_and_predicted_with(tmp_path):
    tables = llama(tmp_path)
    ran(tables, tmp_path / "run")
    assert fedfm.resume(tmp_path / "run", rounds=3, progress=SILENT)["rounds"] == 3
    assert fedfm.audit(tmp_path / "run", progress=SILENT)
    fedfm.export(tmp_path / "run", to="peft", out=tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    Params(adapter(tmp_path / "run"))  # on the CPU, whatever device made them


@pytest.mark.parametrize("aggregation", [{"name": "secure"}, {"name": "median"}, {"name": "krum", "byzantine": 1}])
def test_updates_of_a_gpu_are_hidden_and_robustly_joined(aggregation, tmp_path):
    tables = llama(tmp_path)
    tables["data"]["partition"] = {"name": "iid", "clients": 5}
    tables["aggregation"] = aggregation
    cpu, gpu = (ran(on(device, tables), tmp_path / device)["loss"] for device in ("cpu", "cuda"))
    assert gpu == pytest.approx(cpu, rel=0.002)


def test_dp_sgd_spends_the_same_and_comes_to_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("fedfm.runtime.client_memory.entropy", lambda n: b"k" * n)
    tables = llama(tmp_path) | {"privacy": {"unit": "record", "target_epsilon": 8.0, "mechanism": "dp_sgd"}}
    tables["privacy"] |= {"delta": 1e-3, "clip_norm": 1.0}
    cpu, gpu = (ran(on(device, tables), tmp_path / device) for device in ("cpu", "cuda"))
    assert gpu["epsilon"] == cpu["epsilon"]
    assert gpu["loss"] == pytest.approx(cpu["loss"], rel=0.02)


def test_silos_on_loopback_train_on_the_gpu(tmp_path):
    tables = llama(tmp_path)
    here = ran(tables, tmp_path / "here")
    there = ran(tables | {"run": tables["run"] | {"engine": "deployment"}}, tmp_path / "there")
    assert there["excluded"] == []
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-3)


def test_compiled_blocks_come_to_the_same(tmp_path):
    plain = ran(llama(tmp_path), tmp_path / "plain")["loss"]
    assert ran(llama(tmp_path, compile=True), tmp_path / "compiled")["loss"] == pytest.approx(plain, rel=1e-3)


def test_kernels_of_the_cpu_are_refused_or_said(tmp_path):
    said = Notices()
    tables = experiment_of("fedavg", tmp_path, rounds=1)
    tables["model"]["device"] = "cuda"
    tables["run"]["kernels"] = "fast"
    try:
        ran(tables, tmp_path / "run", said)
    except fedfm.InputError as refused:
        said.said.append(str(refused))
    assert any("kernels" in text for text in said.said)
