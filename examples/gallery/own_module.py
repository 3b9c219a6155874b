"""A module of your own: three clients with rows of their own, in memory, train it together.

python examples/gallery/own_module.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedfm


def rows(n: int, shift: float, seed: int) -> TensorDataset:
    """Points and the quadrant they lie in; each client sees another part of the plane."""
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed)) + shift
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def main(n: int = 120, rounds: int = 10) -> dict[str, float]:
    """Return the accuracy on rows from the whole plane."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    clients = {name: rows(n, shift, i) for i, (name, shift) in enumerate({"a": -1.0, "b": 0.0, "c": 1.0}.items())}
    local = {"learning_rate": 0.1, "epochs": 2}
    test, loss = rows(400, 0.0, 9), nn.functional.cross_entropy
    result = fedfm.federate(module, clients=clients, test=test, loss=loss, rounds=rounds, local=local)
    print(f"accuracy {result['accuracy']:.3f}; the module has the trained weights")
    return {"accuracy": result["accuracy"]}


if __name__ == "__main__":
    main()
