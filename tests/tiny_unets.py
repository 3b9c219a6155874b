"""Functions that make small modules for masks, as a user writes them: right ones, and wrong ones."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from unet import UNet


class Small(nn.Module):
    """Logits at half of the images' size; ``form`` changes the output."""

    def __init__(self, classes, norm=nn.BatchNorm2d, form=lambda logits: logits):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, stride=2), norm(8)
        self.last = nn.Conv2d(8, classes, 1)
        self.form = form

    def forward(self, x):
        return self.form(self.last(torch.relu(self.norm(self.first(x)))))


def _sized(module, size=32):
    return {"model": module, "image_size": size}


def unet(classes):
    return _sized(UNet(classes, (4, 8)))


def odd(classes):
    return _sized(Small(classes), (33, 47))


def in_dict(classes):
    return _sized(Small(classes, form=lambda logits: {"logits": logits, "aux": logits}))


def like_torchvision(classes):
    return _sized(Small(classes, form=lambda logits: {"out": logits}))


def of_transformers(classes):
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    sizes = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 1, 2]}
    more = {"decoder_hidden_size": 16, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0}
    return _sized(SegformerForSemanticSegmentation(SegformerConfig(num_labels=classes, **sizes, **more)))


class PixelScores(nn.Module):
    """A Mask2Former with the scores of pixels as in docs/how-to/segmentation.md."""

    def __init__(self, classes):
        from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

        super().__init__()
        stages = [f"stage{i}" for i in range(1, 5)]
        swin = {"embed_dim": 8, "depths": [1] * 4, "num_heads": [1] * 4, "window_size": 2}
        backbone = SwinConfig(image_size=64, patch_size=4, out_features=stages, **swin)
        widths = dict.fromkeys(("hidden_dim", "feature_size", "mask_feature_size"), 32)
        small = {"encoder_feedforward_dim": 16, "dim_feedforward": 16, "num_attention_heads": 2, "num_queries": 5}
        layers = {"encoder_layers": 1, "decoder_layers": 2, "num_labels": classes}
        config = Mask2FormerConfig(backbone_config=backbone, **widths, **small, **layers)
        self.mask2former = Mask2FormerForUniversalSegmentation(config)

    def forward(self, images):
        found = self.mask2former(pixel_values=images)
        of_classes = found.class_queries_logits.softmax(-1)[..., :-1]
        of_pixels = found.masks_queries_logits.sigmoid()
        return torch.einsum("nqc,nqhw->nchw", of_classes, of_pixels).clamp(1e-6).log()


def mask2former(classes):
    return _sized(PixelScores(classes), 64)


def frozen(classes):
    made = UNet(classes, (4, 8))
    made.down.requires_grad_(False)
    return _sized(made)


def without_head(classes):
    return _sized(Small(classes, form=nn.GroupNorm(1, classes)))


def without_size(classes):
    return Small(classes)


def in_tuple(classes):
    return _sized(Small(classes, form=lambda logits: (logits,)))


def one_class_more(classes):
    return _sized(Small(classes + 1))


def without_pixels(classes):
    return _sized(Small(classes, form=lambda logits: logits.mean((2, 3))))


def classes_last(classes):
    return _sized(Small(classes, form=lambda logits: logits.permute(0, 2, 3, 1)))


def larger(classes):
    return _sized(Small(classes, form=lambda logits: nn.functional.interpolate(logits, scale_factor=4)))


def only_batches(classes):
    return _sized(Small(classes, form=lambda logits: logits.squeeze(0)))


def grey(classes):
    return _sized(nn.Conv2d(1, classes, 1))


def lazy(classes):
    return _sized(nn.LazyConv2d(classes, 1))


def no_module(classes):
    return "unet"


def wrong_size(classes):
    return _sized(Small(classes), "32")


def unknown_key(classes):
    return {"model": Small(classes), "size": 32}


def fails(classes):
    raise ValueError("no weights here")


def without_classes():
    return Small(2)
