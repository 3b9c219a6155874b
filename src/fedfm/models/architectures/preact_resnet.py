"""Residual networks with pre-activation, for small images.

Identity Mappings in Deep Residual Networks. He, Zhang, Ren, Sun. ECCV 2016. arXiv:1603.05027, Figure 1 (b) and (eq. 2):
x_{l+1} = x_l + F(bn, relu, conv3x3, bn, relu, conv3x3). FedBaF (arXiv:2410.18352), Table 2: conv3x3, 64; sections of
two blocks of 64, 128, 256 and 512 channels; fc. Strides 1, 2, 2, 2.

The classes are registered with transformers, which loads and saves such a network like any other model:
``config.json`` has ``model_type: fedfm_preact_resnet``. A tensor's name contains its section s and its block i, e.g.
``sections.s.i.conv1.weight``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from fedfm.models.locate import PREACT_RESNET

MODEL_TYPE = PREACT_RESNET


class PreActResNetConfig(PreTrainedConfig):  # type: ignore[misc]
    """Widths and numbers of blocks of the sections; the stem has the width of the first section.

    Raises:
        ValueError: widths and blocks are not equally long lists of positive integers.
    """

    model_type = MODEL_TYPE

    def __init__(
        self,
        widths: tuple[int, ...] = (64, 128, 256, 512),
        blocks: tuple[int, ...] = (2, 2, 2, 2),
        image_size: int = 32,
        num_channels: int = 3,
        **others: Any,
    ) -> None:
        for name, value in (("widths", widths), ("blocks", blocks)):
            if not isinstance(value, (list, tuple)) or not value or any(type(v) is not int or v < 1 for v in value):
                raise ValueError(f"{name} = {value}: expected a list of positive integers, one for each section")
        if len(widths) != len(blocks):
            raise ValueError(
                f"widths = {list(widths)} and blocks = {list(blocks)}: expected one value of each for every section"
            )
        self.widths, self.blocks = list(widths), list(blocks)
        self.image_size, self.num_channels = image_size, num_channels
        super().__init__(**others)


class PreActBlock(nn.Module):
    """x + conv(relu(bn(conv(h)))), h = relu(bn(x)); if the shape changes, the shortcut is a 1x1 convolution of h."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        changes = stride != 1 or c_in != c_out
        self.shortcut = nn.Conv2d(c_in, c_out, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """(b, c_in, H, W) -> (b, c_out, H / stride, W / stride)."""
        h = F.relu(self.bn1(x))
        x = x if self.shortcut is None else self.shortcut(h)
        return x + self.conv2(F.relu(self.bn2(self.conv1(h))))  # type: ignore[no-any-return]


class PreActResNet(PreTrainedModel):  # type: ignore[misc]
    """The classifier; each section after the first halves height and width."""

    config_class = PreActResNetConfig
    main_input_name = "pixel_values"

    def __init__(self, config: PreActResNetConfig) -> None:
        super().__init__(config)
        widths = config.widths
        self.stem = nn.Conv2d(config.num_channels, widths[0], 3, 1, 1, bias=False)
        self.sections = nn.ModuleList(
            _section(c_in, c_out, n, 1 if s == 0 else 2)
            for s, (c_in, c_out, n) in enumerate(zip([widths[0], *widths], widths, config.blocks, strict=False))
        )
        self.bn = nn.BatchNorm2d(widths[-1])
        self.fc = nn.Linear(widths[-1], config.num_labels)
        self.post_init()

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **others: Any
    ) -> ImageClassifierOutputWithNoAttention:
        """(b, 3, H, W) -> ``logits`` (b, C); with ``labels`` (b,) also the mean cross-entropy ``loss``."""
        x = self.stem(pixel_values)  # (b, c, H, W)
        for section in self.sections:
            x = section(x)
        logits = self.fc(F.relu(self.bn(x)).mean(dim=(2, 3)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)

    def get_input_embeddings(self) -> nn.Module:
        return self.stem

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """He's initialisation (arXiv:1502.01852, fan out) for the convolutions, PyTorch's defaults for the rest.

        It calls only functions of ``nn.init``, because transformers makes them skip the tensors of a checkpoint.
        """
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            for name, first in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
                nn.init.constant_(getattr(module, name), first)
        elif isinstance(module, nn.Linear):
            nn.init.uniform_(module.weight, -(module.in_features**-0.5), module.in_features**-0.5)
            nn.init.uniform_(module.bias, -(module.in_features**-0.5), module.in_features**-0.5)


def _section(c_in: int, c_out: int, blocks: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *(PreActBlock(c_in if i == 0 else c_out, c_out, stride if i == 0 else 1) for i in range(blocks))
    )


AutoConfig.register(MODEL_TYPE, PreActResNetConfig, exist_ok=True)
AutoModelForImageClassification.register(PreActResNetConfig, PreActResNet, exist_ok=True)
