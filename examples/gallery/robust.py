"""A malicious client: one of five sends its update with the sign turned and enlarged; the median withstands it.

python examples/gallery/robust.py
"""

import fedfm


def main(limit: int = 400, rounds: int = 5) -> dict[str, float]:
    """Return the accuracy under attack, by aggregation."""
    found = {}
    for rule in ("mean", "median"):
        result = fedfm.run(
            {
                "data": {"name": "digits", "limit": limit, "partition": {"name": "iid", "clients": 5}},
                "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
                "method": {"name": "fedavg", "rounds": rounds},
                "attack": {"name": "scaled_update", "fraction": 0.2, "factor": -10.0},
                "aggregation": {"name": rule},
            }
        )
        found[rule] = result["accuracy"]
        print(f"{rule:<7} accuracy under attack {found[rule]:.3f}")
    return found


if __name__ == "__main__":
    main()
