"""Writes a family's tiny model of random weights as a folder, with its tokenizer or picture processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zoo.families import BOTH, DECODER, ENCODER, PAIR, PICTURES, SIDE, VOCABULARY, WITH_PICTURES, Family

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<s>", "</s>"]
ANIMALS = ("fish", "bird", "ant", "cow", "dog", "cat")
_WORDS = ["good", "bad", *ANIMALS, "say", "a", "photo", "of", "dark", "light", "."]
WORDS = [*_SPECIAL, *_WORDS, *(f"w{i}" for i in range(VOCABULARY - len(_SPECIAL) - len(_WORDS)))]
# The last two stand for a space and the end of a line.
_LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789.\u0120\u010a"]
_MERGES = (("\u0120", "w"), ("g", "o"), ("go", "o"), ("goo", "d"), ("b", "a"), ("ba", "d"))
_SMALLEST = 0.03  # of a matrix, standard deviation: with smaller ones all rows have the same outputs
_CLS, _BOS = {"cls_token": "[CLS]", "sep_token": "[SEP]"}, {"bos_token": "<s>", "eos_token": "</s>"}
_ENDS: dict[str, tuple[str, str, dict[str, str]]] = {  # what the tokenizers of a kind set before and after a text
    ENCODER: ("[CLS]", "[SEP]", _CLS),
    DECODER: ("", "", _BOS),
    BOTH: ("", "</s>", _BOS),
    PAIR: ("<s>", "</s>", _BOS),
    WITH_PICTURES: ("", "", _BOS),
}


def write(family: Family, folder: Path) -> Path:
    """The folder, with the model and what prepares its rows."""
    import transformers

    from fedfm.models.quiet import quiet

    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = configuration(family)
        config.architectures = []
        auto = getattr(transformers, f"AutoModelFor{family.auto}" if family.auto else "AutoModel")
        module = auto.from_config(config)
        for parameter in module.parameters():
            if parameter.dim() > 1 and parameter.std() < _SMALLEST:
                parameter.data.normal_(0, 0.15)
        if family.kind == PICTURES and any("BatchNorm" in type(m).__name__ for m in module.modules()):
            _settle(module, side_of(config))
        module.save_pretrained(folder)
        if family.kind not in (PICTURES,):
            _save_tokenizer(family, folder)
        if family.kind in (PICTURES, PAIR):
            processor(side_of(config)).save_pretrained(folder)
    return folder


def configuration(family: Family) -> Any:
    """The family's configuration in transformers."""
    import transformers

    sizes = dict(family.sizes)
    if family.kind == BOTH and family.text is not None:
        sizes |= {"encoder": dict(family.text), "decoder": dict(family.text)}
    elif family.text is not None:
        sizes |= {"text_config": dict(family.text), "vision_config": dict(family.picture or {})}
    return getattr(transformers, family.config)(**sizes)


def tokenizer(kind: str, *, whole: bool = False) -> Any:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    places = {word: i for i, word in enumerate(WORDS)}
    fast = Tokenizer(models.WordLevel(places, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    special: dict[str, Any] = {"unk_token": "[UNK]", "pad_token": "[PAD]", "model_max_length": 64}
    first, last, names = _ENDS[kind]
    if last:
        form = " ".join(part for part in (first, "$A", last) if part)
        ends = [(token, places[token]) for token in (first, last) if token]
        fast.post_processor = processors.TemplateProcessing(single=form, special_tokens=ends)
    special |= names
    if whole:
        special["model_input_names"] = ["input_ids"]
    return PreTrainedTokenizerFast(tokenizer_object=fast, **special)


def _save_tokenizer(family: Family, folder: Path) -> None:
    """Write a tokenizer of whole words, or one of letters if transformers makes every tokenizer of this type a BPE."""
    from transformers import AutoTokenizer

    tokenizer(family.kind, whole=family.whole).save_pretrained(folder)
    of_type = AutoTokenizer.from_pretrained(folder)
    if type(of_type.backend_tokenizer.model).__name__ != "BPE":
        return
    places = {word: i for i, word in enumerate([*_SPECIAL, *_LETTERS, *("".join(pair) for pair in _MERGES)])}
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", **_ENDS[family.kind][2]}
    type(of_type)(vocab=places, merges=list(_MERGES), model_max_length=64, **special).save_pretrained(folder)


def processor(side: int) -> Any:
    """A picture processor for pictures of this size."""
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    return ViTImageProcessorPil(size={"height": side, "width": side})


def side_of(config: Any) -> int:
    """The side of the pictures that a model takes, in pixels."""
    size = getattr(config, "image_size", None)
    return int(size[0] if isinstance(size, list | tuple) else size or SIDE)


@torch.no_grad()
def _settle(module: Any, side: int) -> None:
    """Give batch norms statistics of noise: with those of a start, activations vanish or grow from block to block."""
    module.train()
    for _ in range(20):
        module(pixel_values=torch.rand(8, 3, side, side) * 2 - 1)
    module.eval()
