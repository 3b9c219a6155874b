"""What only a GPU shows: `make test-gpu`, on a machine that has one."""

import json
import warnings

import pytest
import torch

import fedfm
import tiny_text
from every_method import METHODS, experiment_of

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
def test_a_quantised_base_trains_close_to_the_full_precision_one(bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    whole = ran(llama(tmp_path, dtype="bfloat16"), tmp_path / "whole")["loss"]
    quantised = ran(llama(tmp_path, dtype="bfloat16", quantization=bits), tmp_path / bits)["loss"]
    assert quantised == pytest.approx(whole, rel=0.1)


class Notices(fedfm.Progress):
    def __init__(self):
        self.said = []

    def notice(self, text):
        self.said.append(text)


def wide_llama(folder):
    """Tables of full fine-tuning with 64 rows of 256 tokens at once: 3 GB of activations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tables = llama(folder, adaptation={"name": "full"}, max_length=256)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    special = {"pad_token_id": 0, "bos_token_id": 4, "eos_token_id": 3}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=64, max_position_embeddings=256, **special)).save_pretrained(
        folder / "llama"
    )
    rows = [{"text": "the cat saw a dog " * 60, "split": "test" if i % 5 == 0 else "train"} for i in range(90)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables["data"]["partition"] = {"name": "iid", "clients": 1}
    tables["method"] |= {"rounds": 1, "local": {"name": "adamw", "learning_rate": 1e-3, "batch_size": 64}}
    return tables


def peak_of(tables, out, progress=SILENT):
    """(result, bytes of the GPU at the peak)."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return ran(tables, out, progress), torch.cuda.max_memory_allocated()


def test_a_batch_that_finds_no_memory_is_halved_and_comes_to_the_same(tmp_path):
    """By the card's own error, at a share of its memory that holds the model and half of the batch."""
    tables = wide_llama(tmp_path)
    whole, peak = peak_of(tables, tmp_path / "whole")
    assert peak > 1e9
    torch.cuda.set_per_process_memory_fraction(0.7 * peak / torch.cuda.get_device_properties(0).total_memory)
    try:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with pytest.warns(RuntimeWarning, match="out of memory: from here on"):
            halved = fedfm.run(tables, tmp_path / "halved", progress=SILENT)
        least = torch.cuda.max_memory_allocated()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert least < 0.7 * peak
    assert halved["loss"] == pytest.approx(whole["loss"], rel=0.001)


def test_gradient_checkpointing_takes_less_memory_and_comes_to_the_same(tmp_path):
    tables = wide_llama(tmp_path)
    whole, peak = peak_of(tables, tmp_path / "whole")
    tables["model"]["gradient_checkpointing"] = True
    again, least = peak_of(tables, tmp_path / "again")
    assert least < 0.6 * peak
    assert again["loss"] == pytest.approx(whole["loss"], rel=1e-3)


def test_logits_in_pieces_take_less_memory_and_come_to_the_same(tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    tables = llama(tmp_path, dtype="bfloat16")
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=128_000, pad_token_id=0)).save_pretrained(tmp_path / "llama")
    tables["data"]["partition"]["clients"] = 1
    tables["method"]["local"]["batch_size"] = 64
    losses, peaks = [], []
    for name, piece in (("whole", 1 << 40), ("pieces", 1 << 24)):
        monkeypatch.setattr("fedfm.models.language.chunked_loss.PIECE", piece)
        result, peak = peak_of(tables, tmp_path / name)
        losses.append(result["loss"])
        peaks.append(peak)
    assert peaks[1] < 0.7 * peaks[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.002)


def test_a_run_is_resumed_and_exported(tmp_path):
    tables = llama(tmp_path)
    ran(tables, tmp_path / "run")
    assert fedfm.resume(tmp_path / "run", rounds=3, progress=SILENT)["rounds"] == 3
    fedfm.export(tmp_path / "run", to="peft", out=tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize("method", ["fedavg", "flora", "fedpft", "fedbip"])
def test_a_run_is_audited_within_the_tolerance_of_a_device(method, tmp_path):
    """An audit replays the run, and refuses one that ends elsewhere."""
    ran(on("cuda", experiment_of(method, tmp_path, rounds=2)), tmp_path / "run")
    assert fedfm.audit(tmp_path / "run", progress=SILENT)


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


def test_cpu_kernels_are_refused_or_reported(tmp_path):
    said = Notices()
    tables = experiment_of("fedavg", tmp_path, rounds=1)
    tables["model"]["device"] = "cuda"
    tables["run"]["kernels"] = "fast"
    try:
        ran(tables, tmp_path / "run", said)
    except fedfm.InputError as refused:
        said.said.append(str(refused))
    assert any("kernels" in text for text in said.said)
