"""What a folder's config.json says of its class in transformers changes nothing that fedfm reads of the model."""

import json
import shutil

import pytest
import torch
from tiny_models import OTHER_IMAGE, TEXT, load, table_for

from fedfm.errors import InputError
from fedfm.models.export import export
from fedfm.models.locate import ADAPTER, locate


@pytest.fixture
def changed(folder, tmp_path):
    """(family, keys of config.json) -> a copy of its folder with these keys."""

    def copy(family, **keys):
        out = tmp_path / family
        shutil.copytree(folder(family), out)
        file = out / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))
        return out

    return copy


@pytest.mark.parametrize("family", [*TEXT, *OTHER_IMAGE, "vit", "clip", "resnet"])
def test_how_a_call_returns_its_outputs_changes_nothing(folder, changed, tmp_path, family):
    flags = {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    table = table_for(family)
    plain, other = load(folder(family), table, "full"), load(changed(family, **flags), table, "full")
    rows = plain.prepare(table, range(3))
    assert torch.equal(plain.predict(rows), other.predict(rows))
    assert plain.fingerprint == other.fingerprint
    export(other, other.params(), "hf", tmp_path / "out")


@pytest.mark.parametrize("form", ["hf", "peft"])
@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_an_export_says_that_a_row_has_one_class_whatever_the_checkpoint_was(changed, tmp_path, problem, form):
    table = table_for("bert")
    model = load(changed("bert", problem_type=problem), table, "lora")
    out = export(model, model.params(), form, tmp_path / "out")
    said = json.loads((out / "config.json").read_text())["problem_type"]
    assert said == "single_label_classification"  # as pipelines of transformers read it


@pytest.mark.parametrize("family", ["bert", "llama", "vit"])
def test_a_folder_with_an_adapter_is_refused_with_the_cure(folder, changed, tmp_path, family):
    table = table_for(family)
    model = load(folder(family), table, "lora")
    adapter = export(model, model.params(), "peft", tmp_path / "adapter")
    beside = changed(family)
    shutil.copy(adapter / ADAPTER, beside)
    for place in (adapter, beside):
        with pytest.raises(InputError, match=r"adapter of PEFT.*`fedfm export --to hf`"):
            load(place, table, "head")
    load(beside, table, "full", weights="random")  # reads no weights
    (adapter / "config.json").unlink()
    with pytest.raises(InputError, match="adapter of PEFT"):
        locate(str(adapter))


def test_the_folder_of_a_run_is_refused_as_a_model(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"is a run, expected a model.*export --to hf"):
        locate(str(tmp_path))
