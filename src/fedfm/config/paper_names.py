"""Names from papers that are combinations of settings here, not methods, attacks or aggregations of that name."""

from __future__ import annotations

_FEDAVG = 'method.name = "fedavg" with '
_SETTINGS = {
    "promptfl": _FEDAVG + 'model.adaptation = { name = "prompt" }',
    "coop": _FEDAVG + 'model.adaptation = { name = "prompt" }',
    "fedit": _FEDAVG + 'model.adaptation = { name = "lora" }',
    "fedlora": _FEDAVG + 'model.adaptation = { name = "lora" }',
    "ffalora": _FEDAVG + 'model.adaptation = { name = "ffa_lora" }',
    "dora": _FEDAVG + 'model.adaptation = { name = "lora", dora = true }',
    "rslora": _FEDAVG + 'model.adaptation = { name = "lora", rslora = true }',
    "fedbuff": _FEDAVG + "run.asynchronous = { buffer = 4 }",
    "fedsgd": _FEDAVG + "method.local = { epochs = 1, batch_size = N }, N = the rows of the largest client",
    "dpfedavg": _FEDAVG + '[privacy] unit = "client"',
    "dpsgd": _FEDAVG + '[privacy] unit = "record", mechanism = "dp_sgd"',
    "dpftrl": _FEDAVG + '[privacy] mechanism = "correlated_gaussian"',
    "secagg": _FEDAVG + '[privacy] aggregator = "secagg"',
    "dualadapter": _FEDAVG + 'method.local = { name = "dual_adapter" }',
    "rfa": 'aggregation.name = "geometric_median"',
    "badnets": 'attack.name = "backdoor"',
}


def how_to_set(name: str) -> str:
    """Suffix for a message on an unknown name: the settings that a paper calls by this name, or nothing.

    Example:
        >>> how_to_set("DoRA")
        ' (here it is method.name = "fedavg" with model.adaptation = { name = "lora", dora = true })'
    """
    found = _SETTINGS.get("".join(c for c in name.lower() if c.isalnum()))
    return f" (here it is {found})" if found else ""
