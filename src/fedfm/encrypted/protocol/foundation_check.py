"""Check that the server's foundation model in BlindFed is a polynomial student."""

from __future__ import annotations

import json
from pathlib import Path

from fedfm.encrypted.student.conversion import KEY, fold, is_polynomial_student
from fedfm.errors import InputError, reason_of
from fedfm.models.adapters.side_adapter import SideModel
from fedfm.models.adapters.side_texts import text_places
from fedfm.models.locate import locate
from fedfm.models.model import Model


def check(model: Model, name: str) -> SideModel:
    """Return the server's model with side adapters, if it is a polynomial student.

    Raises:
        InputError: the model is not a polynomial student, or cannot compute on encrypted rows; the error states why.
    """
    if not isinstance(model, SideModel) or model.backbone is None or not is_polynomial_student(model.backbone.module):
        raise _refusal(name)
    try:
        fold(model.backbone.module)
    except InputError as error:
        raise InputError(f'method.foundation = "{name}": {error}', key="method.foundation") from None
    return model


def check_protocol(model: SideModel, protocol: str) -> None:
    """Refuse texts in the protocol "permuted", which has no mask of their places.

    Raises:
        InputError: the student reads texts.
    """
    if protocol == "permuted" and text_places(model.frozen_parts[0].module):
        raise InputError(
            'method.protocol = "permuted" takes images; texts need protocol = "masked"', key="method.protocol"
        )


def check_place(name: str) -> None:
    """Check a model's name, and the configuration of a folder, without loading it.

    Raises:
        InputError: there is no such model, or the model is not a polynomial student.
    """
    try:
        place = locate(name)
    except InputError as error:
        raise error.move("method.foundation") from None
    if not isinstance(place, Path):
        return  # a model on the hub: `check` examines it when it is loaded
    try:
        config = json.loads((place / "config.json").read_text(encoding="utf-8")) if place.is_dir() else {}
    except (OSError, ValueError) as error:
        raise InputError(
            f"method.foundation: {place}/config.json cannot be read: {reason_of(error)}", key="method.foundation"
        ) from None
    if KEY not in config:
        raise _refusal(name)


def _refusal(name: str) -> InputError:
    return InputError(
        f'method.foundation = "{name}": its functions are not polynomials, so it cannot compute on encrypted rows; '
        'expected "nano-vit-fhe", or a folder that `fedfm distil` made from the named model',
        key="method.foundation",
    )
