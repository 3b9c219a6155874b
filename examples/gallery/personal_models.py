"""A model for every client: two groups whose classes mean different things, found by FedBip without being told.

python examples/gallery/personal_models.py
"""

import numpy as np

import fedfm


def rows(path: str) -> None:
    """Vectors of two domains; in the second one the classes look like others."""
    rng = np.random.default_rng(0)
    centres = 1.2 * rng.normal(size=(3, 16))
    y, domain = rng.integers(0, 3, 480), rng.integers(0, 2, 480)
    x = np.where(domain[:, None], centres[[1, 2, 0]][y], centres[y]) + rng.normal(size=(480, 16))
    split = np.where(np.arange(480) % 2 == 0, "test", "train")
    names = {"classes": np.array(["a", "b", "c"]), "domain": np.array(["paper", "photo"])[domain]}
    np.savez(path, x=x.astype(np.float32), y=y, split=split, **names)


def main(rounds: int = 5) -> dict[str, float]:
    """Return the mean accuracy over the clients, by method."""
    rows("two_domains.npz")
    found = {}
    for name in ("fedbip", "fedavg", "local"):
        result = fedfm.run(
            {
                "data": {
                    "path": "two_domains.npz",
                    "partition": {"name": "by_column", "column": "domain", "clients": 8},
                },
                "model": {"name": "features"},
                "method": {"name": name, "rounds": rounds, "local": {"learning_rate": 0.1, "epochs": 2}},
            }
        )
        found[name] = result["local_accuracy"]
        print(f"{name:<7} mean accuracy of the clients {found[name]:.3f}")
    return found


if __name__ == "__main__":
    main()
