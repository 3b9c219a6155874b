"""Choose the mechanism that gives the guarantee of a [privacy] table, and refuse secure aggregation where it fails."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

from fedfm.aggregation import private
from fedfm.aggregation._record_shares import sharing
from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.mean import Mean
from fedfm.aggregation.secure import Secure
from fedfm.config import dp_sgd
from fedfm.config.parts import ExperimentParts
from fedfm.config.registry import name_of
from fedfm.core.capabilities import Personal, Private
from fedfm.core.method import Method
from fedfm.errors import Faults, InputError, quote_names
from fedfm.privacy import composition
from fedfm.privacy.spec import PrivacySpec
from fedfm.training import TrainsLocally

M = TypeVar("M", bound=Private)


def protect(method: M, privacy: PrivacySpec) -> M:
    """The method with its own mechanism set up as the [privacy] table asks.

    Raises:
        InputError: the method's mechanism cannot give this guarantee.
    """
    faults = Faults()
    for key in ("noise_multiplier", "clip_norm", "clip_quantile", "halt_at_epsilon"):
        if getattr(privacy, key) is not None:
            faults.say(f"privacy.{key}: the method's own mechanism does not take it; drop it", key=f"privacy.{key}")
    faults.refuse()
    return method.protect(privacy)


def guarantee(method: Method[Any], aggregation: Aggregator, privacy: PrivacySpec) -> tuple[Method[Any], Aggregator]:
    """Method and aggregation under a [privacy] table that states an epsilon. One of the two gets the mechanism.

    Raises:
        InputError: no mechanism gives this guarantee.
        MissingExtra: the library that counts epsilon is not installed.
    """
    if isinstance(method, Private):
        method = protect(method, privacy)
        return method, sharing(aggregation, method)
    composition.check_library()
    if privacy.mechanism == "dp_sgd":
        return method, dp_sgd.under(method, aggregation, privacy)
    _check_method(method)
    return method, private.under(aggregation, method, privacy)


def _check_method(method: Method[Any]) -> None:
    where = 'privacy.unit = "client":'
    if asks := _readable(method):
        raise InputError(
            f"{where} the server looks at replies of single clients ({quote_names(asks)}), and the noise is on means",
            key="privacy.unit",
        )
    if not method.means:
        raise InputError(
            f"{where} this method sends no update that noise could hide; drop [privacy]", key="privacy.unit"
        )
    if isinstance(method, Personal) or (isinstance(method, TrainsLocally) and method.local.personal):
        raise InputError(f"{where} every client ends with its own model, and the noise is on means", key="privacy.unit")


def _readable(method: Method[Any]) -> list[str]:
    """The method's client halves whose single replies the server can read."""
    return [name for name in method.asks if name not in method.traits.sealed_replies]


def hide_updates(aggregation: Aggregator) -> Aggregator:
    """The aggregation under ``privacy.aggregator = "secagg"``.

    Raises:
        InputError: the aggregation is a robust rule.
    """
    if isinstance(aggregation, Secure):
        return aggregation
    if type(aggregation) is not Mean:
        raise InputError(
            'privacy.aggregator = "secagg": a robust rule compares single updates, and secure aggregation hides them; '
            f'drop it or "{name_of("aggregation", aggregation)}"',
            key="privacy.aggregator",
        )
    return Secure()


def check_hidden(e: ExperimentParts, method: str) -> None:
    """Refuse secure aggregation where no mean is taken, or where the server looks at single replies.

    Raises:
        InputError: the message names the key and a valid value.
    """
    if not isinstance(e.aggregation, Secure):
        return
    key, value = ("privacy.aggregator", "secagg") if e.privacy is not None else ("aggregation.name", "secure")
    where = f'{key} = "{value}":'
    bare = e.method
    if isinstance(bare, Private) and e.privacy and None not in (e.privacy.target_epsilon, e.privacy.delta):
        with contextlib.suppress(InputError):  # under [privacy] a method may use a mean in place of single replies
            bare = protect(bare, e.privacy)
    if asks := _readable(bare):
        raise InputError(
            f'{where} the server of {method} looks at single replies ({" and ".join(asks)}); expected "plain"', key=key
        )
    if not bare.means:
        raise InputError(f"{where} {method} sends no update that could be hidden; drop it", key=key)
