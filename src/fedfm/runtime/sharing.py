"""What of a run directory must not be shared, in the sentences of its manifest."""

from __future__ import annotations

from fedfm.privacy.spec import PrivacySpec

FILE = "private/data.json"  # exact numbers of rows, of a run with [privacy]
_KEYS = "private/ holds clients' memories and keys, if the run has any: never share it."
_OWN_MODELS = "clients/ holds one model per client: each was fitted to that client's rows and tells about them."
_WITHOUT_PRIVACY = (
    "checkpoint/, adapter/ and metrics.jsonl tell about the clients' data as far as the trained model and the "
    "per-client accuracies do. Where the server has read the rows, the split in this manifest counts those of every "
    "client and class, and its fingerprint of the data decides between candidates for them.",
    "audit.json names single training rows, and says how far a foundation model that the server keeps is from what was "
    "sent; of the latter report.html and dossier.html tell, too, once the run was audited.",
    "weights.npz, arrays/ and the map in report.html, where a method weighs clients against each other, say whose rows "
    "resemble whose.",
)
_UNDER_PRIVACY = (
    f"private/ holds clients' memories and keys, and in {FILE} the exact numbers of rows by client and class: never "
    "share it.",
    "audit.json names single training rows, and report.html and dossier.html tell of them, too, once the run was "
    "audited.",
)
_WITH_EPSILON = (
    "All other files are made of what the clients released, the experiment and the test rows: what they tell of a "
    "training row is what the ledger states. It covers neither the test rows, on which accuracies are computed, nor "
    "the names of clients and classes, how long a round took, which client took part or failed, and the verdicts of "
    "audits."
)
_WITHOUT_EPSILON = (
    "All other files are made of what the clients released, the experiment and the test rows. No epsilon bounds what "
    "they tell of a training row: secure aggregation hides the single updates, not what the trained model and its "
    "accuracies tell."
)


def do_not_share(privacy: PrivacySpec | None, own_models: bool) -> list[str]:
    """The manifest's sentences on what must not be shared.

    Args:
        privacy: the experiment's table.
        own_models: whether each client ends with a model of its own.
    """
    if privacy is not None:
        return [*_UNDER_PRIVACY, _WITH_EPSILON if privacy.states_epsilon else _WITHOUT_EPSILON]
    return [_KEYS, *([_OWN_MODELS] if own_models else []), *_WITHOUT_PRIVACY]
