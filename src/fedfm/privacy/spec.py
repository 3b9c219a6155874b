"""The [privacy] table of an experiment."""

from __future__ import annotations

from dataclasses import dataclass

from fedfm.core import fields
from fedfm.core.fields import setting
from fedfm.errors import Faults, InputError

_MECHANISMS = ("gaussian", "distributed_gaussian", "correlated_gaussian", "dp_sgd")


@dataclass(frozen=True)
class PrivacySpec:
    """The [privacy] table: the guarantee and its mechanism."""

    aggregator: str = setting("plain", "plain, or secagg: the server sees sums only", choices=("plain", "secagg"))
    mechanism: str | None = setting(
        None,
        "gaussian, distributed_gaussian, correlated_gaussian, dp_sgd; default: the method's own, else gaussian",
        choices=_MECHANISMS,
    )
    unit: str | None = setting(None, "protected unit: client or record", choices=("record", "client"), required=True)
    target_epsilon: float | None = setting(None, "calibrate the noise to this epsilon", gt=0, finite=True)
    # Beyond these bounds accountants overflow; no practical noise is near them.
    noise_multiplier: float | None = setting(None, "sigma / clip_norm, instead of target_epsilon", ge=1e-6, le=10_000)
    delta: float | None = setting(None, "delta of (epsilon, delta)", gt=0, lt=1, required=True)
    clip_norm: float | None = setting(None, "C, bound on the norm of an update", gt=0, finite=True)
    clip_quantile: float | None = setting(
        None, "C starts at clip_norm and follows this quantile of the clients' norms, e.g. 0.5", gt=0, lt=1
    )
    clip_learning_rate: float = setting(0.2, "eta_C: how fast C follows the quantile", gt=0, finite=True)
    halt_at_epsilon: float | None = setting(None, "stop before spending more than this", gt=0, finite=True)

    @property
    def states_epsilon(self) -> bool:
        """Whether the table asks for differential privacy, not for hidden sums only."""
        return self != PrivacySpec(aggregator="secagg")

    def validate(self) -> None:
        """Check that one of epsilon and multiplier gives the noise, and that the mechanism allows ``clip_quantile``.

        Raises:
            InputError: neither or both of epsilon and multiplier are given, or ``clip_quantile`` with DP-SGD.
        """
        faults = Faults()
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            given = "give one" if self.target_epsilon is None else "both are given, drop one"
            text = f"privacy.target_epsilon or privacy.noise_multiplier: {given}"
            faults.say(text, key="privacy.target_epsilon")
        if self.clip_quantile is not None and self.mechanism == "dp_sgd":
            faults.say(
                'privacy.clip_quantile: mechanism = "dp_sgd" clips to a fixed norm; drop it',
                key="privacy.clip_quantile",
            )
        faults.refuse()


def need(value: float | None, key: str) -> float:
    """A number of the [privacy] table that the mechanism needs.

    Raises:
        InputError: the number is missing.
    """
    if value is None:
        raise InputError(f"privacy.{key} is missing: a number is expected", key=f"privacy.{key}")
    return value


def check(spec: PrivacySpec) -> None:
    """Raise an InputError for values of a [privacy] table that are out of bounds or contradict each other."""
    faults = Faults()
    with faults:
        fields.check(spec, "privacy")
    with faults:
        spec.validate()
    faults.refuse()
