"""One round instead of twenty: FedPFT sends mixtures of features, FedAvg sends the head in each round.

python examples/gallery/one_round.py
"""

import fedfm


def main(limit: int = 600) -> dict[str, float]:
    """Return the accuracy of both methods."""
    tables = {
        "data": {
            "name": "digits",
            "limit": limit,
            "partition": {"name": "dirichlet", "alpha": 0.1, "clients": 5},
        },
        "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
    }
    once = fedfm.run(tables | {"method": {"name": "fedpft", "components": 2}})
    often = fedfm.run(tables | {"method": {"name": "fedavg", "rounds": 20}})
    for name, result in (("fedpft, 1 round", once), ("fedavg, 20 rounds", often)):
        print(f"{name:<18} accuracy {result['accuracy']:.3f}  sent up {result['bytes_up'] / 1e6:.3f} MB")
    return {"fedpft": once["accuracy"], "fedavg": often["accuracy"]}


if __name__ == "__main__":
    main()
