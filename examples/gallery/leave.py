"""A client leaves: its part is taken out of the sums exactly, without training again.

python examples/gallery/leave.py
"""

import fedfm


def main(limit: int = 400) -> dict[str, float]:
    """Return the accuracy before and after client-01 has left."""
    tables = {
        "data": {
            "name": "digits",
            "limit": limit,
            "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4},
        },
        "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
        "method": {"name": "analytic"},
    }
    before = fedfm.run(tables)
    after = fedfm.leave(before["run"], "client-01")
    print(f"accuracy {before['accuracy']:.3f} before, {after['accuracy']:.3f} after; {after['how']}")
    return {"before": before["accuracy"], "after": after["accuracy"]}


if __name__ == "__main__":
    main()
