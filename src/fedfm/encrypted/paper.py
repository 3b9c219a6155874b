"""The settings in BlindFed's paper (arXiv:2502.01289, Section 3, Appendices D and E), which are for a ViT-B/16."""

from __future__ import annotations

from fedfm.core.fields import Paper

SETTINGS = {
    "method.rounds": Paper(50),
    "method.fraction": Paper(1.0),
    "method.drops": Paper(True),
    "method.rank": Paper(8),
    "method.local.batch_size": Paper(16),
    "method.local.learning_rate": Paper(0.001, "with a few hundred rows per client, 0.001 trains too slowly"),
    "method.protocol": Paper("permuted", "the relative orders show a client which states belong together"),
    "method.labels": Paper("loss_only", "a mean loss without a gradient cannot train anything"),
    "method.released": Paper(
        "all tokens", "each state that a client sees helps it to train a substitute for the model"
    ),
    "distil.epochs": Paper((0, 15, 15), "without a tame stage first, the student of a usual ViT returns NaN"),
    "distil.learning_rates": Paper(
        "0.0001 and 0.00001 for the stages states and outputs", "models of a million parameters learn faster"
    ),
    "distil.batch_size": Paper(16),
    "distil.temperature": Paper(5.0),
    "distil.polynomials": Paper("paper", "a usual ViT leaves the range in which the paper's polynomials are accurate"),
}
