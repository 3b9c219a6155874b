"""A small experiment for every method that is found: a run takes a tenth of a second."""

import dataclasses
import json

import numpy as np
import torch
from safetensors.torch import save_file

import ciphertext_student
import tiny_clip
import tiny_text
from fedfm.config.registry import available, resolve
from fedfm.errors import InputError
from small import checked, experiment, pictures, tiny_vit

METHODS = sorted(available("methods"))
TRAINED = [m for m in METHODS if m not in ("zero_shot", "survey")]
SAMPLE = (  # the five systems, and of each kind of method one that is quick
    *("fedpft", "fedbaf", "fedbip", "fedms", "blindfed"),
    *("fedavg", "scaffold", "fedadam", "ditto", "flora", "kd", "local"),
)
LEARNS = {  # what a method needs to learn from a few dozen rows
    "fedadam": {"server_learning_rate": 0.1},
    "fedyogi": {"server_learning_rate": 0.1},
    "kd": {"learning_rate": 0.05},
    "fedpgp": {"local": {"name": "adamw", "learning_rate": 0.1, "epochs": 2, "batch_size": 8}},
    "fedper": {"local": {"name": "adam", "learning_rate": 0.01, "epochs": 2, "batch_size": 16}},
    "fedrep": {"local": {"name": "adam", "learning_rate": 0.01, "epochs": 2, "batch_size": 16}},
}


def experiment_of(name, folder, rounds=4, run=None, like=None, **keys):
    """The small experiment with this method: its own keys only, one round where it takes one; data and model as
    ``like`` takes them.
    """
    tables = experiment(folder, method={"name": name, "rounds": rounds, **keys}, run=run or {})
    cls = resolve("methods", name)
    needs = resolve("methods", like or name)().needs
    takes = needs.adaptations
    if takes == ("side_adapter",):
        tables = of_a_hidden_model(folder, name, tables)
    elif "zero_shot" in needs.tasks:
        tables |= of_two_encoders(folder, takes[0])
        tables["method"] |= {
            "local": {"name": "adamw", "learning_rate": 0.03, "batch_size": 8},
            **of_stages(rounds),
            **keys,
        }
    elif takes == ("lora",):
        tables |= of_lora(folder)
        tables["method"]["local"] = {"name": "adamw", "learning_rate": 0.03, "batch_size": 8}
    elif takes and "head" not in takes:  # something besides a head has to be trained
        tables["data"]["path"] = str(pictures(folder, 120))
        tables["model"] = {"name": str(tiny_vit(folder)), "adaptation": {"name": "full"}}
    known = {"name", *(f.name for f in dataclasses.fields(cls))}
    tables["method"] = {key: value for key, value in tables["method"].items() if key in known}
    if "identical" in known:
        tables["method"] |= {"foundation": str(head(folder)), "identical": ["labels"]}
    if "rounds" not in known:
        return tables
    others = {key: tables["method"][key] for key in ("foundation", "encryption") if key in known}
    try:
        checked(cls(rounds=rounds, **others))
    except InputError:
        tables["method"]["rounds"] = cls().rounds
    return tables


def of_a_hidden_model(folder, name, tables):
    """Pictures for a method whose clients have no model, in the clear; for others the same model in the open."""
    tables = {**tables, "data": {**tables["data"], "path": str(pictures(folder, 120))}}
    twin = str(ciphertext_student.folder(folder))
    if name == "blindfed":
        del tables["model"]
        tables["method"] |= {"foundation": twin, "encryption": "clear", "released": "grid"}
    else:
        tables["model"] = {"name": twin, "adaptation": {"name": "side_adapter", "released": "grid"}}
    return tables


def of_stages(rounds):
    """Keys of a method of two stages."""
    return {"global_rounds": rounds // 2, "local_rounds": rounds - rounds // 2}


def of_two_encoders(folder, adaptation):
    """Pictures and a model for methods that need two encoders."""
    if not (folder / "clip").exists():
        tiny_clip.save("vtde", folder / "clip")
        rows = tiny_clip.pictures(folder / "pictures.npz")
    else:
        rows = folder / "pictures.npz"
    return {
        "data": {"path": str(rows), "partition": {"name": "iid", "clients": 3}},
        "model": {
            "name": str(folder / "clip"),
            "task": "zero_shot",
            "adaptation": {"name": adaptation, "rank": 2, "tokens": 4},
        },
    }


def of_lora(folder):
    """Rows and a model for methods that take LoRA alone."""
    if not (folder / "bert").exists():
        tiny_text.save_bert(folder / "bert")
        tiny_text.texts(folder / "rows.jsonl")
    return {
        "data": {"path": str(folder / "rows.jsonl"), "partition": {"name": "iid", "clients": 5}},
        "model": {"name": str(folder / "bert"), "adaptation": {"name": "lora", "rank": 2}},
    }


def head(folder):
    """A head as a run leaves it: the classes' means, centred."""
    out = folder / "foundation"
    if not out.exists():
        out.mkdir()
        rows = np.load(folder / "rows.npz")
        means = np.stack([rows["x"][rows["y"] == c].mean(0) for c in range(len(rows["classes"]))])
        weight = torch.tensor(means - means.mean(0))
        save_file({"head.weight": weight, "head.bias": torch.zeros(len(weight))}, out / "model.safetensors")
        (out / "fedfm.json").write_text(json.dumps({"classes": list(map(str, rows["classes"]))}))
    return out
