"""The code in an export's README.md, run in a process of its own after the folder has been moved.

It has to load a model that computes the run's outputs, whatever was exported.
"""

import itertools
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_later_words import saved as saved_of_kind
from test_model_export import arguments, expected, trained
from test_pooled_encoder import ENCODERS, saved
from test_preference import table as preferences
from test_stored_formats import GPT_OSS, fp8, mxfp4
from tiny_models import CLASSES, images, load, prose, save, save_tokenizer, sentences, vectors

import tiny_clip
from fedfm.api.model_card import how_to_load
from fedfm.encrypted.student.conversion import is_polynomial_student
from fedfm.models.architectures.pooled_encoder import POOLER
from fedfm.models.dual_encoder import DualModel
from fedfm.models.export import export, merge
from fedfm.models.load import load_model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec
from tiny_students import make_student

pytestmark = pytest.mark.proof
TEMPLATES = (("the {}.",), ("a {}.", "a photo of the {}."))
_RUN = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file

for case in json.loads(Path("cases.json").read_text()):
    folder = Path("moved", case["name"]).resolve()
    names = {}
    try:
        exec(case["code"].replace("FOLDER", str(folder)), names)
        if "model" in names or "logits" in names:
            tensors = load_file(f"{case['name']}.safetensors")
            wanted = tensors.pop("expected")
            for part in names["model"].modules() if "model" in names else ():
                if hasattr(part, "support_avx512bf16_for_cpu"):  # bitsandbytes then multiplies in bfloat16
                    part.support_avx512bf16_for_cpu = False
            with torch.no_grad():
                if "logits" in names:
                    out = names["logits"](**tensors)
                else:
                    out = names["model"].eval()(**names.get("texts", {}), **tensors)
            if not isinstance(out, torch.Tensor):
                out = out.logits if hasattr(out, "logits") else out.logits_per_image
            found = out.float()
            if case["softmax"]:  # SigLIP's bias is the same for all classes
                found, wanted = found.softmax(1), wanted.softmax(1)
            case["error"] = (found - wanted).abs().max().item() if found.shape == wanted.shape else str(found.shape)
            case["tokenizer"] = "tokenizer" not in names or len(names["tokenizer"]("a b")["input_ids"]) > 0
        else:
            case["tensors"] = len(names["weights"])
    except Exception as error:
        case["failure"] = f"{type(error).__name__}: {error}"
    print(json.dumps(case))
"""


def other_head(folder: Path, name: str) -> Path:
    """A checkpoint of a classifier of five classes; its weights are in one file, or in several."""
    import transformers as t

    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    text = {**shape, "vocab_size": 64, "max_position_embeddings": 40, "pad_token_id": 0}
    with quiet():
        if name == "vit":
            module = t.ViTForImageClassification(t.ViTConfig(**shape, image_size=16, patch_size=8, num_labels=5))
            module.save_pretrained(folder)
            t.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
        else:
            stem, split = name.removesuffix("-shards"), {"max_shard_size": "12KB"} if "shards" in name else {}
            kinds = {"bert": t.BertForSequenceClassification, "roberta": t.RobertaForSequenceClassification}
            config = {"bert": t.BertConfig, "roberta": t.RobertaConfig}[stem](**text, num_labels=5)
            kinds[stem](config).save_pretrained(folder, **split)
            save_tokenizer(folder)
    return folder


def encoder(folder: Path, name: str):
    """A classifier of an encoder; each pools otherwise, and trains otherwise."""
    return load(saved(folder, name, ENCODERS[name][0]), images(), "lora" if ENCODERS[name][1] == POOLER else "head")


def pair(folder: Path, kind: str, written: tuple[str, ...]):
    """Two encoders that compare pictures with class names."""
    if not folder.exists():
        tiny_clip.save(kind, folder)
    return load(folder, images(), "lora", task="zero_shot", templates=written)


def wide(folder: Path, family: str) -> Path:
    """A checkpoint whose maps have room for blocks of bits."""
    return folder if folder.exists() else save(family, folder, 4)


def few_bits(place: Path, form: str) -> Path:
    """A language model stored in few bits, in a format that is read as numbers."""
    if not place.exists():
        oss = form == "mxfp4"
        _ = saved_of_kind(place, "GptOssConfig", GPT_OSS, "CausalLM") if oss else save("llama", place)
        (mxfp4 if oss else fp8)(place)
    return place


def made(place: Path, folder) -> dict[str, tuple]:
    """(model, form) by name."""
    twin = place / "student"
    make_student("ijepa", twin)
    plain = ModelSpec(str(twin), adaptation=AdaptationSpec("full"))
    small = {"widths": [4, 6], "blocks": [1, 2], "image_size": 8}
    found = {
        f"{name} {to}": (load(other_head(place / f"{name}-{to}", name), rows, "lora"), to)
        for name, rows in (
            ("bert", sentences()),
            ("roberta", sentences()),
            ("bert-shards", sentences()),
            ("vit", images()),
        )
        for to in ("peft", "hf")
    }
    return found | {
        "headless bert peft": (load(folder("bert"), sentences(), "lora"), "peft"),
        "gpt2 peft": (load(folder("gpt2"), sentences(), "lora"), "peft"),
        "nano-vit peft": (load("nano-vit", images(), "lora"), "peft"),
        "nano-vit hf": (load("nano-vit", images(), "full"), "hf"),
        "words peft": (load(folder("llama"), prose(), "lora"), "peft"),
        "words hf": (load(folder("llama"), prose(), "full"), "hf"),
        **{
            f"{form} of {len(rows.classes)} classes {to}": (load(few_bits(place / form, form), rows, "lora"), to)
            for form in ("fp8", "mxfp4")
            for rows in (prose(), sentences())
            for to in ("peft", "hf")
        },
        "preference peft": (load(folder("llama"), preferences(), "lora", beta=0.1, template="plain"), "peft"),
        "resnet hf": (load("preact-resnet-small", images(side=8), "full", weights="random", options=small), "hf"),
        "twin hf": (load_model(plain, classes=CLASSES, kind="image"), "hf"),
        "features torch": (load("features", vectors()), "torch"),
        "bert torch": (load(folder("bert"), sentences(), "head"), "torch"),
        **{f"{name} torch": (encoder(place / name, name), "torch") for name in ENCODERS},
        "prompt torch": (load(folder("clip"), images(), "prompt", task="zero_shot"), "torch"),
        **{
            f"{kind} of {len(written)} templates {to}": (pair(place / kind, kind, written), to)
            for kind, written, to in itertools.product(("clip", "siglip", "vtde"), TEMPLATES, ("peft", "hf"))
        },
        **{
            f"{family} {bits} {to}": (load(wide(place / family, family), rows, "lora", quantization=bits), to)
            for family, rows in (("bert", sentences()), ("vit", images()))
            for bits, to in (("nf4", "peft"), ("nf4", "hf"), ("int8", "peft"))  # int8 also rounds what the maps read
            if find_spec("bitsandbytes") is not None
        },
    }


def batch_and_outputs(model, w):
    """A batch, and the run's own outputs for it."""
    if model.tools.processor is None and not model.classes:
        batch = {"input_ids": torch.tensor([[4, 5, 6, 7, 8], [4, 9, 10, 5, 6]])}
        with torch.no_grad():
            return batch, merge(model, w)(**batch).logits
    if model.tools.processor is None and model.tools.tokenizer is None:
        rows = model.prepare(vectors(), range(4))
        return arguments(model, rows), expected(model, w, rows)
    if isinstance(model, DualModel):  # the code makes the texts
        rows = model.prepare(images(), range(4))
        return {"pixel_values": rows.batch(range(4))["pixel_values"]}, expected(model, w, rows)
    rows = model.prepare(images(side=8) if model.tools.processor is not None else sentences(), range(4))
    return arguments(model, rows), expected(model, w, rows)


def test_the_code_loads_what_was_exported(tmp_path, folder, tmp_path_factory):
    cases = []
    (tmp_path / "moved").mkdir()
    for name, (model, to) in made(tmp_path, folder).items():
        w = (
            model.params() if is_polynomial_student(model.module) else trained(model)
        )  # polynomials bear no other weights
        export(model, w, to, tmp_path / "out" / name)
        lines = how_to_load(model, to, tmp_path / "out" / name)
        code = re.findall(r"```python\n(.*?)```", "\n".join(lines), re.DOTALL)
        cases.append({"name": name, "code": "\n".join(code), "softmax": isinstance(model, DualModel)})
        # Only what is neither of torch nor of transformers needs fedfm: a student, and the ResNet before activation.
        assert "fedfm" not in cases[-1]["code"] or is_polynomial_student(model.module) or name.startswith("resnet")
        if to != "torch" or name.removesuffix(" torch") in (*ENCODERS, "features"):
            batch, outputs = batch_and_outputs(model, w)
            tensors = {k: v.contiguous() for k, v in batch.items()} | {"expected": outputs.contiguous()}
            save_file(tensors, tmp_path / f"{name}.safetensors")
        (tmp_path / "out" / name).rename(tmp_path / "moved" / name)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run([sys.executable, "-c", _RUN], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases), done.stderr
    for case in found:
        assert "failure" not in case, case
        assert case.get("tensors") or (case["error"] == pytest.approx(0, abs=1e-4) and case["tokenizer"]), case
