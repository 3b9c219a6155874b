"""Compute final models and predictions: by the method if it has a role such as Predictor, else in the default way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

from torch import Tensor

from fedfm.core.capabilities import HiddenModel, Personal, Predictor, has
from fedfm.core.checks import match
from fedfm.core.client import Client
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.training import TrainsLocally

PARTS = ("test", "val")  # parts of a client's rows on which models are scored
_KNOWN: dict[type, bool] = {}


def _trains_locally(method: object) -> TypeGuard[TrainsLocally]:
    """``isinstance`` with a cache, since one call takes tens of microseconds and evaluation needs 5 per client."""
    if type(method) not in _KNOWN:
        _KNOWN[type(method)] = isinstance(method, TrainsLocally)
    return _KNOWN[type(method)]


# --- the parties' models ----------------------------------------------------------------------------------------------


def personal(method: Method[Any]) -> bool:
    """Whether each client ends with its own model, made by the method or by its client optimiser."""
    return isinstance(method, Personal) or _optimiser_keeps(method)


def keeps_parts(method: Method[Any]) -> bool:
    """Whether clients keep parts of their models, which ``params_for`` does not return."""
    return has(method, Personal, "own") or _optimiser_keeps(method)


def _optimiser_keeps(method: Method[Any]) -> bool:
    return _trains_locally(method) and method.local.personal


def seen_by(method: Method[Any], client: Client) -> Client:
    """Client half: return the client with the rows and the model that its training uses."""
    return method.view(client) if isinstance(method, HiddenModel) else client


def encode_rows(method: Method[Any], model: Model, rows: Rows) -> Rows:
    """Encode prepared rows as the rows that clients train on."""
    return method.encode(model, rows) if isinstance(method, HiddenModel) else model.encode(rows)


def own(method: Method[Any], client: Client, w: Params) -> Params:
    """Client half: return the client's own model.

    Args:
        w: the result of ``params_for`` for this client.
    """
    if has(method, Personal, "own"):
        return method.own(client, w)
    return method.local.own(client, w) if _trains_locally(method) else w


def check_own(method: Method[Any], w: Params, model: Model) -> None:
    """Check the layout of a client's own model.

    Raises:
        ClientFault: the layout differs from the model's; the fault names the first tensor that differs.
    """
    if has(method, Personal, "check_own"):
        method.check_own(w, model)
    elif _trains_locally(method):
        method.local.check_own(w, model)
    else:
        match(w, model.layout, "model")


# --- predictions ------------------------------------------------------------------------------------------------------


@contextmanager
def apply_model(method: Method[Any], model: Model, w: Params, rows: Rows) -> Iterator[Rows]:
    """A context in which the model has the parameters w; it yields the rows that the model scores."""
    if has(method, Predictor, "install"):
        with method.install(model, w, rows) as judged:
            yield judged
    elif _trains_locally(method):
        with method.local.apply(model, w, rows) as judged:
            yield judged
    else:
        model.load(w)
        yield rows


def logits(method: Method[Any], model: Model, w: Params, rows: Rows) -> Tensor:
    """Compute logits (n, C) of rows under w."""
    if has(method, Predictor, "logits"):
        return method.logits(model, w, rows)
    with apply_model(method, model, w, rows) as judged:
        return model.predict(judged)


def scores(method: Method[Any], model: Model, w: Params, rows: Rows) -> dict[str, Any]:
    """Compute metrics of w on these rows (see ``models.metrics.evaluate``)."""
    if has(method, Predictor, "logits"):
        return model.evaluate(rows, method.logits(model, w, rows))
    with apply_model(method, model, w, rows) as judged:
        return model.evaluate(judged)


def feature_transform(method: Method[Any]) -> str | None:
    """Return the name of the transform that is applied to features before the head, or None."""
    return method.feature_transform if isinstance(method, Predictor) else None
