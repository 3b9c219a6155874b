"""Broken weights are refused by every command that reads them, before it computes and with the names of tensors."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fedfm.cli import main
from fedfm.config.toml import to_toml
from small import pictures
from tiny_students import tiny
from tiny_text import save_bert, save_gpt2, save_llama, texts

TRIED = 4  # tensors of a family


def lacks_one(tensors, name):
    return {k: v for k, v in tensors.items() if k != name}, ["lacks 1 of the ", name]


def behind_a_wrapper(tensors, name):
    return {f"module.{k}": v for k, v in tensors.items()}, [
        "lacks ",
        " more. Its names are the model's names with the prefix 'module.'",
    ]


def misshapen(tensors, name):
    expected = f"{name} is (3, 5), expected {tuple(tensors[name].shape)}"
    return tensors | {name: torch.zeros(3, 5)}, ["a tensor with a shape that differs from its config", expected]


def too_deep(tensors, name):
    last = next(f".{i}." for i in (3, 2, 1) if any(f".{i}." in k for k in tensors))
    more = {k.replace(last, ".7."): v.clone() for k, v in tensors.items() if last in k}
    return tensors | more, [" tensors for which a model of its configuration has no place: ", ".7.", " more"]


def no_number(tensors, name):
    broken = tensors[name].clone()
    broken[(0,) * broken.dim()] = float("nan")
    return tensors | {name: broken}, [f"{name}[0", "] is nan: the weights are damaged"]


FAULTS = (lacks_one, behind_a_wrapper, misshapen, too_deep, no_number)
COMMANDS = {"pretrain": {"local": {"epochs": 1}}, "distil": {"epochs": [1, 1, 1], "learning_rates": [0.1, 0.1, 0.1]}}
TRIALS = {
    **{"bert": ("pretrain", "rows.jsonl"), "llama": ("pretrain", "play.txt"), "gpt2": ("pretrain", "play.txt")},
    **{"vit": ("pretrain", "pictures.npz"), "deit": ("distil", "pictures.npz"), "ijepa": ("distil", "pictures.npz")},
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with sound models, and rows for them."""
    place = tmp_path_factory.mktemp("sound")
    pictures(place, 40, side=8)
    texts(place / "rows.jsonl")
    (place / "play.txt").write_text("the small grey fish swim near the old river\n" * 30)
    for save in (save_bert, save_llama, save_gpt2):
        save(place / save.__name__.removeprefix("save_"))
    for kind in ("vit", "deit", "ijepa"):
        module = transformers.AutoModel.from_pretrained(tiny(kind, place / kind))
        module.save_pretrained(place / kind, save_original_format=False)  # under the names of today
    return place


@pytest.mark.sample("bert-lacks_one", "gpt2-misshapen", "deit-no_number")
@pytest.mark.each_value
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", TRIALS)
def test_a_training_in_one_place_reads_sound_weights_alone(sound, family, fault, tmp_path, capsys):
    command, rows = TRIALS[family]
    tensors = load_file(sound / family / "model.safetensors")
    names = [k for k in sorted(tensors) if "pooler" not in k and "mask_token" not in k]
    for name in names[:: max(1, len(names) // TRIED)]:
        broken = shutil.copytree(sound / family, tmp_path / "model", dirs_exist_ok=True)
        changed, told = fault(tensors, name)
        save_file(changed, broken / "model.safetensors", {"format": "pt"})
        tables = {"data": {"path": str(sound / rows)}, "model": {"name": str(broken)}, command: COMMANDS[command]}
        (tmp_path / "exp.toml").write_text(to_toml(tables))
        assert main([command, str(tmp_path / "exp.toml"), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert [part for part in told if part not in error] == [], error
        assert not list((tmp_path / "out").glob("checkpoint*/*"))
