"""The protections that ``fedfm advise`` sets side by side: each makes an experiment from the user's own.

A protection changes only what it needs: the table [privacy], and for one round and for encrypted rows also [method] and
what is trained. Everything else stays, so that an option is a complete experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedfm.api.command_registry import action
from fedfm.config.experiment import Experiment
from fedfm.core.capabilities import Private
from fedfm.core.toml_text import copy_tables

Tables = dict[str, Any]
_SECURE = {"aggregator": "secagg"}


@dataclass(frozen=True)
class PrivacyTarget:
    """What an option with noise may spend, and the norm to which it clips.

    Attributes:
        epsilon, delta: of the whole run.
        clip_norm: C, of a client's update or of a row's gradient.
    """

    epsilon: float
    delta: float
    clip_norm: float

    def table(self, unit: str, **more: Any) -> Tables:
        """A [privacy] table that spends this."""
        return {"unit": unit, "target_epsilon": self.epsilon, "delta": self.delta, **more}


@dataclass(frozen=True)
class Protection:
    """A way to protect the rows.

    Attributes:
        name: the option's name, and the stem of its file.
        what: what it does, in a line.
        change: the tables of its experiment, from those of the user's experiment without [privacy].
    """

    name: str
    what: str
    change: Callable[[Tables, Experiment, PrivacyTarget], Tables]


def _clear(tables: Tables, experiment: Experiment, spend: PrivacyTarget) -> Tables:
    return tables


def _secure_sums(tables: Tables, experiment: Experiment, spend: PrivacyTarget) -> Tables:
    return tables | {"privacy": dict(_SECURE)}


def _client_noise(tables: Tables, experiment: Experiment, spend: PrivacyTarget) -> Tables:
    return tables | {"privacy": spend.table("client", mechanism="gaussian", clip_norm=spend.clip_norm)}


def _secure_client_noise(tables: Tables, experiment: Experiment, spend: PrivacyTarget) -> Tables:
    table = spend.table("client", mechanism="distributed_gaussian", clip_norm=spend.clip_norm)
    return tables | {"privacy": _SECURE | table}


def _record_noise(tables: Tables, experiment: Experiment, spend: PrivacyTarget) -> Tables:
    own = isinstance(experiment.method, Private)
    table = spend.table("record") if own else spend.table("record", mechanism="dp_sgd", clip_norm=spend.clip_norm)
    return tables | {"privacy": table}


def _one_round_sums(tables: Tables, experiment: Experiment, spend: PrivacyTarget) -> Tables:
    return _with_head(tables) | {"method": {"name": "analytic"}, "privacy": dict(_SECURE)}


def _one_round_noise(tables: Tables, experiment: Experiment, spend: PrivacyTarget) -> Tables:
    method = {"name": "fedpft", "components": 1, "covariance": "spherical"}
    return _with_head(tables) | {"method": method, "privacy": spend.table("record")}


def _encrypted_rows(tables: Tables, experiment: Experiment, spend: PrivacyTarget) -> Tables:
    foundation = action("advise", "encrypted_rows")(experiment.model.name)
    method = {"name": "blindfed", "foundation": foundation, "rounds": experiment.method.rounds}
    return {k: v for k, v in tables.items() if k != "model"} | {"method": method, "privacy": dict(_SECURE)}


def _with_head(tables: Tables) -> Tables:
    """The tables of an experiment that trains a head on frozen features, whatever the user's experiment trains."""
    return tables | {"model": {key: value for key, value in tables["model"].items() if key != "adaptation"}}


PROTECTIONS = (
    Protection("clear", "no protection", _clear),
    Protection("secure_sums", "secure aggregation", _secure_sums),
    Protection("client_noise", "noise of the server, unit = client", _client_noise),
    Protection(
        "secure_client_noise", "secure aggregation and noise of the clients, unit = client", _secure_client_noise
    ),
    Protection("record_noise", "noise of each client, unit = record", _record_noise),
    Protection("one_round_sums", "analytic: one round of sums, secure aggregation", _one_round_sums),
    Protection("one_round_noise", "fedpft: one release with noise, unit = record", _one_round_noise),
    Protection("encrypted_rows", "blindfed: the server computes on encrypted rows", _encrypted_rows),
)


def without_protection(tables: Mapping[str, Any]) -> Tables:
    """The tables of an experiment without any protection."""
    found = copy_tables(tables)
    found.pop("privacy", None)
    if found.get("aggregation", {}).get("name") == "secure":
        del found["aggregation"]
    return found
