"""Folders of weights in few bits: read as numbers where transformers can, else refused by their format."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_later_words import _SMALL, saved
from tiny_models import load, prose, save

from fedfm.errors import InputError
from fedfm.models.export import export
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

BLOCK = 8  # of weights in fp8, both ways
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, section 5.3.3
GPT_OSS = {
    **_SMALL,
    **{"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16},
    **{"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64},
}


def rewrite(folder, settings, tensors):
    """The folder with these settings of quantisation and tensors."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def fp8(folder):
    """By hand in fp8, as DeepSeek-V3 publishes weights; the numbers that the bits stand for."""
    whole, stored, numbers = load_file(folder / "model.safetensors"), {}, {}
    for name, t in whole.items():
        stored[name] = numbers[name] = t
        if "proj" in name:
            d_out, d_in = t.shape
            blocks = t.view(d_out // BLOCK, BLOCK, d_in // BLOCK, BLOCK)
            scale = blocks.abs().amax((1, 3)) / 448
            bits = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            numbers[name] = (bits.float() * scale[:, None, :, None]).view(d_out, d_in)
            stored |= {name: bits.view(d_out, d_in), f"{name}_scale_inv": scale}
    rewrite(folder, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, stored)
    return numbers


def mxfp4(folder):
    """By hand in mxfp4, as gpt-oss publishes experts; the numbers that the bits stand for."""
    whole, stored, numbers = load_file(folder / "model.safetensors"), {}, {}
    levels = torch.tensor([*E2M1, *(-x for x in E2M1)])
    for name, t in whole.items():
        stored[name] = numbers[name] = t
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            rows = t.transpose(1, 2).unflatten(2, (-1, 32))  # (E, d_out, blocks, 32): a scale for 32 inputs
            power = (rows.abs().amax(-1) / 6).log2().ceil()
            code = ((rows / power.exp2()[..., None])[..., None] - levels).abs().argmin(-1)
            numbers[name] = (levels[code] * power.exp2()[..., None]).flatten(2).transpose(1, 2)
            del stored[name]
            packed = code[..., ::2] + 16 * code[..., 1::2]
            stored |= {f"{name}_blocks": packed.to(torch.uint8), f"{name}_scales": (power + 127).to(torch.uint8)}
    rewrite(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, stored)
    return numbers


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(folder, the numbers that it stands for) by format."""
    llama, oss = save("llama", tmp_path_factory.mktemp("fp8")), tmp_path_factory.mktemp("mxfp4")
    return {"fp8": (llama, fp8(llama)), "mxfp4": (oss, mxfp4(saved(oss, "GptOssConfig", GPT_OSS, "CausalLM")))}


@pytest.fixture(params=["fp8", "mxfp4"])
def stored(request, folders):
    return folders[request.param]


def test_weights_are_the_numbers_that_the_bits_stand_for(stored):
    folder, numbers = stored
    model = load(folder, prose(), "lora")
    frozen = model.module.get_base_model().state_dict()
    found = {name.replace(".base_layer", ""): t for name, t in frozen.items() if ".lora_" not in name}
    for name, t in numbers.items():
        torch.testing.assert_close(found[name], t, rtol=1e-6, atol=0)
    assert [n for n in model.notices if "stores its weights in" in n and "read as float32" in n]


def test_a_server_without_weights_agrees_with_its_silos(stored):
    spec = ModelSpec(str(stored[0]), adaptation=AdaptationSpec("lora", rank=2))
    server = load_model(spec, classes=(), kind="passages", hollow=True)
    assert server.fingerprint == load(stored[0], prose(), "lora").fingerprint


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT, about a name of transformers
@pytest.mark.parametrize("to", ["hf", "peft"])
def test_an_export_computes_the_same(stored, tmp_path, to):
    model = load(stored[0], prose(), "lora")
    draws = torch.Generator().manual_seed(1)
    w = model.params()
    w = w.replace({name: torch.randn(w[name].shape, generator=draws) * 0.2 for name in w})
    export(model, w, to, tmp_path / "out")
    model.load(w)
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        mine = model.outputs({"input_ids": ids})
        if to == "hf":
            theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
            assert not hasattr(theirs.config, "quantization_config")
        else:
            import peft

            base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base")
            theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
        torch.testing.assert_close(theirs(input_ids=ids).logits, mine, rtol=1e-4, atol=1e-5)


def test_bits_without_their_scales_are_refused(stored, tmp_path):
    folder = shutil.copytree(stored[0], tmp_path / "bare")
    tensors = load_file(folder / "model.safetensors")
    del tensors[max(name for name in tensors if "_scale" in name)]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"model\.name: .*lacks? |model\.name: .*without scales: "):
        load(folder, prose(), "lora")


def test_weights_are_not_rounded_again(stored):
    with pytest.raises(InputError, match=r'model\.quantization = "nf4": the weights of .* are already quantised'):
        load(stored[0], prose(), "lora", quantization="nf4")


OTHER = ["gptq", "awq", "aqlm", "hqq", "quanto", "bitnet", "eetq", "torchao", "fbgemm_fp8", "vptq", "a-new-one", None]


@pytest.mark.parametrize("method", OTHER)
def test_other_formats_are_refused_by_their_name(tmp_path, folder, method):
    copy = shutil.copytree(folder("llama"), tmp_path / "q")
    settings = {"quant_method": method, "bits": 4} if method else {"bits": 4}
    rewrite(copy, settings, load_file(copy / "model.safetensors"))
    for hollow in (False, True):
        spec = ModelSpec(str(copy), adaptation=AdaptationSpec("lora", rank=2))
        with pytest.raises(InputError, match=f"is quantised with {method or 'an unnamed format'}; ") as error:
            load_model(spec, classes=(), kind="passages", hollow=hollow)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [True, False])
def test_float8_without_scales_is_refused_with_and_without_settings(folders, tmp_path, settings):
    """Without settings transformers took the bits as the weights, 9,000 times too large."""
    folder = shutil.copytree(folders["fp8"][0], tmp_path / "bare")
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "scale" not in n}, folder / "model.safetensors", {"format": "pt"})
    if not settings:
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
    for kind in ("lora", "head"):
        with pytest.raises(InputError, match=r"21 tensors of 8 or 4 bits without scales: .*saved as bfloat16"):
            load(folder, prose(), kind)
