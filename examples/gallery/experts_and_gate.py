"""Two experts and a gate: FedMS adapts a small CLIP to each client, and a gate mixes the common and the local expert.

python examples/gallery/experts_and_gate.py
"""

import numpy as np

import fedfm

COLOURS = {"red": (230, 30, 30), "green": (30, 230, 30), "blue": (30, 30, 230), "yellow": (220, 220, 30)}


def pictures(path: str, n: int) -> None:
    """Noisy pictures of one colour each; the classes have names, which the text encoder reads."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, len(COLOURS), n)
    x = np.array(list(COLOURS.values()))[y][:, None, None] + rng.normal(0, 60, (n, 80, 80, 3))
    split = np.where(np.arange(n) % 3 == 0, "test", "train")
    np.savez(path, x=x.clip(0, 255).astype(np.uint8), y=y, split=split, classes=np.array(list(COLOURS)))


def main(n: int = 90, rounds: tuple[int, int] = (1, 1)) -> dict[str, float]:
    """Return the mean accuracy over the clients, by method.

    Args:
        rounds: of the first stage, in which all learn one expert, and of the second, in which each learns its own.
    """
    pictures("colours.npz", n)
    local = {"name": "adamw", "learning_rate": 0.001, "batch_size": 16}
    tables = {
        "data": {"path": "colours.npz", "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 3}},
        "model": {"name": "nano-clip", "task": "zero_shot", "adaptation": {"name": "lora", "rank": 2}},
    }
    stages = {"global_rounds": rounds[0], "local_rounds": rounds[1]}
    own = fedfm.run(tables | {"method": {"name": "fedms", **stages, "local": local}})
    one = fedfm.run(tables | {"method": {"name": "fedavg", "rounds": sum(rounds), "local": local}})
    print(f"fedms {own['local_accuracy']:.3f}, one common LoRA {one['local_accuracy']:.3f}")
    return {"fedms": own["local_accuracy"], "fedavg": one["local_accuracy"]}


if __name__ == "__main__":
    main()
