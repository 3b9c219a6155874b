"""The settings of FedPFT's paper (arXiv:2402.01862, Theorem 4.1, Section 6, its listing)."""

from __future__ import annotations

from fedfm.core.fields import Paper

SETTINGS = {
    "method.covariance": Paper(
        "diag; under [privacy] full", "under [privacy] spherical: the noise of a full covariance exceeds the covariance"
    ),
    "method.components": Paper(10),
    "method.transport": Paper("float16"),
    "method.min_count": Paper(1, "the mean of a few rows is nearly a row"),
    "method.calibration": Paper(
        "paper", "several times the noise that epsilon needs; too little above an epsilon of about 10"
    ),
    "method.relation": Paper("replace", "it treats counts as public; with add_remove they are private, too"),
    "method.head.optimizer": Paper("adam", "newton reaches the optimum; Adam at 0.0001 stays far from it"),
    "method.head.learning_rate": Paper(1e-4),
    "privacy.delta": Paper(
        "1 / n of each class", "a delta that depends on the rows is not a guarantee, so it must be set"
    ),
}
