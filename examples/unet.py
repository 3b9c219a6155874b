"""A small UNet, which examples/unet.toml names as "unet:build".

U-Net: Convolutional Networks for Biomedical Image Segmentation. Ronneberger et al. MICCAI 2015. Here with padding, so
that the output has the size of the image, and with a norm over groups.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import interpolate, max_pool2d


def stage(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions of 3 x 3."""
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images (n, 3, H, W) -> logits (n, classes, H, W)."""

    def __init__(self, classes: int, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList([stage(3, widths[0]), *(stage(a, b) for a, b in pairs)])
        self.up = nn.ModuleList(stage(a + b, a) for a, b in reversed(pairs))
        self.last = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [self.down[0](x)]
        for layer in self.down[1:]:
            kept.append(layer(max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for layer in self.up:
            skip = kept.pop()
            x = layer(torch.cat([skip, interpolate(x, size=skip.shape[-2:])], 1))  # any height and width
        return self.last(x)


def build(classes: int) -> dict[str, object]:
    """The UNet for this number of classes, and the size to which images are resized, as a number or (height, width)."""
    return {"model": UNet(classes), "image_size": 128}
