"""Predict a number exactly as if the rows were in one place: one round of sums, hidden by secure aggregation.

python examples/gallery/exact_regression.py
"""

import numpy as np

import fedfm


def rows(path: str, n: int) -> None:
    """Measurements, the price that follows from them, and the shop that has the row."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 4))
    price = 100 + x @ np.array([20.0, -10.0, 5.0, 0.0]) + rng.normal(size=n)
    split = np.where(np.arange(n) % 5 == 0, "test", "train")
    shop = np.array(["north", "south", "west"])[np.arange(n) % 3]
    np.savez(path, x=x.astype(np.float32), y=price.astype(np.float32), split=split, shop=shop)


def main(n: int = 300) -> dict[str, float]:
    """Return the mean absolute error and the share of the variance that is explained."""
    rows("prices.npz", n)
    result = fedfm.run(
        {
            "data": {"path": "prices.npz", "partition": {"name": "by_column", "column": "shop"}},
            "model": {"name": "features", "task": "regression"},
            "method": {"name": "analytic"},
            "privacy": {"aggregator": "secagg"},
        }
    )
    found = {key: result["details"][key] for key in ("mae", "r2")}
    print(f"mean absolute error {found['mae']:.2f}, R2 {found['r2']:.3f}")
    return found


if __name__ == "__main__":
    main()
