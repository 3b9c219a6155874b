"""Find the parties that score the models of a run, and make notices if no party does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedfm.core.capabilities import HiddenModel
from fedfm.core.metric_names import GLOBAL_ACCURACY
from fedfm.runtime.predictions import keeps_parts, personal

if TYPE_CHECKING:
    from fedfm.config.experiment import Experiment
    from fedfm.data.table import FederatedData


def why_unasked(experiment: Experiment) -> str:
    """Return the reason why no client is asked for scores on its own rows; "" if clients are asked.

    In a run that states an epsilon, no client is asked, since the ledger does not account for exact scores. If the
    server may see only sums, clients are asked only if the server needs their scores: the method has no single model,
    or the server has no test rows.
    """
    method, privacy = experiment.method, experiment.privacy
    if method.traits.hides_counts:
        return "clients hide their numbers of rows, so they are not asked for scores"
    if method.needs.model == "server" and not isinstance(method, HiddenModel):
        return "the clients of this method have no model that they could score"
    if privacy is not None and privacy.states_epsilon:
        return "under [privacy] clients are not asked for scores of their own rows, which no epsilon covers"
    if privacy is not None and not (personal(method) or judged_by_clients(experiment)):
        return f'under privacy.aggregator = "{privacy.aggregator}" clients are not asked for scores of their own rows'
    return ""


def may_reveal(experiment: Experiment) -> bool:
    """Whether the server may ask clients for the parts of their models that they keep.

    It may not where it may see only sums, or releases in the ledger: a client's own model, less the one that it
    received, can be its update.
    """
    return experiment.privacy is None and experiment.aggregation.transport.form == "plain"


def judged_by_clients(experiment: Experiment) -> bool:
    """Whether the clients score the single model of all clients, because the server cannot read test rows."""
    return experiment.method.traits.clients_judge


def scoring_notices(experiment: Experiment, server_rows: int, client_rows: int | None = None) -> list[str]:
    """Return a notice if the run cannot end with an accuracy, or with any score.

    Args:
        server_rows: number of test rows at the server.
        client_rows: number of test rows of all clients; None if silos have their own files, so the server cannot know.
    """
    if experiment.method.traits.figures_only:
        return []
    if not (why := why_unasked(experiment)):
        if client_rows == 0 and (not server_rows or judged_by_clients(experiment)):
            source = (
                "federate(test=...) takes them"
                if experiment.in_memory
                else "data.test_fraction takes some from the training rows, or the column of data.split marks test "
                'rows as "test"'
            )
            return [f"this run ends without an accuracy or a loss: there are no test rows; {source}"]
        return []
    hidden = keeps_parts(experiment.method) and not may_reveal(experiment)  # so no client's model is at the server
    if server_rows and not hidden and not judged_by_clients(experiment):
        there = f"{GLOBAL_ACCURACY} scores the clients' models on the server's test rows"
        return [f"accuracy and client_accuracy stay empty: {why}; {there}"] if personal(experiment.method) else []
    has_none = "the server has none of the clients' own models" if server_rows else "the server has no test rows"
    at_server = "scores come from test rows at the server (data.path, not data.classes), or from "
    cure = "a score comes from " if server_rows else at_server
    return [
        f"this run ends without an accuracy or a loss: {why}, and {has_none}; {cure}`fedfm predict` at a client "
        "that has labels"
    ]


def test_rows(experiment: Experiment, federated: FederatedData) -> tuple[int, int | None]:
    """Return the numbers of test rows at the server and at all clients; the latter is None if silos have own files."""
    elsewhere = experiment.silos_own_rows and experiment.run.engine in ("deployment", "folder")
    known = federated.clients and not elsewhere
    return len(federated.test), int(federated.sizes("test").sum()) if known else None
