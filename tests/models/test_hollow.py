"""A server that evaluates nothing loads no frozen weights, and ends with the same bits."""

import json

import pytest
import torch
from tiny_models import CLASSES, images, sentences

import fedfm
from fedfm.config.experiment import Experiment
from fedfm.engines.local.engine import LocalLink, silos_of
from fedfm.errors import InputError, RunError
from fedfm.linalg.threads import torch_threads
from fedfm.models import multiply_accumulates
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.runtime.population import populate
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run
from fedfm.runtime.run_manifest import describe
from fedfm.runtime.server import Server


def pair(path, **adaptation):
    spec = ModelSpec(str(path), adaptation=AdaptationSpec("lora", **adaptation))
    return [load_model(spec, classes=CLASSES, kind="text", seed=3, hollow=hollow) for hollow in (False, True)]


def stored_bytes(model):
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.module.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "roberta"])
def test_trained_tensors_and_fingerprint_are_those_of_the_complete_model(folder, family):
    whole, hollow = pair(folder(family), rank=2)
    assert hollow.hollow
    assert not whole.hollow
    assert hollow.params().sha256() == whole.params().sha256()
    assert hollow.fingerprint == whole.fingerprint
    sent = sum(t.nbytes for t in hollow.params().values())
    assert stored_bytes(hollow) < 2 * sent + 1_000 < stored_bytes(whole)
    rows = whole.prepare(sentences(), range(4))
    assert multiply_accumulates.per_sample(hollow, rows) == multiply_accumulates.per_sample(whole, rows)
    with pytest.raises(RunError, match="has not loaded the model's weights"):
        hollow.predict(rows)


def test_files_with_other_names_are_loaded_completely(folder):
    """Those of a ViT have other names than its modules."""
    spec = ModelSpec(str(folder("vit")), adaptation=AdaptationSpec("lora"))
    model = load_model(spec, classes=CLASSES, kind="image", hollow=True)
    assert not model.hollow
    model.predict(model.prepare(images(), range(2)))


def test_settings_that_need_the_weights_load_them(folder):
    _, dora = pair(folder("llama"), rank=2, dora=True)  # its norms are those of the weights
    assert not dora.hollow
    spec = ModelSpec(str(folder("llama")), adaptation=AdaptationSpec("full"))
    assert not load_model(spec, classes=CLASSES, kind="text", hollow=True).hollow


def experiment(folder, tmp_path, method="fedavg", fraction=0.0):
    rows = [{"text": t, "label": "ab"[i % 2], "split": "train"} for i, t in enumerate(sentences(24).inputs)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "data": {
            "path": str(tmp_path / "rows.jsonl"),
            "partition": {"name": "iid", "clients": 2},
            "test_fraction": fraction,
        },
        "model": {"name": str(folder("llama")), "adaptation": {"name": "lora", "rank": 2}},
        "method": {"name": method, "rounds": 2},
        "run": {"workers": 1},
    }


def test_a_run_whose_server_is_hollow_ends_with_the_same_bits(folder, tmp_path):
    tables = experiment(folder, tmp_path)
    whole = fedfm.run(tables, tmp_path / "whole")
    run = Run.create(Experiment.from_dict(tables), tmp_path / "run")
    server, clients = populate(run.experiment, server=True), populate(run.experiment)
    assert server.model.hollow
    assert not clients.model.hollow
    describe(run, server, Progress())
    with torch_threads(1):
        link = LocalLink(silos_of(run, clients))
        result = Server(run, link, server.model, judge=None, progress=Progress()).go()
    assert result["params_sha256"] == whole["params_sha256"]
    told = [Run.open(tmp_path / name).manifest for name in ("run", "whole")]
    assert told[0]["ledger"]["operations"] == told[1]["ledger"]["operations"]
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(("method", "fraction"), [("fedavg", 0.25), ("feddpa", 0.0)])
def test_other_servers_load_the_weights(folder, tmp_path, method, fraction):
    found = populate(Experiment.from_dict(experiment(folder, tmp_path, method, fraction)), server=True)
    assert not found.model.hollow


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "adaptation"), [("llama", "lora"), ("gpt2", "full"), ("bert", "head"), ("llama", "full")]
)
def test_a_bare_model_has_its_values_in_the_files(folder, family, adaptation, dtype):
    """Each process of a group reads its rows of each of them."""
    spec = ModelSpec(str(folder(family)), dtype=dtype, adaptation=AdaptationSpec(adaptation, rank=1))
    whole, bare = (load_model(spec, classes=CLASSES, kind="text", seed=3, bare=bare) for bare in (False, True))
    assert (bare.names, bare.layout, bare.fingerprint) == (whole.names, whole.layout, whole.fingerprint)
    assert stored_bytes(bare) < 0.5 * stored_bytes(whole)
    unread = dict(bare.module.named_parameters())
    for name, p in whole.module.named_parameters():
        read = bare.slices.names.get(unread[name])
        found = unread[name] if read is None else bare.slices.read(unread[name])
        assert found.dtype == p.dtype
        assert torch.equal(found, p), name
        if read is not None and p.dim():
            assert torch.equal(bare.slices.read(unread[name], slice(1, 3)), p[1:3])
    buffers = dict(bare.module.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in whole.module.named_buffers())


def test_files_with_other_names_cannot_be_read_in_parts(folder):
    spec = ModelSpec(str(folder("vit")), adaptation=AdaptationSpec("lora"))
    with pytest.raises(InputError, match="cannot be read in parts"):
        load_model(spec, classes=CLASSES, kind="image", bare=True)
