"""Rows that stay encrypted and a model that stays with its owner: BlindFed, here without the ciphertexts.

`encryption = "clear"` sends the same messages unencrypted, so that this takes seconds: the server sees all rows. With
"ckks" and pip install "fedfm[encrypted]" it sees ciphertexts, and takes some seconds a row.

python examples/gallery/double_blind.py
"""

import fedfm


def main(limit: int = 200, rounds: int = 10) -> dict[str, float]:
    """Return the accuracy before and after training."""
    result = fedfm.run(
        {
            "data": {"name": "digits", "limit": limit, "partition": {"name": "iid", "clients": 3}},
            "method": {
                "name": "blindfed",
                "foundation": "nano-vit-fhe",
                "encryption": "clear",
                "released": "class",
                "rounds": rounds,
                "local": {"learning_rate": 0.05, "epochs": 5, "batch_size": 16},
            },
        }
    )
    print(f"accuracy {result['accuracy']:.3f} after {result['rounds']} rounds")
    return {"blindfed": result["accuracy"]}


if __name__ == "__main__":
    main()
