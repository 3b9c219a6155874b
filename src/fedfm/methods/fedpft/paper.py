"""The settings of FedPFT's paper (arXiv:2402.01862, Theorem 4.1, Section 6 and the code listing)."""

from __future__ import annotations

from fedfm.core.fields import Paper

SETTINGS = {
    "method.covariance": Paper(
        "diag; under [privacy] full",
        "under [privacy] spherical: the noise on a full covariance would exceed the covariance",
    ),
    "method.components": Paper(10),
    "method.transport": Paper("float16"),
    "method.min_count": Paper(1, "the mean of very few rows almost reveals a row"),
    "method.calibration": Paper(
        "paper", "the paper's noise is several times too large; for epsilon above about 10 it is too small"
    ),
    "method.relation": Paper("replace", "replace treats counts as public; add_remove protects them, too"),
    "method.head.optimizer": Paper("adam", "newton reaches the optimum; Adam at 0.0001 stays far from it"),
    "method.head.learning_rate": Paper(1e-4),
    "privacy.delta": Paper(
        "1 / n of each class", "a delta that depends on the rows is not a guarantee, so it must be set"
    ),
}
