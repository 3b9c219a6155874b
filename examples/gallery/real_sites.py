"""The engine of real sites on one machine: a SuperLink and three SuperNodes on loopback, over TLS, with a key each.

It needs pip install "fedfm[flower]". The bits are those of a local run.

python examples/gallery/real_sites.py
"""

import fedfm


def main(limit: int = 200, rounds: int = 2) -> dict[str, str]:
    """Return the hash of the weights, by engine."""
    found = {}
    for engine in ("local", "deployment"):
        result = fedfm.run(
            {
                "data": {"name": "digits", "limit": limit, "partition": {"name": "iid", "clients": 3}},
                "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
                "method": {"name": "fedavg", "rounds": rounds},
                "run": {"engine": engine},
            }
        )
        found[engine] = result["params_sha256"]
        print(f"{engine:<11} accuracy {result['accuracy']:.3f}  weights {found[engine][:16]}")
    return found


if __name__ == "__main__":
    main()
