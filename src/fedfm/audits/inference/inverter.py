"""Feature inversion: a network that computes 32 x 32 images from features, trained on the attacker's own images.

FedPFT (arXiv:2402.01862, Section 6.3 and Appendix H) uses diffusion models. This is a small decoder, so a larger attack
may disclose more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedfm.audits.inference.rates import Array
from fedfm.audits.inference.similarity import ssim

SIDE = 32
STEPS, BATCH, RATE = 500, 32, 2e-3
PROBE, PATIENCE = (
    50,
    3,
)  # steps between validations; training ends after this number of validations without a better loss
JITTER = 0.1  # noise on standardised features in training, because the targets' features differ from those in training


class Inverter:
    """A network from :func:`train`. It maps features (n, d) to images (n, 32, 32, 3) in [0, 1]."""

    def __init__(self, net: nn.Module, mean: Array, scale: Array) -> None:
        self._net, self._mean, self._scale = net, mean, scale

    def __call__(self, features: Array) -> Array:
        with torch.no_grad():
            done = [self._net(part) for part in torch.split(self._standard(features), 256)]
        return np.asarray(torch.cat(done).permute(0, 2, 3, 1).numpy())

    def _standard(self, features: Array) -> Tensor:
        return torch.from_numpy(((features - self._mean) / self._scale).astype(np.float32))


class Inverters:
    """Several inverters, whose images are averaged."""

    def __init__(self, several: Sequence[Inverter]) -> None:
        self._several = several

    def __call__(self, features: Array) -> tuple[Array, Array]:
        """Images (n, 32, 32, 3), and how far the inverters agree: the mean SSIM (n,) of every two of their images."""
        images = [inverter(features) for inverter in self._several]
        pairs = [ssim(a, b) for a, b in itertools.combinations(images, 2)]
        return np.asarray(np.mean(images, 0)), np.asarray(np.mean(pairs, 0))


def train(features: Array, pictures: Array, seed: int, steps: int = STEPS) -> Inverter:
    """Train by least squares on the attacker's pairs of features and images; a tenth of the pairs decides when to stop.

    Args:
        features: (n, d), n >= 10.
        pictures: (n, 32, 32, 3) in [0, 1].
        seed: determines the network completely.
        steps: largest number of steps of Adam.
    """
    mean, scale = features.mean(0), features.std(0) + 1e-6
    order = np.random.default_rng(seed).permutation(len(features))
    held, own = order[: max(1, len(order) // 10)], order[max(1, len(order) // 10) :]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _decoder(features.shape[1], torch.from_numpy(pictures[own].mean(0)))
        inverter = Inverter(net, mean, scale)
        x = inverter._standard(features)
        y = torch.from_numpy(pictures.astype(np.float32)).permute(0, 3, 1, 2)
        optimiser = torch.optim.Adam(net.parameters(), RATE)
        best, kept, worse = float("inf"), net.state_dict(), 0
        for step in range(steps):
            index = torch.from_numpy(own)[torch.randint(len(own), (BATCH,))]
            batch = x[index] + JITTER * torch.randn(BATCH, x.shape[1])
            optimiser.zero_grad()
            torch.autograd.backward(torch.nn.functional.mse_loss(net(batch), y[index]))
            optimiser.step()
            if (step + 1) % PROBE == 0:
                with torch.no_grad():
                    loss = float(torch.nn.functional.mse_loss(net(x[held]), y[held]))
                if loss < best:
                    best, worse, kept = loss, 0, {k: v.clone() for k, v in net.state_dict().items()}
                else:
                    worse += 1
                if worse == PATIENCE:
                    break
        net.load_state_dict(kept)
    return inverter


def _decoder(dim: int, middle: Tensor) -> nn.Module:
    """A network from (n, d) to (n, 3, 32, 32): it doubles 4 x 4 cells three times, and adds the mean image."""

    def up(a: int, b: int) -> list[nn.Module]:
        return [nn.Upsample(scale_factor=2.0), nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU()]

    last = nn.Conv2d(16, 3, 3, padding=1)
    net = nn.Sequential(
        nn.Linear(dim, 64 * 16), nn.Unflatten(1, (64, 4, 4)), nn.SiLU(), *up(64, 48), *up(48, 32), *up(32, 16), last
    )
    return _OnMean(net, middle.float().permute(2, 0, 1))


class _OnMean(nn.Module):
    """The mean image plus the network's output."""

    def __init__(self, net: nn.Module, middle: Tensor) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("middle", middle)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.middle + self.net(x)).clamp(0, 1)
        return out
