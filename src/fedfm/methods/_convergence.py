"""Collect heads whose training did not converge, and report them as notices of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedfm.core.federation import Federation
from fedfm.training.newton import Optimum

_HEADS, _GRADIENT, _STEPS = "heads_not_converged", "head_gradient", "head_iterations"


@dataclass
class Missed:
    """The number of heads of one client or server that did not converge; their largest gradient and iteration count."""

    heads: int = 0
    gradient: float = 0.0
    iterations: int = 0

    def __call__(self, found: Optimum) -> None:
        """Count one head that did not converge."""
        self.heads += 1
        self.gradient, self.iterations = max(self.gradient, found.gradient), max(self.iterations, found.iterations)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics for the reply; empty if all heads converged."""
        if not self.heads:
            return {}
        return {_HEADS: float(self.heads), _GRADIENT: self.gradient, _STEPS: float(self.iterations)}


def tell(fed: Federation, who: str, metrics: Mapping[str, float]) -> None:
    """Add a notice if the metrics of ``who`` report heads that did not converge."""
    heads = metrics.get(_HEADS, 0.0)
    if heads > 0:
        count = "a head" if heads == 1 else f"{heads:g} heads"
        _notice(fed, f"{who}: {count}", metrics.get(_GRADIENT, 0.0), metrics.get(_STEPS, 0.0))


def tell_mean(fed: Federation) -> None:
    """Add a notice if ``fed.metrics`` reports heads that did not converge. The entries of ``fed.metrics`` are
    weighted means of the clients' metrics. Each client must have trained one head.
    """
    share = fed.metrics.get(_HEADS, 0.0)  # sum of the weights of the clients whose head did not converge
    if share > 0:
        gradient, steps = (fed.metrics.get(key, 0.0) / share for key in (_GRADIENT, _STEPS))
        _notice(fed, f"{share:.1%} of the clients' heads, by weight", gradient, steps)


def _notice(fed: Federation, what: str, gradient: float, steps: float) -> None:
    fed.notice(
        f"{what} did not converge: after {steps:g} iterations the norm of the gradient is {gradient:.1e} times its "
        "norm at zero weights; raise method.head.l2 or method.head.iterations"
    )
