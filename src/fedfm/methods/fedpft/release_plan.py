"""What is public about a release of moments: who counts as a neighbour, which statistics, how much noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedfm.errors import InputError
from fedfm.privacy import gaussian
from fedfm.privacy.accountant import Spent

RELATIONS = ("add_remove", "replace", "replace_any")
COVARIANCES = ("spherical", "diag", "full")
CALIBRATIONS = ("analytic", "paper", "paper_client")

_LEAST_DELTA = 1e-12  # the tails of the noise are cut at mass 1e-20 a number: what is promised must be far above it


@dataclass(frozen=True)
class Plan:
    """The public half of a release; client and server make the same one from the experiment.

    ===========  ==============================  ========================  ===============================
    relation     neighbours differ in            who may know the counts   cells
    ===========  ==============================  ========================  ===============================
    add_remove   one row more or less            nobody: they are noisy    all classes, empty ones as well
    replace      one row, its label kept         everybody                 the classes present
    replace_any  one row, its label too          nobody: they are noisy    all classes, empty ones as well
    ===========  ==============================  ========================  ===============================

    Rows have norm 1. Released are sums over one class's rows: a n and sum x; for ``diag`` also sum x_j^2, for ``full``
    also sum x x^T. ``spherical`` needs no second moment: the trace of the covariance of unit rows is 1 - |mean|^2.

    Attributes:
        relation: which data sets are neighbours.
        covariance: ``spherical``, ``diag`` or ``full``.
        epsilon: promised for one row of one client.
        delta: the same for all cells, whatever their size: delta = 1/n promises nothing at n = 1.
        calibration: ``analytic`` (Balle & Wang 2018); ``paper``, FedPFT's Theorem 4.1 with the rows of the class,
            refused where it does not hold; ``paper_client``, with the client's rows, which promises nothing.
        a: weight of the count beside the sums; its noise is sigma/a.
        iterations: releases of the same rows, 1 but for DP-EM; the noise grows with its square root.

    Raises:
        InputError: a field is not one of its values, or the combination promises nothing.

    Example:
        >>> plan = Plan("add_remove", "spherical", epsilon=1.0, delta=1e-5)
        >>> round(plan.sigma(100), 4), round(plan.count_sigma, 3)
        (3.8454, 15.382)
    """

    relation: str = "add_remove"
    covariance: str = "spherical"
    epsilon: float = 1.0
    delta: float = 1e-5
    calibration: str = "analytic"
    a: float = 0.25
    iterations: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("relation", RELATIONS), ("covariance", COVARIANCES), ("calibration", CALIBRATIONS)):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        gaussian.sigma_for(self.epsilon, max(self.delta, _LEAST_DELTA))
        if self.delta < _LEAST_DELTA:
            raise InputError(
                f"delta is {self.delta}; it must be at least {_LEAST_DELTA:g}, as the tails of the noise are cut"
            )
        if not 0 < self.a < math.inf:
            raise InputError(f"a is {self.a}; the weight of the count must be above 0, e.g. 0.25")
        if self.iterations < 1:
            raise InputError(f"iterations is {self.iterations}; it must be at least 1")
        if self.calibration == "analytic":
            return
        if self.relation != "replace" or self.iterations > 1:
            raise InputError(
                f"calibration is {self.calibration!r}: Theorem 4.1 divides its noise by a public count and is for one "
                "release; use relation 'replace' with K = 1, or calibration 'analytic'"
            )
        if self.calibration == "paper" and not gaussian.paper_holds(self.epsilon, self.delta, 1, self.sensitivity(1)):
            raise InputError(
                f"the noise of Theorem 4.1 is not ({self.epsilon:g}, {self.delta:g})-private for statistics of "
                f"sensitivity {self.sensitivity(1):.4g}/n; use calibration 'analytic'"
            )

    def seconds(self, d: int) -> int:
        """How many second moments a cell of d features carries."""
        return {"spherical": 0, "diag": d, "full": d * (d + 1) // 2}[self.covariance]

    @property
    def counts_public(self) -> bool:
        """Whether the relation leaves the count of every class as it is."""
        return self.relation == "replace"

    @property
    def sum_sensitivity(self) -> float:
        """Largest L2 distance between the sums of neighbours, over all cells of one client, in one iteration.

        Of unit rows x and y at cosine c, |x - y|^2 = 2 - 2c and |xx^T - yy^T|^2 = 2 - 2c^2. Their sum is largest,
        4.5, at c = -1/2 and for the diagonals of xx^T and yy^T as well. FedPFT's Remark E.3 has sqrt(8), its theorem
        sqrt(40).
        """
        second = 0.0 if self.covariance == "spherical" else 1.0
        if self.relation == "add_remove":
            return math.sqrt(self.a**2 + 1 + second)
        within = 4.5 if second else 4.0  # the row changes and its class stays
        if self.relation == "replace":
            return math.sqrt(within)
        return math.sqrt(max(within, 2 * (self.a**2 + 1 + second)))  # or it leaves one cell and enters another

    def sensitivity(self, n: float) -> float:
        """Of what the paper releases: the means of n rows under ``replace``, else the sums, whatever n.

        Raises:
            InputError: n is below 1 under ``replace``.
        """
        return self.sum_sensitivity / self._rows(n)

    def sigma(self, n: float, *, client_rows: int = 0) -> float:
        """Standard deviation of the noise on the statistics of :meth:`sensitivity`.

        Args:
            n: rows of the class.
            client_rows: rows of the client in all classes; for ``paper_client`` only.

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
        return self.sensitivity(n) * math.sqrt(self.iterations) * gaussian.sigma_for(self.epsilon, self.delta)

    def sum_sigma(self, n: float, *, client_rows: int = 0) -> float:
        """Standard deviation of the noise on the sums; arguments and errors as :meth:`sigma`."""
        return self.sigma(n, client_rows=client_rows) * self._rows(n)

    @property
    def count_sigma(self) -> float:
        """Standard deviation of the noise on the count; 0 where counts are public."""
        return 0.0 if self.counts_public else self.sum_sigma(1) / self.a

    @property
    def epsilon_spent(self) -> float:
        """What a row of one client truly spends: less than ``epsilon`` for ``paper``, infinite for ``paper_client``."""
        if self.calibration == "analytic":
            return self.epsilon
        if self.calibration == "paper":
            return gaussian.epsilon_of(self.sigma(1), self.sensitivity(1), self.delta)
        return math.inf

    def spent(self, n: float = 1, *, client_rows: int = 0) -> Spent:
        """The line of the ledger, for the client whose smallest released class has n rows.

        For ``paper_client`` it carries the epsilon that this client truly spends, which its data decide; for the
        others n does not matter to epsilon.

        Raises:
            InputError: as :meth:`sigma`.
        """
        sigma, note = self.sigma(n, client_rows=client_rows), ""
        epsilon = self.epsilon_spent
        if self.calibration == "paper_client":
            epsilon = gaussian.epsilon_of(sigma, self.sensitivity(n), self.delta)
            note = f"claims {self.epsilon:g} with the client's {client_rows} rows; a class has {n:g}: no guarantee"
        elif self.counts_public:
            note = "the count of each class, and so which classes a client has, is public"
        return Spent(
            mechanism=f"Gaussian, {self.calibration}",
            unit="record",
            relation=self.relation,
            epsilon=epsilon,
            delta=self.delta,
            sensitivity=self.sensitivity(n) * math.sqrt(self.iterations),
            sigma=sigma,
            composition=(
                ("" if self.iterations == 1 else f"{self.iterations} adaptive iterations, exact; ")
                + "parallel over the cells of one client; a record at several clients spends at each"
            ),
            note=note,
        )

    def _rows(self, n: float) -> float:
        if not self.counts_public:
            return 1.0
        if n < 1:
            raise InputError(f"a class of {n:g} rows has no mean to release under relation 'replace': leave it out")
        return float(n)


def too_noisy(plan: Plan, d: int, n: float, *, client_rows: int = 0) -> str | None:
    """A warning where the noise on a class's mean is longer than the mean can be: sigma_mu sqrt(d) > 1; else None.

    With d = 192 and epsilon = 1 that is 103 rows and below under ``replace``, 53 under ``add_remove``.

    Args:
        plan: of the release.
        d: features.
        n: rows of the class.
        client_rows: for ``paper_client`` only.

    Raises:
        InputError: as :meth:`Plan.sigma`.
    """
    if n <= 0:
        return None  # an empty cell has no mean to lose
    length = plan.sum_sigma(n, client_rows=client_rows) * math.sqrt(d) / n
    if length <= 1:
        return None
    more = "" if plan.calibration == "paper_client" else f" it needs {math.floor(n * length) + 1} rows,"
    return (
        f"the noise on the mean of a class of {n:g} rows has length {length:.2g} in {d} features, where a mean is at "
        f"most 1:{more} a larger epsilon, or one noisy sum over the federation"
    )
