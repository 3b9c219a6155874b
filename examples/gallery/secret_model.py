"""A foundation model that its owner keeps: FedBaF pulls the clients' model towards it, and sends none of its weights.

python examples/gallery/secret_model.py
"""

import fedfm


def main(limit: int = 300, rounds: int = 3) -> dict[str, float]:
    """Return the accuracy with and without the foundation model."""
    base = {"name": "fedprox", "mu": 0.01}
    local = {"learning_rate": 0.05, "momentum": 0.9, "epochs": 2}
    tables = {
        "data": {
            "name": "digits",
            "limit": limit,
            "partition": {"name": "by_class", "classes_per_client": 2, "clients": 5},
        },
        "model": {"name": "nano-vit", "weights": "random", "adaptation": {"name": "full"}},
    }
    pulled = {"name": "fedbaf", "foundation": "nano-vit", "base": base, "rounds": rounds, "local": local}
    helped = fedfm.run(tables | {"method": pulled})
    alone = fedfm.run(tables | {"method": base | {"rounds": rounds, "local": local}})
    print(f"with the server's model {helped['accuracy']:.3f}, without it {alone['accuracy']:.3f}")
    return {"fedbaf": helped["accuracy"], "fedprox": alone["accuracy"]}


if __name__ == "__main__":
    main()
