"""Modules of users for segmentation: forms of their outputs, parts that train, bits, scores, predictions, refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, interpolate

import fedfm
import tiny_segformer
import tiny_unets
from fedfm.api.execute import resume
from fedfm.api.predict import export, predict
from fedfm.config.experiment import Experiment
from fedfm.core.attachments import Attachment
from fedfm.data import user_functions
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.runtime import own_rows, run_directory
from fedfm.sites import silo_config
from fedfm.tasks import _mask_files

FITTING = ("unet", "odd", "in_dict", "like_torchvision", "of_transformers", "frozen", "mask2former")
HEADS = {"unet": "last", "odd": "last", "of_transformers": "decode_head.classifier", "without_head": ""}


@pytest.fixture(scope="session")
def masked(tmp_path_factory):
    """A folder of shapes."""
    return tiny_segformer.folder(tmp_path_factory.mktemp("masked"), {"train": 8, "test": 4})


@pytest.fixture(scope="session")
def table(masked):
    return load_table(DataSpec(path=str(masked)), seed=0, task="segmentation")


@pytest.fixture(autouse=True)
def admitted():
    """Admit the functions of ``tiny_unets``, as an experiment of this process's owner does."""
    for name, made in vars(tiny_unets).items():
        if callable(made):
            user_functions.keep(f"tiny_unets:{name}", made)


def experiment(path, name="unet", adaptation="full", rounds=2, **more):
    return {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": 3}},
        "model": {"name": f"tiny_unets:{name}", "task": "segmentation", "adaptation": {"name": adaptation, "rank": 2}},
        "method": {"name": "fedavg", "rounds": rounds, "local": {"learning_rate": 0.1, "batch_size": 4}},
    } | more


def model_of(table, name="unet", adaptation="full", **keys):
    spec = ModelSpec(f"tiny_unets:{name}", adaptation=AdaptationSpec(adaptation, rank=2), **keys)
    return load_model(spec, classes=table.classes, kind="masked", task="segmentation")


@pytest.fixture(scope="session")
def ran(masked, tmp_path_factory):
    out = tmp_path_factory.mktemp("ran") / "run"
    fedfm.run(experiment(masked, rounds=3), out, progress=fedfm.Progress())
    return out


@pytest.mark.parametrize("name", FITTING)
def test_every_form_of_output_has_the_loss_of_torch_by_row_and_by_batch(name, table):
    model = model_of(table, name)
    rows = model.prepare(table, [0, 1, 2])
    batch = rows.batch(range(3))
    logits, targets = model.logits(batch), batch["targets"].long()
    assert logits.shape[:2] == (3, 3)
    right = cross_entropy(interpolate(logits, targets.shape[-2:], mode="bilinear"), targets)
    torch.testing.assert_close(model.loss(batch), right)
    sums, counts = model.task.row_losses(model, batch)
    torch.testing.assert_close(sums.sum() / counts.sum(), right)


def test_a_step_on_all_rows_is_that_of_torch(masked, table, tmp_path):
    tables = experiment(masked, rounds=1)
    tables["data"]["partition"]["clients"] = 1
    tables["method"]["local"]["batch_size"] = 8
    fedfm.run(tables, tmp_path / "run", progress=fedfm.Progress())
    export(tmp_path / "run", "torch", tmp_path / "out")
    model = model_of(table)
    net, rows = model.module, model.prepare(table, table.rows("train"))
    cross_entropy(net(rows.tensors["pixel_values"]), rows.tensors["targets"].long()).backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), dict(net.state_dict()))


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_the_convolution_that_runs_last(name, table):
    if not HEADS[name]:
        with pytest.raises(InputError, match=r"the last layer of .* is not a convolution with one output per class"):
            model_of(table, name, "head")
        return
    assert {tensor.rpartition(".")[0] for tensor in model_of(table, name, "head").names} == {HEADS[name]}
    adapted = model_of(table, name, "lora").names
    assert any(f"{HEADS[name]}.modules_to_save" in tensor for tensor in adapted)
    assert any(".lora_A." in tensor for tensor in adapted)


def test_the_function_draws_the_same_weights_for_the_same_seed(table):
    one, other = model_of(table), model_of(table)
    assert one.fingerprint == other.fingerprint
    batch = one.prepare(table, [0]).batch([0])
    torch.testing.assert_close(one.logits(batch), other.logits(batch), rtol=0, atol=0)


def test_parameters_that_the_function_froze_stay_frozen(table):
    assert not any(name.startswith("down.") for name in model_of(table, "frozen").names)


def test_the_default_is_to_train_the_complete_module(masked):
    tables = experiment(masked)
    del tables["model"]["adaptation"]
    assert Experiment.from_dict(tables, imports=True).model.adaptation.name == "full"


WRONG = {
    "in_tuple": r"returns a tuple: expected a tensor of logits",
    "one_class_more": r"returns \(2, 4, 16, 16\): expected \(2, 3, height, width\)",
    "without_pixels": r"returns \(2, 3\): expected",
    "classes_last": r"returns \(2, 16, 16, 3\): expected",
    "larger": "with a height up to 32",
    "only_batches": r"for images \(1, 3, 32, 32\) .* returns \(3, 16, 16\)",
    "grey": r"fails on images \(2, 3, 32, 32\): RuntimeError",
    "lazy": "has no shape yet",
    "no_module": "returns a str; expected a torch.nn.Module",
    "wrong_size": "image_size = '32'; expected a number",
    "unknown_key": "returns the key 'size'; expected",
    "fails": r"fails\(\) fails: ValueError: no weights here",
    "without_classes": "does not take one argument",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_module_that_does_not_fit_is_refused_when_it_is_loaded(name, table):
    with pytest.raises(InputError, match=WRONG[name]) as found:
        model_of(table, name)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"weights": "random"}, "model.weights"),
        ({"attention": "eager"}, "model.attention"),
        ({"quantization": "nf4"}, ""),
    ],
)
def test_keys_for_models_from_files_are_refused(keys, words, table):
    with pytest.raises(InputError, match=f"{words}.*makes the module with its weights"):
        model_of(table, **keys)


def test_other_tasks_take_no_function_for_the_model_alone(masked):
    tables = experiment(masked)
    tables["model"] |= {"task": "classification"}
    with pytest.raises(InputError, match=r'for a function that provides only the model, model\.task = "segmentation"'):
        Experiment.from_dict(tables, imports=True)


def test_a_guessed_size_of_images_is_reported(table):
    assert "tiny_unets:without_size returns no image_size: images are resized to 224 x 224" in str(
        model_of(table, "without_size").notices
    )


@pytest.mark.proof
def test_a_run_is_resumed_with_the_same_bits(masked, ran, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    class Ends(fedfm.Progress):
        def round(self, *given, **named):
            raise Stop

    with pytest.raises(Stop):
        fedfm.run(experiment(masked, rounds=3), tmp_path / "run", progress=Ends())
    resume(tmp_path / "run", progress=fedfm.Progress())
    found, whole = (run_directory.Run.open(path).manifest["result"] for path in (tmp_path / "run", ran))
    assert found["params_sha256"] == whole["params_sha256"]


def test_masks_of_predictions_are_those_of_the_exported_weights(masked, ran, tmp_path):
    export(ran, "torch", tmp_path / "out")
    net = tiny_unets.unet(3)["model"]
    net.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    from transformers import AutoImageProcessor

    prepare = AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")
    found = predict(ran, masked / "test" / "images", files=tmp_path / "masks")
    from PIL import Image

    for name, mask in zip(found["files"], found["masks"], strict=True):
        image = prepare(Image.open(masked / "test" / "images" / name), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            right = net.eval()(image)[0].argmax(0).numpy()
        assert np.array_equal(_mask_files.read(Attachment(str(tmp_path / mask))), right)
    assert "module.load_state_dict(weights)" in (tmp_path / "out" / "README.md").read_text()


def test_exports_that_need_a_class_of_transformers_are_refused(ran, tmp_path):
    with pytest.raises(InputError, match="is not a transformers model: use torch"):
        export(ran, "hf", tmp_path / "hf")


@pytest.mark.parametrize("to", ["hf", "peft"])
def test_a_module_of_transformers_is_exported_in_its_form(to, masked, tmp_path):
    fedfm.run(experiment(masked, "of_transformers", "lora", 1), tmp_path / "run", progress=fedfm.Progress())
    out = export(tmp_path / "run", to, tmp_path / to)
    assert (Path(out) / ("config.json" if to == "hf" else "adapter_config.json")).exists()
    if to == "hf":
        from transformers import AutoModelForSemanticSegmentation

        assert AutoModelForSemanticSegmentation.from_pretrained(out).config.id2label == {0: "0", 1: "1", 2: "2"}


def private(unit, mechanism):
    return {"mechanism": mechanism, "unit": unit, "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-3}


@pytest.mark.parametrize(
    "more",
    [
        {"privacy": private("record", "dp_sgd")},
        {"privacy": private("client", "gaussian")},
        {"privacy": {"aggregator": "secagg"}},
        {"attack": {"name": "label_shuffle", "fraction": 0.5}},
    ],
    ids=["records", "clients", "secagg", "shuffle"],
)
def test_privacy_and_attacks_take_a_module(more, masked, tmp_path):
    found = fedfm.run(experiment(masked, rounds=1, **more), tmp_path / "run", progress=fedfm.Progress())
    assert np.isfinite(found["loss"])


def test_dp_sgd_refuses_batch_norm_that_trains(masked, tmp_path):
    noisy = {"privacy": private("record", "dp_sgd")}
    with pytest.raises(InputError, match="statistics of batch norm mix the rows"):
        fedfm.run(experiment(masked, "odd", **noisy), tmp_path / "run", progress=fedfm.Progress())
    fedfm.run(experiment(masked, "odd", "lora", 1, **noisy), tmp_path / "lora", progress=fedfm.Progress())


def test_a_silo_runs_only_functions_of_its_own_file(masked, tmp_path, monkeypatch):
    (tmp_path / "own_net.py").write_text("from tiny_unets import unet as build\n")
    monkeypatch.syspath_prepend(tmp_path)
    tables = experiment(masked)
    tables["model"]["name"] = "own_net:build"
    asked = Experiment.from_dict(tables, imports=True)
    user_functions._admitted.pop("own_net:build")
    for models, words in (("[]", "does not list this model"), ('["own_net:build"]', "")):
        path = tmp_path / "silo.toml"
        path.write_text(f'name = "a"\ndata = "{masked}"\ntask = "segmentation"\nmodels = {models}\n')
        silo = silo_config.load(path)
        silo_config.admit_methods(silo, path)
        if words:
            with pytest.raises(InputError, match=words):
                own_rows.populate(silo.rows, asked, ("0", "1", "2"))
        else:
            assert own_rows.populate(silo.rows, asked, ("0", "1", "2")).model.spec.name == "own_net:build"
