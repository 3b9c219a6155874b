"""ResNets for 32x32 images.

Deep Residual Learning for Image Recognition. He, Zhang, Ren, Sun. CVPR 2016. Section 4.2: 6 n + 2 layers in three
stages of 16, 32 and 64 channels. Shortcuts have no parameters (option A): between stages they take every second pixel,
and the new channels are zero.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE_MEAN, IMAGE_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
SIZE = 32


@dataclass
class ResNetConfig:
    """The parameters of the architecture."""

    blocks: int  # in each stage
    num_labels: int
    model_type: str = "cifar_resnet"


class Block(nn.Module):
    """y = relu(x' + bn(conv(relu(bn(conv(x)))))), where x' is the shortcut of option A."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.stride, self.grow = stride, c_out - c_in

    def forward(self, x: Tensor) -> Tensor:
        """(b, C, H, W) -> (b, C', H / stride, W / stride)."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.grow:
            half = self.grow // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.grow - half))
        return F.relu(x + y)


class CifarResNet(nn.Module):
    """The network, with the keys of the usual checkpoints: conv1, bn1, layer{1,2,3}.i.{conv,bn}{1,2}, linear."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, config.blocks, 1)
        self.layer2 = _stage(16, 32, config.blocks, 2)
        self.layer3 = _stage(32, 64, config.blocks, 2)
        self.linear = nn.Linear(64, config.num_labels)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(b, 3, 32, 32) -> logits (b, C)."""
        x = F.relu(self.bn1(self.conv1(pixel_values)))  # (b, 16, 32, 32)
        x = self.layer3(self.layer2(self.layer1(x)))  # (b, 64, 8, 8)
        return self.linear(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def _stage(c_in: int, c_out: int, blocks: int, stride: int) -> nn.Sequential:
    return nn.Sequential(*(Block(c_in if i == 0 else c_out, c_out, stride if i == 0 else 1) for i in range(blocks)))


def build(state: Mapping[str, Tensor], num_labels: int, *, pretrained: bool = True) -> CifarResNet:
    """The network of a checkpoint, with a new ``linear`` for ``num_labels`` classes.

    Raises:
        KeyError: the checkpoint lacks keys of this architecture, or has other keys.
        RuntimeError: a tensor has another shape.
    """
    stages = [{int(m[1]) for k in state if (m := re.match(rf"layer{s}\.(\d+)\.", k))} for s in (1, 2, 3)]
    if not stages[0] or any(s != stages[0] for s in stages):
        first = {k.partition(".")[0] for k in state}
        wrapped = (
            f"; all its keys begin with {min(first)!r}: save the module inside that wrapper" if len(first) == 1 else ""
        )
        raise KeyError(
            "expected keys conv1, bn1, layer{1,2,3}.i.{conv,bn}{1,2}, linear, with equally many i in every layer"
            + wrapped
        )
    with torch.device("cpu"):
        net = CifarResNet(ResNetConfig(len(stages[0]), num_labels))
    if pretrained:
        own = net.state_dict()
        body = {k: v.float() for k, v in state.items() if not k.startswith("linear.")}
        wanted = {k for k in own if not k.startswith("linear.") and not k.endswith("num_batches_tracked")}
        if missing := sorted(wanted - body.keys()):
            raise KeyError(f"it lacks tensors ({len(missing)}), such as {', '.join(missing[:3])}")
        if left := sorted(body.keys() - own.keys()):
            raise KeyError(
                f"it has tensors that such a network does not have ({len(left)}), such as {', '.join(left[:3])}"
            )
        net.load_state_dict(body, strict=False)
    return net
