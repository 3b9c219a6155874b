"""What an exported model says by transformers and PEFT alone, as a user of theirs would ask it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

ANSWER = 3  # tokens
BLOCK = 64  # weights that share a scale in 4 bits


def load_whole(out: Path, auto: str) -> Any:
    """The exported model of a folder of transformers."""
    import transformers

    return getattr(transformers, auto).from_pretrained(out).eval()


def load_adapter(out: Path, base: Path, auto: str, *, in_bits: bool) -> Any:
    """The exported adapter on its base."""
    import peft
    import transformers

    of, options, kept = getattr(transformers, auto), dict[str, Any](), list[str]()
    if (out / "config.json").exists():  # of a classifier
        options["config"] = transformers.AutoConfig.from_pretrained(out)
    bits = out / "base" / "quantization.json"
    if in_bits and (bits.exists() or not bits.parent.is_dir()):
        if bits.exists():
            kept = json.loads(bits.read_text(encoding="utf-8")).get("llm_int8_skip_modules") or []
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
            llm_int8_skip_modules=kept or _kept(of.from_pretrained(base)),
        )
        options["dtype"] = torch.float32
    place = out / "base" if (out / "base").is_dir() else base
    module = of.from_pretrained(place, **options)
    if any(
        "4bit" in type(m).__name__ for m in module.modules()
    ):  # bitsandbytes does not multiply matrices of every shape in 4 bits on a CPU
        module = module.dequantize()
    return peft.PeftModel.from_pretrained(module, out).eval()


def _kept(module: Any) -> list[str]:
    """Paths of the maps of a language model that fedfm does not quantise: odd shapes, and what gives the words."""
    last = module.get_output_embeddings()
    linear = [(name, m) for name, m in module.named_modules() if isinstance(m, torch.nn.Linear)]
    return [name for name, m in linear if m.in_features % BLOCK or m is last]


@torch.no_grad()
def classify_texts(model: Any, out: Path, file: Path) -> list[list[float]]:
    """Probabilities of the classes of each row."""
    inputs = _tokenizer(out)([row["text"] for row in _rows(file)], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    found: list[list[float]] = torch.softmax(model(**inputs).logits, -1).tolist()
    return found


@torch.no_grad()
def classify_pictures(model: Any, out: Path, file: Path) -> list[list[float]]:
    """Probabilities of the classes of each picture."""
    logits = model(**_pictures(out, file)).logits
    found: list[list[float]] = torch.softmax(logits, -1).tolist()
    return found


@torch.no_grad()
def compare_with_names(model: Any, out: Path, file: Path, names: list[str], pad: str | bool) -> list[list[float]]:
    """Probabilities of the class names of each picture."""
    texts = _tokenizer(out)([f"a photo of a {name}." for name in names], return_tensors="pt", padding=pad)
    texts.pop("token_type_ids", None)
    found: list[list[float]] = torch.softmax(model(**texts, **_pictures(out, file)).logits_per_image, -1).tolist()
    return found


@torch.no_grad()
def judge_text(model: Any, out: Path, file: Path) -> float:
    """The mean negative log-likelihood of the tokens of a text."""
    (row,), tokenizer, each = _rows(file), _tokenizer(out), []
    ids = torch.tensor([tokenizer(row["text"] + "\n", add_special_tokens=False)["input_ids"]])
    for block in ids.split(tokenizer.model_max_length, 1):
        logits = model(input_ids=block).logits[0, :-1]
        each.append(F.cross_entropy(logits.float(), block[0, 1:], reduction="none"))
    return float(torch.cat(each).mean())


@torch.no_grad()
def judge_answers(model: Any, out: Path, file: Path) -> float:
    """The mean negative log-likelihood of the tokens of the answers, and of those that end them."""
    tokenizer, each = _tokenizer(out), []
    for row in _rows(file):
        asked = _prompt_tokens(tokenizer, row)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        said = [*tokenizer(row["output"], add_special_tokens=False)["input_ids"], *end]
        logits = model(input_ids=torch.tensor([asked + said])).logits[0, len(asked) - 1 : -1]
        each.append(F.cross_entropy(logits.float(), torch.tensor(said), reduction="none"))
    return float(torch.cat(each).mean())


@torch.no_grad()
def answer(model: Any, out: Path, file: Path) -> list[str]:
    """The most likely tokens after each instruction, computed anew for each token, without a cache."""
    tokenizer, given = _tokenizer(out), []
    for row in _rows(file):
        ids = asked = _prompt_tokens(tokenizer, row)
        while len(ids) < len(asked) + ANSWER and (len(ids) == len(asked) or ids[-1] != tokenizer.eos_token_id):
            ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
        given.append(tokenizer.decode(ids[len(asked) :], skip_special_tokens=True).strip())
    return given


def _prompt_tokens(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    """Tokens of an instruction, without the one that a tokenizer of an encoder sets behind a text."""
    ids: list[int] = tokenizer(row["instruction"] + "\n")["input_ids"]
    return ids[:-1] if ids[-1] == tokenizer.sep_token_id else ids


def _tokenizer(out: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(out)


def _pictures(out: Path, file: Path) -> Any:
    import transformers

    with np.load(file) as arrays:
        pictures = [Image.fromarray(picture) for picture in arrays["x"]]
    return transformers.AutoImageProcessor.from_pretrained(out)(images=pictures, return_tensors="pt")


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
