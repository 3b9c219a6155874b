"""Folders with quantised weights are whole: bits, scales and tables of one length, all of them numbers."""

import shutil

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import load, save_tokenizer, sentences

from fedfm.errors import InputError
from fedfm.models.quiet import quiet

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: the extra [quantized]")
pytestmark = pytest.mark.skipif(
    not transformers.utils.is_bitsandbytes_available(), reason="bitsandbytes is not installed: the extra [quantized]"
)
SETTINGS = {
    "nested nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
FAMILIES = {"gpt2": "CausalLM", "bert": ""}
WIDEST = 8  # widths 128 and 192


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    made = {}

    def get(family, bits):
        if (family, bits) not in made:
            whole = tiny_models.save(family, tmp_path_factory.mktemp("whole"), WIDEST)
            made[family, bits] = folder = tmp_path_factory.mktemp("bits")
            auto = getattr(transformers, f"AutoModel{'For' * bool(FAMILIES[family])}{FAMILIES[family]}")
            with quiet():
                module = auto.from_pretrained(
                    whole,
                    quantization_config=transformers.BitsAndBytesConfig(**SETTINGS[bits]),
                    device_map={"": "cpu"},
                    dtype=torch.float32,
                )
                module.save_pretrained(folder, max_shard_size="200KB")
            save_tokenizer(folder, family)
        return made[family, bits]

    return get


def tensors_of(folder):
    """The tensors of each file."""
    return {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def companions(tensors):
    """The first name of each kind of tensor beside the bits."""
    kinds = {}
    for name in sorted(tensors):
        last = name.rpartition(".")[2]
        if "absmax" in last or "quant_map" in last or last == "SCB" or "quant_state" in name:
            kinds.setdefault(last, name)
    return kinds.values()


@pytest.mark.parametrize("bits", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
class TestAFolderOfBits:
    @pytest.mark.each_value
    def test_missing_misshapen_and_non_finite_tensors_are_named(self, stored, family, bits, tmp_path):
        sound = stored(family, bits)
        files = tensors_of(sound)
        assert len(files) > 1
        all_ = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
        weight = next(n for n in sorted(all_) if all_[n].dtype in (torch.uint8, torch.int8) and n.endswith(".weight"))
        shutil.copytree(sound, tmp_path, dirs_exist_ok=True)

        def refused(name, changed):
            """The refusal of a folder in which one tensor is changed, or lacks if that is None."""
            file = next(f for f, tensors in files.items() if name in tensors)
            tensors = {n: t for n, t in files[file].items() if n != name} | ({} if changed is None else {name: changed})
            save_file(tensors, tmp_path / file, {"format": "pt"})
            with pytest.raises(InputError) as error:
                load(tmp_path, sentences(), "lora")
            save_file(files[file], tmp_path / file, {"format": "pt"})
            return str(error.value)

        for name in (weight, *companions(all_)):
            assert refused(name, None).endswith(f"lacks a tensor of its quantised weights: {name}")
            if "quant_state" not in name:
                longer = torch.zeros(len(all_[name]) + 3, *all_[name].shape[1:], dtype=all_[name].dtype)
                text = refused(name, longer)
                assert "with a shape that differs from its configuration" in text
                assert f"{name} is {tuple(longer.shape)}, expected" in text
            if all_[name].is_floating_point():
                broken = all_[name].clone()
                broken[0] = float("inf")
                assert f"{name}[0] is inf: the weights are damaged" in refused(name, broken)
        load(tmp_path, sentences(), "lora")

    @pytest.mark.each_value
    def test_a_map_or_the_index_of_names_may_not_be_missing(self, stored, family, bits, tmp_path):
        files = tensors_of(stored(family, bits))
        shutil.copytree(stored(family, bits), tmp_path, dirs_exist_ok=True)
        all_ = {name for tensors in files.values() for name in tensors}
        weight = (
            next(n for n in sorted(all_) if "weight." in n or "SCB" in n).partition("weight.")[0].removesuffix("SCB")
        )
        for file, tensors in files.items():
            save_file({n: t for n, t in tensors.items() if not n.startswith(weight)}, tmp_path / file, {"format": "pt"})
        with pytest.raises(InputError, match=rf"lacks [12] of the \d+ tensors of a \w+: .*{weight}"):
            load(tmp_path, sentences(), "lora")
        for file, tensors in files.items():
            save_file({f"module.{n}": t for n, t in tensors.items()}, tmp_path / file, {"format": "pt"})
        with pytest.raises(
            InputError, match=r"lacks .* more\. Its names are the model's names with the prefix 'module\.'"
        ):
            load(tmp_path, sentences(), "lora")


def test_a_state_that_is_no_json_is_damaged(stored, tmp_path):
    shutil.copytree(stored("gpt2", "fp4"), tmp_path, dirs_exist_ok=True)
    file, tensors = next((f, t) for f, t in tensors_of(tmp_path).items() if any("quant_state" in n for n in t))
    name = next(n for n in tensors if "quant_state" in n)
    save_file(tensors | {name: tensors[name][:-1].clone()}, tmp_path / file, {"format": "pt"})
    with pytest.raises(InputError, match=f"{name} of the quantised weights is damaged"):
        load(tmp_path, sentences(), "lora")
