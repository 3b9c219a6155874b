"""Tiny random models of two encoders: CLIP, SigLIP, and a vision-text dual encoder of a ViT and a BERT."""

import functools
from pathlib import Path

import numpy as np
import torch

from fedfm.models.quiet import quiet

WORDS = ("a", "photo", "of", "the", "fox", "small", "dog", "bird", ".", "X", "cow")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
VISION = {**SIZES, "num_hidden_layers": 3, "image_size": 16, "patch_size": 8}
TEXT = {**SIZES, "num_hidden_layers": 2, "vocab_size": 40, "max_position_embeddings": 24, "pad_token_id": 0}


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate((*SPECIAL, *WORDS))}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    special = {"unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def built(kind):
    import transformers as t

    ends = {"bos_token_id": 2, "eos_token_id": 3}
    match kind:
        case "clip":
            return t.CLIPModel(t.CLIPConfig(vision_config=VISION, text_config={**TEXT, **ends}, projection_dim=12))
        case "siglip":
            return t.SiglipModel(t.SiglipConfig(vision_config=VISION, text_config={**TEXT, **ends}))
    two = t.ViTConfig(**VISION), t.BertConfig(**TEXT)
    config = t.VisionTextDualEncoderConfig.from_vision_text_configs(*two, projection_dim=12)
    return t.VisionTextDualEncoderModel(config)


def save(kind, folder):
    """Write one whose weights are large enough for the classes to differ; returns the folder."""
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        model = built(kind)
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.add_(0.2 * torch.randn_like(p))
            elif name == "logit_scale":
                p.fill_(1.5)
        model.save_pretrained(folder)
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folder


def pictures(path: Path) -> Path:
    """120 training and 40 test pictures of 3 classes that differ by their background, as npz."""
    rng = np.random.default_rng(0)
    y, base = rng.integers(0, 3, 160), rng.integers(0, 255, (3, 16, 16, 3))
    x = np.clip(base[y] * 0.6 + rng.integers(0, 255, (160, 16, 16, 3)) * 0.4, 0, 255).astype(np.uint8)
    split = np.array(["train"] * 120 + ["test"] * 40)
    np.savez(path, x=x, y=y, split=split, classes=np.array(["fox", "small_dog", "bird"]))
    return path


def places(folders):
    """A function that saves a tiny model of a kind once, and returns its folder; of ``tmp_path_factory``."""
    return functools.cache(lambda kind: save(kind, folders.mktemp(kind)))
