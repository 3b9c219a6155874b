"""Audit a run that a client has left: is its model the model of training without this client?

The run is repeated without the client, from its seed and secrets. A stored model that is not the result refutes the
certificate, even if it recognises no row.

The attack is that of :mod:`fedfm.audits.model_membership`, on the rows of the client that has left. A run made by
``fedfm leave`` says in its manifest that the client's influence is removed; a model that recognises the rows refutes
this. The attack needs the client's rows, so it is possible only as long as they are on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedfm import seeds
from fedfm.audits.finding import Finding, VerdictRule, interval, nothing
from fedfm.audits.inference.rates import NOTABLE
from fedfm.audits.member_scores import MemberScores
from fedfm.audits.model_membership import ModelMembership, attack_all, final_models
from fedfm.audits.off_cpu import distance, off_the_cpu
from fedfm.audits.replay import TOLERANCE, Replay, play
from fedfm.audits.row_evidence import unreadable
from fedfm.audits.stated_epsilon import STRICT
from fedfm.core.client import ClientId
from fedfm.errors import InputError
from fedfm.linalg.params import Params, sha256_of
from fedfm.linalg.threads import torch_threads
from fedfm.models import devices
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.population import populate
from fedfm.runtime.result_match import final_state
from fedfm.runtime.run_directory import Run

QUESTION = "Can a reader of the final model still tell which rows the client that left was trained on?"
AGAIN = "Is the final model the one that the experiment gives without the client that left?"
_STRICT = f"low at {100 * STRICT:g} %"


class Departure(ModelMembership):
    """Compares the rows of the client that left with test rows, and the final model with that of a repeated run."""

    def seconds(self, run: Run, population: Partitioned) -> float:
        return super().seconds(run, population) + float(run.manifest["result"]["seconds"])

    def reads(self, run: Run) -> bool:
        return bool(run.manifest.get("departures"))

    def why_unread(self, run: Run) -> str:
        return "no client left the run by `fedfm leave`"

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        run = replay.run
        entries = {str(entry["client"]): entry for entry in run.manifest["departures"]}
        again = made_again(replay, list(entries), notice)
        if why := unreadable(run):
            return [nothing("departure", QUESTION, f"No attack compares rows: {why}."), again]
        found = [_of_client(run, client, entry, notice) for client, entry in entries.items()]
        if len(found) > 1:  # names are unique in an audit
            found = [replace(one, name=f"departure.{of}") for one, of in zip(found, entries, strict=True)]
        return [*found, again]


def _of_client(run: Run, client: ClientId, entry: Mapping[str, Any], notice: Callable[[str], None]) -> Finding:
    """The finding of one client that left; if its rows are gone, the finding that there is nothing to compare."""
    try:
        population = with_rows(run, entry)
    except InputError as error:
        return nothing("departure", QUESTION, f"The rows of {client} are not on this machine: {error}")
    return finding(run, population, client, final_models(run, population), notice)


def made_again(replay: Replay, clients: Sequence[ClientId], notice: Callable[[str], None]) -> Finding:
    """Repeat the run without the clients; the finding is the distance of the stored model from the repeated run's.

    The manifest's hash of the model decides nothing: anyone who replaced the model could also replace the hash.
    """
    run, population = replay.run, replay.fresh()
    method, result = run.experiment.method, run.manifest["result"]
    stored = {"": method.params_for(final_state(run, method.state_type), "")}
    of, start, made, asked = result["details"].get("model_of_round", result["rounds"]), stored, stored, set[ClientId]()
    gone = " and ".join(clients)
    notice(f"making the run again without {gone}")
    try:
        with torch_threads(1), devices.restore_determinism():
            for turn in play(run, population):
                asked |= {reply.client for reply in turn.replies} & {*clients}
                model = {"": method.params_for(turn.after, "")}
                start = model if turn.round == 0 else start
                made = model if turn.round == of else made
    except InputError as error:
        return nothing("departure_rerun", AGAIN, str(error))
    apart = 0.0 if sha256_of(made) == sha256_of(stored) else distance(made, stored, start)
    least = TOLERANCE if off_the_cpu(run, population) else 0.0
    rule = VerdictRule(
        ("asked > 0", "estimate > bound"),
        (f"estimate <= {least:g}",),
        "bits differ: audit the run on its machine, with the versions in its manifest",
        {"asked": float(len(asked))},
    )
    says = f"Made again without {gone}, the run ends at a distance of {apart:.3g} of the change by training."
    if asked:
        says = f"The run's experiment still asks {' and '.join(sorted(asked))}."
    elif apart > TOLERANCE:
        says += " The stored model is not that of the certificate."
    detail = {"clients": list(clients), "same_bits": apart == 0.0, "asked": bool(asked)}
    return Finding(
        "departure_rerun", AGAIN, apart, None, None, TOLERANCE, rule, says, bool(asked) or apart > TOLERANCE, detail
    )


def with_rows(run: Run, entry: Mapping[str, Any]) -> Partitioned:
    """The population of a run together with a client that left it.

    Args:
        entry: an entry of the manifest's ``departures``.

    Raises:
        InputError: the client's rows are gone.
    """
    data, client = run.experiment.data, str(entry["client"])
    if data.clients is not None and client not in data.without:
        if not Path(entry.get("rows_at") or "").exists():
            raise InputError(f"{entry.get('rows_at')}: no such file or folder")
        data = replace(data, clients={**data.clients, client: entry["rows_at"]})
    else:
        data = replace(data, without=tuple(name for name in data.without if name != client))
    return populate(replace(run.experiment, data=data))


def finding(
    run: Run,
    population: Partitioned,
    client: ClientId,
    models: Mapping[ClientId, Params],
    notice: Callable[[str], None],
) -> Finding:
    """The finding on the model of a run that the client has left. See :func:`membership_of` for ``population``."""
    (scores,), how = membership_of(run, population, client, [models], notice)
    if scores is None:
        return nothing("departure", QUESTION, f"{client} has no training rows, or no test rows to compare them with.")
    mean, low, high = scores.interval(0.95)
    surely = scores.interval(STRICT)[1]
    rule = VerdictRule((f"{_STRICT} > bound",), ("low <= bound",)).with_numbers({_STRICT: surely})
    says = f"By {how}, a row of {client} scores above a test row with chance {mean:.3f} {interval(low, high)}; "
    detail = {"attack": how, "client": client, "members": int(scores.sizes.sum()), "strangers": scores.strangers}
    found = surely > NOTABLE
    end = "0.5 is guessing." if not found else "0.5 is guessing: the model was trained on these rows."
    return Finding("departure", QUESTION, mean, low, high, NOTABLE, rule, says + end, found, detail)


def membership_of(
    run: Run,
    population: Partitioned,
    client: ClientId,
    targets: Sequence[Mapping[ClientId, Params]],
    notice: Callable[[str], None],
) -> tuple[list[MemberScores | None], str]:
    """For each attacked model, the scores of a client's rows; None if there are too few rows. Also names the attack.

    Args:
        population: all clients with this one, and the model as it was at the start of the run.
    """
    with torch_threads(1):
        cells, how = attack_all(run, population, targets, (client,), notice)
    seed = run.experiment.run.seed

    def scores(of: Mapping[ClientId, Any]) -> MemberScores | None:
        if client not in of:
            return None
        return MemberScores(
            [of[client]], lambda level: seeds.generator(seed, "audit", "departure", str(level)), digits=6
        )

    return [scores(of) for of in cells], how
