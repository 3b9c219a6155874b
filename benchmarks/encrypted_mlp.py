"""Encrypted inference of the MNIST network of the fhe-benchmarking suite: 784, 128, 64, 10, a hundred pictures.

    OMP_NUM_THREADS=1 python benchmarks/encrypted_mlp.py

The suite (github.com/fhe-benchmarking/ml-inference) has ReLUs and no interaction; its reference takes 646 s on a
processor for a hundred pictures, as its authors report. Here the activations are fitted quadratics, trained, and the
client renews ciphertexts between the layers: another protocol, and the figures are not like for like. MNIST cannot be
fetched here: the pictures are scikit-learn's handwritten digits, enlarged to 28 x 28. One core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from fedfm.encrypted.ckks import seal
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.matrices import linear
from fedfm.encrypted.ckks.refresh import DistanceLedger, Masking, least_limbs
from fedfm.encrypted.ckks.remote_refresh import RemoteRefresh, answer_refresh, encrypt_message
from fedfm.encrypted.ckks.ring import Parameters
from fedfm.encrypted.ckks.wire import Channel

PICTURES, SIDE, PARAMETERS = 100, 28, Parameters()
REFERENCE = 646.0  # seconds, as reported by the suite for its reference on a processor, without interaction
BOUND = 512.0  # largest magnitude of the hidden values; checked below


class Network(nn.Module):
    """784, 128, 64, 10 with learned quadratics a x^2 + x between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIDE * SIDE, 128), nn.Linear(128, 64), nn.Linear(64, 10)])
        self.squares = nn.Parameter(torch.full((2,), 0.1))

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        """Logits (n, 10), and the largest magnitude of a hidden value."""
        most = 0.0
        for layer, a in zip(self.layers, [*self.squares, None], strict=True):
            x = layer(x)
            most = max(most, float(x.detach().abs().max()))
            if a is not None:
                x = a * x.square() + x
                most = max(most, float(x.detach().abs().max()))
        return x, most


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training rows (n, 784) and labels, then a hundred test rows and their labels."""
    found = load_digits()
    x = torch.from_numpy(found.images / 8 - 1).float()[:, None]
    x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False).flatten(1)
    y = torch.from_numpy(found.target)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    test, train = order[:PICTURES], order[PICTURES:]
    return x[train], y[train], x[test], y[test]


def train_network(x: Tensor, y: Tensor) -> Network:
    """Adam, 30 epochs, with decay that keeps hidden values small."""
    torch.manual_seed(0)
    net = Network()
    optimiser = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=0.05)
    for _ in range(30):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(net(x[rows])[0], y[rows]).backward()
            optimiser.step()
    return net.eval()


def compute_logits(net: Network, x: Ciphertexts) -> Ciphertexts:
    """Encrypted pixels (784,) -> encrypted logits (10,)."""
    for layer, a in zip(net.layers, [*net.squares.tolist(), None], strict=True):
        assert isinstance(layer, nn.Linear)
        weight, bias = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
        x = linear(weight, x, bias)
        if a is not None:
            x = x.square() * a + x
    return x


def main() -> None:
    common.arguments(__doc__)
    train, labels, test, truth = digits()
    with threadpool_limits(1):
        net = train_network(train, labels)
        with torch.no_grad():
            clear, most = net(test)
        if most > BOUND:
            raise SystemExit(f"hidden values reach {most:.1f}, above {BOUND:g}")
        rows, goals, notes = run(net, test.double().numpy(), clear.double().numpy(), truth.numpy())
    common.emit("Encrypted MLP", [{"title": f"{PICTURES} pictures", "rows": rows}], goals, notes)


def run(net: Network, pixels: np.ndarray, clear: np.ndarray, truth: np.ndarray) -> Any:
    """Rows of the table, goals and notes."""
    seconds: dict[str, float] = {}

    def measure(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        out = call()
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        return out

    floor = least_limbs(PARAMETERS, 1000, BOUND)
    client = measure("keys", lambda: seal.ClientKeys(PARAMETERS))
    public = measure("keys", lambda: client.public())
    server = seal.ServerKeys(PARAMETERS, public, floor=floor)
    here, there = (Channel(PARAMETERS, bytes(32), bytes(16), side) for side in ("client", "server"))
    ledger = DistanceLedger()
    server.refresh = refresh = RemoteRefresh(
        Masking(BOUND, ledger),
        there,
        lambda m: measure("client: refresh", lambda: answer_refresh(client, here, m, floor)),
    )
    slots = np.zeros((pixels.shape[1], PARAMETERS.slots))
    slots[:, : len(pixels)] = pixels.T
    message = measure("client: encrypt", lambda: encrypt_message(client, here, slots))
    residues, scale = there.unpack(message, limbs=PARAMETERS.limbs, count=len(slots))
    out = measure("server", lambda: compute_logits(net, Ciphertexts(residues.view(np.uint64), scale, server)))
    seconds["server"] -= seconds["client: refresh"]
    hidden = server.ring.add(out.residues, server.zeros(len(out), out.level + 1))
    logits = measure("client: decrypt", lambda: client.decrypt(hidden, out.scale))[:, : len(pixels)].T
    total = sum(seconds.values())
    error, alike = float(np.abs(logits - clear).max()), int((logits.argmax(1) == clear.argmax(1)).sum())
    rows = [{"step": name, "s": value} for name, value in seconds.items()] + [{"step": "all", "s": total}]
    goals = [
        common.goal("seconds for a hundred pictures", total, most=60),
        common.goal("predictions as in the clear", alike, least=len(pixels)),
        common.goal("largest error of a logit", error, most=1e-2),
    ]
    notes = [
        f"Largest error of a logit {error:.1e}. Accuracy {(logits.argmax(1) == truth).mean():.2f}, in the clear "
        f"{(clear.argmax(1) == truth).mean():.2f}. {(len(message) + refresh.bytes_up + refresh.bytes_down) / 1e6:.0f} "
        f"MB crossed, {refresh.messages} refreshes ({ledger}). A ciphertext has room for {PARAMETERS.slots} pictures: "
        "as many take the same time.",
        f"The suite's reference takes {REFERENCE:.0f} s as reported, without interaction, on another machine.",
    ]
    return rows, goals, notes


if __name__ == "__main__":
    main()
