"""The public part of a release of moments: neighbouring relation, statistics and amount of noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedfm.core.fields import check, setting
from fedfm.errors import InputError
from fedfm.methods.fedpft.mixtures.mixture import COVARIANCES
from fedfm.privacy import gaussian
from fedfm.privacy.accountant import Spent

RELATIONS = ("add_remove", "replace", "replace_any")
CALIBRATIONS = ("analytic", "paper", "paper_client")

_LEAST_DELTA = 1e-12  # far above 1e-20, which is the probability of the cut-off tails of the noise on a value


@dataclass(frozen=True)
class Plan:
    """The public part of a release; client and server derive the same plan from the experiment.

    ===========  =======================  ========  ================================
    relation     neighbours differ in     counts    cells
    ===========  =======================  ========  ================================
    add_remove   one row more or less     noisy     all classes, also empty ones
    replace      one row, its label kept  public    the classes present
    replace_any  one row, its label too   noisy     all classes, also empty ones
    ===========  =======================  ========  ================================

    Rows have norm 1. A release of a class with n rows consists of ``a`` times n and of sums over the rows: sum x; for
    ``diag`` also sum x_j^2; for ``full`` also sum x x^T. ``spherical`` needs no second moment, since the trace of the
    covariance of unit rows is 1 - |mean|^2.

    Attributes:
        epsilon: the guarantee for one row of one client.
        delta: one value for all cells, whatever their n; delta = 1/n would guarantee nothing at n = 1.
        calibration: how the noise follows from epsilon and delta. ``analytic`` is Balle & Wang 2018. ``paper`` is
            FedPFT's Theorem 4.1 with n rows of the class; it is refused if the theorem does not hold. ``paper_client``
            takes the client's number of rows as n and guarantees nothing.
        a: weight of the count relative to the sums. The noise on the count is sigma/a.

    Raises:
        InputError: a field is outside its bounds, or the combination guarantees nothing.

    Example:
        >>> plan = Plan("add_remove", "spherical", epsilon=1.0, delta=1e-5)
        >>> round(plan.sigma(100), 4), round(plan.count_sigma, 3)
        (3.8454, 15.382)
    """

    relation: str = setting("add_remove", choices=RELATIONS)
    covariance: str = setting("spherical", choices=COVARIANCES)
    epsilon: float = setting(1.0, gt=0, finite=True)
    delta: float = setting(1e-5, ge=_LEAST_DELTA, lt=1)
    calibration: str = setting("analytic", choices=CALIBRATIONS)
    a: float = setting(0.25, gt=0, finite=True)

    def __post_init__(self) -> None:
        check(self, "")
        if self.calibration == "analytic":
            return
        if self.relation != "replace":
            raise InputError(
                f"calibration is {self.calibration!r}: Theorem 4.1 divides its noise by a public count; use relation "
                "'replace', or calibration 'analytic'"
            )
        truth = gaussian.delta_of(gaussian.paper_sigma(self.epsilon, self.delta, 1), self.sensitivity(1), self.epsilon)
        if self.calibration == "paper" and truth > self.delta:  # for epsilon above about 10
            raise InputError(
                f"the noise of Theorem 4.1 is not ({self.epsilon:g}, {self.delta:g})-private for statistics of "
                f"sensitivity {self.sensitivity(1):.4g}/n; use calibration 'analytic'"
            )

    def seconds(self, d: int) -> int:
        """Number of second moments in a cell of d features."""
        return {"spherical": 0, "diag": d, "full": d * (d + 1) // 2}[self.covariance]

    @property
    def counts_public(self) -> bool:
        """Whether the counts of every class are public, because neighbours have the same counts."""
        return self.relation == "replace"

    @property
    def sum_sensitivity(self) -> float:
        """Largest L2 distance between the sums of neighbouring data sets, over all cells of one client.

        For unit rows x and y at cosine c, |x - y|^2 = 2 - 2c and |xx^T - yy^T|^2 = 2 - 2c^2. Their sum is at most 4.5,
        at c = -1/2. The bound also holds for the diagonals of xx^T and yy^T. FedPFT's Remark E.3 has sqrt(8), and
        its theorem has sqrt(40).
        """
        second = 0.0 if self.covariance == "spherical" else 1.0
        entering = self.a**2 + 1 + second  # one row enters or leaves a cell
        if self.relation == "add_remove":
            return math.sqrt(entering)
        within = 4.5 if second else 4.0  # the row changes and its class stays
        return math.sqrt(within if self.relation == "replace" else max(within, 2 * entering))

    def sensitivity(self, n: float) -> float:
        """Sensitivity of the statistics: means of n rows under ``replace``, as in the paper, otherwise sums.

        Raises:
            InputError: n is below 1 under ``replace``.
        """
        return self.sum_sensitivity / self._rows(n)

    def sigma(self, n: float, *, client_rows: int = 0) -> float:
        """Standard deviation of the noise on the statistics of :meth:`sensitivity` for n rows of the class.

        Args:
            client_rows: the client's rows in all classes; only for ``paper_client``.

        Raises:
            InputError: n is below 1 under ``replace``, or ``client_rows`` is missing.
        """
        rows = self._rows(n)
        if self.calibration == "paper":
            return gaussian.paper_sigma(self.epsilon, self.delta, rows)
        if self.calibration == "paper_client":
            if client_rows < rows:
                raise InputError(
                    f"client_rows is {client_rows} for a class of {n:g} rows: calibration 'paper_client' needs the "
                    "client's rows in all classes"
                )
            return gaussian.paper_sigma(self.epsilon, self.delta, client_rows)
        return self.sensitivity(n) * gaussian.sigma_for(self.epsilon, self.delta)

    def sum_sigma(self, n: float, *, client_rows: int = 0) -> float:
        """Standard deviation of the noise on the sums; arguments and errors as for :meth:`sigma`."""
        return self.sigma(n, client_rows=client_rows) * self._rows(n)

    @property
    def count_sigma(self) -> float:
        """Standard deviation of the noise on the count; 0 if counts are public."""
        return 0.0 if self.counts_public else self.sum_sigma(1) / self.a

    @property
    def epsilon_spent(self) -> float:
        """The epsilon that a row truly spends: less than ``epsilon`` under ``paper``, infinite under
        ``paper_client``.
        """
        if self.calibration == "analytic":
            return self.epsilon
        if self.calibration == "paper":
            return gaussian.epsilon_of(self.sigma(1), self.sensitivity(1), self.delta)
        return math.inf

    def ledger_line(self, n: float = 1, *, client_rows: int = 0) -> Spent:
        """The ledger's line for a client whose smallest released class has n rows.

        For ``paper_client``, epsilon is what this client truly spends, which depends on its data. For the other
        calibrations, epsilon does not depend on n. Raises as :meth:`sigma`.
        """
        sigma, note = self.sigma(n, client_rows=client_rows), ""
        epsilon = self.epsilon_spent
        if self.calibration == "paper_client":
            epsilon = gaussian.epsilon_of(sigma, self.sensitivity(n), self.delta)
            note = (
                f"computes its noise for epsilon = {self.epsilon:g} and the client's {client_rows} rows, but a class "
                f"has {n:g}, so there is no guarantee"
            )
        elif self.counts_public:
            note = "the counts of the classes are public, and so are the classes of each client"
        return Spent(
            mechanism=f"Gaussian, {self.calibration}",
            unit="record",
            relation=self.relation,
            epsilon=epsilon,
            delta=self.delta,
            sensitivity=self.sensitivity(n),
            sigma=sigma,
            composition="parallel over the cells of one client; a record at several clients spends at each of them",
            note=note,
        )

    def _rows(self, n: float) -> float:
        if not self.counts_public:
            return 1.0
        if n < 1:
            raise InputError(
                f"a class of {n:g} rows has no mean to release under relation 'replace': leave that class out"
            )
        return float(n)


def too_noisy(plan: Plan, d: int, n: float, *, client_rows: int = 0) -> str | None:
    """A warning if sigma_mu sqrt(d) > 1: then the noise on a class's mean is longer than the mean can be; else None.

    With d = 192 features and epsilon = 1 the noise is longer up to n = 103 rows of the class under ``replace``, and up
    to 53 under ``add_remove``. ``client_rows`` and the errors are those of :meth:`Plan.sigma`.
    """
    if n <= 0:
        return None  # an empty cell has no mean
    length = plan.sum_sigma(n, client_rows=client_rows) * math.sqrt(d) / n
    if length <= 1:
        return None
    more = " use" if plan.calibration == "paper_client" else f" the class needs {math.floor(n * length) + 1} rows or"
    pooled = ", or one noisy sum over the federation (pooled = true)" if plan.calibration == "analytic" else ""
    return (
        f"the noise on the mean of a class of {n:g} rows has length {length:.2g} in {d} features, but a mean has "
        f"at most length 1:{more} a larger epsilon{pooled}"
    )
