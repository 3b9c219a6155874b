"""Sentences for the manifest about the files of a run directory that must not be shared."""

from __future__ import annotations

from fedfm.privacy.spec import PrivacySpec

FILE = "private/data.json"  # the file with the exact numbers of rows; only a run with [privacy] has it
# The report removes the names of files that a run lacks, so each of these sentences begins with the names.
_KEYS = "private/ holds clients' memories and keys, if the run has any: never share it."
_OWN_MODELS = "clients/ has one model per client, which was fitted to that client's rows and discloses them in part."
_WITHOUT_PRIVACY = (
    "checkpoint/, adapter/ and metrics.jsonl reveal as much about the clients' data as the server's state (the model, "
    "sums over rows of some methods) and the per-client accuracies. If the server has read the rows, the split has the "
    "counts for every client and class, the profile coarse ranges of the values, and the fingerprint of the data shows "
    "which of several candidate data sets they are.",
    "audit.json names single training rows. If the server keeps a foundation model, audit.json gives its distance from "
    "the models that were sent; once the run is audited, report.html and dossier.html state that distance, too.",
    "weights.npz, arrays/ and the map in report.html reveal which clients have similar rows. Only methods that weigh "
    "clients against each other write them.",
)
_UNDER_PRIVACY = (
    f"private/ holds clients' memories and keys, and in {FILE} the exact numbers of rows by client and class: never "
    "share it.",
    "audit.json names single training rows; once the run is audited, report.html and dossier.html name them, too.",
)
_WITH_EPSILON = (
    "All other files are made of what the clients released, the experiment and the test rows: the ledger bounds what "
    "they reveal about a training row. It covers neither the test rows, on which accuracies are computed, nor the "
    "names of clients and classes, how long a round took, which client took part or failed, and the verdicts of audits."
)
_WITHOUT_EPSILON = (
    "All other files are made of what the clients released, the experiment and the test rows. No epsilon bounds what "
    "they reveal about a training row: secure aggregation hides the single updates, not what the trained model "
    "and its accuracies reveal."
)


def do_not_share(privacy: PrivacySpec | None, own_models: bool) -> list[str]:
    """Return the manifest's sentences about files that must not be shared.

    Args:
        privacy: the experiment's table [privacy].
        own_models: whether each client ends with its own model.
    """
    if privacy is not None:
        return [*_UNDER_PRIVACY, _WITH_EPSILON if privacy.states_epsilon else _WITHOUT_EPSILON]
    return [_KEYS, *([_OWN_MODELS] if own_models else []), *_WITHOUT_PRIVACY]
