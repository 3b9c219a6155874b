"""What ``fedfm advise`` asks of this wing: the foundation model with which rows could stay encrypted, and who reads."""

from __future__ import annotations

from fedfm.encrypted.protocol.foundation_check import check_place
from fedfm.errors import InputError

_STUDENTS = {"nano-vit": "nano-vit-fhe"}  # a built-in model, and its distilled student

READABLE = (
    ("server", "ciphertexts of rows, their numbers and sizes; sums of adapter updates"),
    ("clients", "disclosed activations of their own rows, masked numbers, the mean adapters; no weight of the model"),
)


def foundation_for(name: str) -> str:
    """The polynomial student with which a server computes on encrypted rows, for an experiment's model.

    Raises:
        InputError: the model is not a polynomial student, and fedfm has no student of it.
    """
    if name == "features":
        raise InputError(
            'model.name = "features": the rows left the model before the run, so no server computes it on ciphertexts; '
            "expected pictures and a vision transformer",
            key="model.name",
        )
    if (student := _STUDENTS.get(name)) is not None:
        return student
    try:
        check_place(name)
    except InputError as error:
        raise error.move("model.name") from None
    return name
