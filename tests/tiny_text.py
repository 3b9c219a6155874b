"""Tiny language models with random weights, and rows whose label is a word in them: LoRA learns from a few dozen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = {"fish": "swim river water", "bird": "wing nest sky", "plant": "leaf root soil"}
COMMON = ("the", "a", "of", "and", "under", "near", "old", "small", "grey", "quiet")
_SHAPE: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_TEXT: dict[str, Any] = {**_SHAPE, "vocab_size": 40, "max_position_embeddings": 40, "initializer_range": 0.3}


def texts(path: Path, n: int = 90) -> Path:
    """A jsonl of texts with labels and a split."""
    rng = np.random.default_rng(0)
    names = list(WORDS)
    with path.open("w") as file:
        for i in range(n):
            label = names[rng.integers(3)]
            words = [*rng.choice(COMMON, 3), *rng.choice(WORDS[label].split(), 2)]
            text = " ".join(words[j] for j in rng.permutation(5))
            file.write(json.dumps({"text": text, "label": label, "split": "test" if i % 5 == 0 else "train"}) + "\n")
    return path


def _save(module: Any, folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    module.save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<s>", *COMMON, *" ".join(WORDS.values()).split()]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    special = {"unk_token": "[UNK]", "eos_token": "[SEP]", "bos_token": "<s>", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def save_all(folder: Path) -> Path:
    """What :func:`tables` names: bert, llama, rows.jsonl."""
    save_bert(folder / "bert")
    save_llama(folder / "llama")
    texts(folder / "rows.jsonl")
    return folder


def tables(
    folder: Path,
    method: str,
    model: str = "bert",
    rounds: int = 2,
    *,
    clients: int = 3,
    lora: Mapping[str, Any] | None = None,
    local: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """An experiment of LoRA on the rows and a model of :func:`save_all`; ``keys`` are the method's."""
    task = "classification" if model == "bert" else "language_modelling"
    optimiser = {"name": "adamw", "learning_rate": 0.05, "batch_size": 8, **(local or {})}
    return {
        "data": {"path": str(folder / "rows.jsonl"), "partition": {"name": "iid", "clients": clients}},
        "model": {"name": str(folder / model), "task": task, "adaptation": {"name": "lora", "rank": 4, **(lora or {})}},
        "method": {"name": method, "rounds": rounds, "local": optimiser, **keys},
        "run": {"seed": 1, "workers": 1, **(run or {})},
    }


def save_bert(folder: Path, **shape: int) -> Path:
    """A random BERT; ``shape`` are keys of its configuration."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(7)
    return _save(BertModel(BertConfig(**_TEXT | shape, pad_token_id=0)), folder)


def save_llama(folder: Path) -> Path:
    """A random LLaMA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    special = {"pad_token_id": 0, "bos_token_id": 4, "eos_token_id": 3}
    return _save(LlamaForCausalLM(LlamaConfig(**_TEXT, **special)), folder)


def save_gpt2(folder: Path) -> Path:
    """A random GPT-2, whose attention is one fused map with transposed weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 40, "initializer_range": 0.3}
    return _save(GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=4, eos_token_id=3)), folder)
