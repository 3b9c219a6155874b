"""Two copies of a model that read rows otherwise are told apart, and a run keeps to the one that it began with."""

import dataclasses
import json
import shutil

import pytest
from tiny_models import images, load, sentences

import fedfm
from fedfm.core.wire import flower_records
from fedfm.engines import answers
from fedfm.errors import InputError
from fedfm.models.preparation import fingerprint
from fedfm.version import __version__


def edit(path, change):
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def swap_words(tokenizer):
    words = tokenizer["model"]["vocab"]
    words["dog"], words["fox"] = words["fox"], words["dog"]


CHANGES = {  # family, file, change
    "words": ("bert", "tokenizer.json", swap_words),
    "frame": ("bert", "tokenizer.json", lambda t: t.update(post_processor=None)),
    "case": ("bert", "tokenizer.json", lambda t: t.update(normalizer={"type": "Lowercase"})),
    "side": ("bert", "tokenizer_config.json", lambda t: t.update(truncation_side="left")),
    "template": ("llama", "tokenizer_config.json", lambda t: t.update(chat_template="{{ messages }}")),
    "mean": ("vit", "preprocessor_config.json", lambda p: p.update(image_mean=[0.1, 0.5, 0.5])),
    "filter": ("vit", "preprocessor_config.json", lambda p: p.update(resample=0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_copy_that_reads_rows_differently_has_another_fingerprint(folder, tmp_path, name):
    family, file, change = CHANGES[name]
    table = images() if family == "vit" else sentences()
    copy = tmp_path / "copy"
    shutil.copytree(folder(family), copy)
    ours, theirs = load(folder(family), table, "lora"), load(copy, table, "lora")
    assert theirs.identity == ours.identity
    edit(copy / file, change)
    theirs = load(copy, table, "lora")
    assert theirs.fingerprint == ours.fingerprint  # of the weights
    hello = {"name": "north", "fedfm": __version__, "wire": flower_records.WIRE, "model": theirs.identity}
    assert answers.parse_hello(hello | {"model": ours.identity}, ours.identity) == ("north", None)
    _, fault = answers.parse_hello(hello, ours.identity)
    assert "tokenizer or image processor" in str(fault)


def test_the_fingerprint_ignores_lengths_and_class_names_of_releases(folder):
    tools = load(folder("bert"), sentences(), "lora", max_length=8).tools
    longer = load(folder("bert"), sentences(), "lora", max_length=16).tools
    assert fingerprint(tools) == fingerprint(longer)  # the experiment tells it to all
    tools = load(folder("vit"), images(), "lora").tools
    fast = type("ViTImageProcessorFast", (type(tools.processor),), {})(**tools.processor.to_dict())
    assert fingerprint(dataclasses.replace(tools, processor=fast)) == fingerprint(tools)


@pytest.mark.parametrize("what", ["weights", "words"])
def test_a_run_does_not_go_on_or_predict_with_another_model(folder, tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder("bert"), tmp_path / "m")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"the {w}", "label": w}) + "\n" for w in ("fox", "dog") * 6))
    tables = {"data": {"path": "rows.jsonl", "partition": {"name": "iid", "clients": 2}}, "model": {"name": "m"}}
    fedfm.run(tables | {"method": {"name": "fedavg", "rounds": 1}, "run": {"workers": 1}}, "r")
    fedfm.predict("r", "rows.jsonl")
    if what == "weights":
        shutil.copy(folder("bert") / "model.safetensors", tmp_path / "old")
        from safetensors.torch import load_file, save_file

        tensors = {n: t + 1e-3 for n, t in load_file(tmp_path / "old").items()}
        save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    else:
        edit(tmp_path / "m" / "tokenizer.json", swap_words)
    for act in (
        lambda: fedfm.predict("r", "rows.jsonl"),
        lambda: fedfm.export("r", "hf", "out"),
        lambda: fedfm.resume("r", rounds=2),
    ):
        with pytest.raises(InputError, match=r"r: the .*model changed since this run began"):
            act()
