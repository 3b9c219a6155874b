"""Who can read what, in a line for each party, from the messages that a run sent and from what its ledger states."""

from __future__ import annotations

from fedfm.reports.read import RunFiles
from fedfm.reports.text import number
from fedfm.runtime.exposure import Traffic

Reader = tuple[str, str]  # (party, what it can read)
_BY_SERVER = "by the server"  # how the ledger names a mechanism whose noise the server adds


def readers(run: RunFiles, weights: bool) -> list[Reader]:
    """What the server, the clients and those who get the model can read of a run.

    Args:
        weights: whether requests to clients have trained weights.
    """
    claim = run.guarantee
    at_clients = claim is not None and _BY_SERVER not in str(claim["mechanism"])
    up = [t for t in run.exposure.traffic if t.direction == "up"]
    server = list(
        dict.fromkeys(text for t in up if (text := _describe_reply(t, run.exposure.smallest_sum, at_clients)))
    )
    clients = ["the start model", "the shared weights of every round" if weights else "the result"]
    clients += ["other clients' messages"] * any(t.direction == "across" for t in run.exposure.traffic)
    if claim is None:
        held = "what the model remembers of single rows: no bound"
    else:
        held = (
            f"at most epsilon = {number(claim['epsilon'])}, delta = {number(claim['delta'])} about one {claim['unit']}"
        )
    return [
        ("server", "; ".join(server) or "nothing of the clients' rows"),
        ("clients", "; ".join(clients)),
        ("holders of the model", held),
    ]


def _describe_reply(t: Traffic, smallest: int | None, noisy: bool) -> str:
    """What the server reads of the replies of one handler; "" if they say nothing about rows."""
    kind, _, handler = t.handler.partition(".")
    name, noise = handler.partition("_")[2] or handler, " with noise" if noisy else ""
    if kind == "scores":
        return "each client's scores on its own test rows"
    if kind == "reveal":
        return "each client's own model"
    if kind not in ("train", "query") or not t.counted:
        return ""
    if t.form == "encrypted":
        return "ciphertexts, their sizes and times"
    if t.form == "masked":
        return f"sums{noise} over at least {smallest} clients ({name})" if smallest else f"sums{noise} ({name})"
    what = "update" if kind == "train" else "reply"
    return f"each client's {what}{noise} ({name})"
