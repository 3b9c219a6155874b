"""Hide whole clients: the server sees sums only, and noise makes the model differentially private for each client.

With twenty clients the noise exceeds the updates, and the accuracy says so; hundreds of clients are needed.

python examples/gallery/private_clients.py
"""

import fedfm


def main(limit: int = 400, rounds: int = 3) -> dict[str, float]:
    """Return the epsilon that the run spent, and the accuracies with and without privacy."""
    tables = {
        "data": {"name": "digits", "limit": limit, "partition": {"name": "iid", "clients": 20}},
        "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
        "method": {"name": "fedavg", "rounds": rounds},
    }
    privacy = {"unit": "client", "clip_norm": 1.0, "target_epsilon": 8.0, "delta": 1e-5}
    private, plain = fedfm.run(tables | {"privacy": privacy}), fedfm.run(tables)
    print(f"epsilon {private['epsilon']:.2f}: accuracy {private['accuracy']:.3f}; without {plain['accuracy']:.3f}")
    return {"epsilon": private["epsilon"], "private": private["accuracy"], "plain": plain["accuracy"]}


if __name__ == "__main__":
    main()
