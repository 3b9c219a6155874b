"""FedBaF: Federated Learning Aggregation Biased by a Foundation Model.

Park, Pranav, Moura, Joe-Wong. 2024. arXiv:2410.18352, Algorithm 1, lines 8 to 12.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedfm.core.capabilities import Comparable, Traits
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.core.method import Method, with_model
from fedfm.errors import RunError
from fedfm.linalg.params import Params
from fedfm.methods.fedbaf.paper import PULL, TRAINING
from fedfm.methods.fedbaf.pull import Piece, direction_distance, mix
from fedfm.methods.fedbaf.server_foundation import Around
from fedfm.methods.weight_init import WeightInit
from fedfm.privacy.noise import cover, stream

HARDENED = (
    *("none", "per_tensor", "per_coordinate", "log_uniform", "half"),
    *("first_round", "noise_once", "noise_afresh"),
)
STILL = 1e-6  # a smaller change of direction counts as none
LOG_RANGE = (0.02, 2.0)  # bounds of the secret factor with harden = "log_uniform"


@dataclass(frozen=True)
class FedBaF(Comparable, Around):
    """The server pulls each round's aggregate towards a foundation model that no client ever sees.

    The pull a_t = alpha_t tau_t depends on the change of the aggregate's direction, and on a secret random factor.
    Clients that see several rounds can compute the foundation model in spite of this factor; ``fedfm audit RUN
    --attack extraction`` shows how closely.
    """

    traits: ClassVar[Traits] = Traits(rows_by_optimiser=True, server_secrets=("alpha",), keeps_foundation=True)
    paper: ClassVar[Mapping[str, Paper]] = TRAINING | PULL

    psi: float = setting(1.0, "strength of the pull; 0 gives the base method", ge=0, finite=True)
    cap: str = setting(
        "reference",
        "limit of the numerator in line 9: its value in the first round (reference), or none (the paper)",
        choices=("reference", "none"),
    )
    harden: str = setting(
        "none",
        "protection of w_pre: none; how alpha is drawn (per_tensor, per_coordinate, log_uniform); what is mixed (half "
        "of the tensors each round, or all in the first_round only); noise on w_pre (noise_once, noise_afresh)",
        choices=HARDENED,
    )
    noise: float = setting(
        1.0, "noise_once, noise_afresh: standard deviation of the noise, in units of the RMS of w_0", gt=0, finite=True
    )

    def init(self, fed: Federation) -> Any:
        self.matching(fed)  # refuses a mismatched foundation model before the first round
        return self.base.init(fed)  # line 1: w_0 is random, never w_pre

    def step(self, fed: Federation, state: Any, t: int) -> Any:
        w_t = self.base.params_for(state, "")
        state = self.base.step(fed, state, t)  # lines 3 to 8, with the base's own server step
        w = self.base.params_for(state, "")  # w'_{t+1}
        if not self.psi or not (tau := self.tau(fed, w, w_t, t - 1)):
            return state
        pre = self.w_pre(fed, t - 1)
        return with_model(state, w, mix(w, pre, self.a(fed, pre, tau, t - 1, w)))  # line 11

    def tau(self, fed: Federation, w: Params, w_t: Params, t: int) -> float:
        """tau_t / tau_0, where tau_t = ||w'/||w'|| - w_t/||w_t|||| / sqrt(t + 1) by line 9.

        tau_0 is the value of the first round in which the direction changed. ``cap`` limits the numerator to its
        value in that round. In the paper the numerator has no limit, so it grows if local training changes the model
        strongly. One malicious client can cause this, and then w_{t+1} is pulled completely to w_pre.
        """
        length = direction_distance(w, w_t, fed.model.live())
        if not math.isfinite(length):
            raise RunError(f"round {fed.round}: the aggregate is not finite")
        if "reference" not in fed.memory:
            if length <= STILL:  # tau_0 would be 0, and the result divides by tau_0
                return 0.0
            # Only the server may read this. The server's memory is stored in private/, like the key.
            fed.memory["reference"] = {"length": length, "t": t}
        reference: dict[str, Any] = fed.memory["reference"]
        if self.cap == "reference":
            length = min(length, reference["length"])
        if self.harden == "first_round" and t != reference["t"]:
            return 0.0
        scale: float = length / reference["length"]
        return scale * math.sqrt((reference["t"] + 1) / (t + 1))

    def a(
        self, fed: Federation, pre: Mapping[str, Piece], tau: float, t: int, w: Params
    ) -> float | dict[str, float | Tensor]:
        """a_t = alpha_t tau_t with alpha_t = (psi / tau_0) U(1, 2), line 10. ``tau`` is tau_t / tau_0.

        A secret key, t and the aggregate determine the random factor. So a resumed run draws it again and discloses
        nothing new. Another aggregate gets another factor, since two aggregates with the same factor would reveal it.
        """
        key, scale = fed.secret("alpha"), self.psi * tau
        at = f"{t}\x1f{self.harden}\x1f{tau!r}\x1f{w.sha256()}"
        if self.harden == "per_tensor":
            return {name: scale * (1 + _uniform(key, at, name)) for name in pre}
        if self.harden == "half":
            chance = {name: _uniform(key, at, f"half\x1f{name}") for name in pre}
            chosen = sorted(pre, key=chance.__getitem__)[: -(-len(pre) // 2)]
            return {name: scale * (1 + _uniform(key, at, "")) for name in chosen}
        if self.harden in ("per_coordinate", "log_uniform"):
            u = {name: _uniforms(key, at, name, p.tensor) for name, p in pre.items()}
            if self.harden == "per_coordinate":
                return {name: scale * (1 + x) for name, x in u.items()}
            low, high = map(math.log, LOG_RANGE)
            return {name: scale * torch.exp(low + (high - low) * x) for name, x in u.items()}
        return scale * (1 + _uniform(key, at, ""))

    def w_pre(self, fed: Federation, t: int) -> Mapping[str, Piece]:
        """The foundation model's matched entries; ``harden`` may add noise, drawn once or in every round."""
        pieces = self.matching(fed).pieces
        if self.harden not in ("noise_once", "noise_afresh"):
            return pieces
        key, once = fed.secret("alpha"), self.harden == "noise_once"
        if once and key in self._noisy_pieces:
            return self._noisy_pieces[key]
        sigma, purpose = self.sigma(fed), self.harden if once else f"{self.harden}/{t}"
        noised = {}
        for name, (region, p) in pieces.items():
            covered = torch.from_numpy(cover(key, f"{purpose}/{name}", p.double().numpy(), sigma))
            noised[name] = Piece(region, covered.to(p.dtype))
        if once:
            self._noisy_pieces[key] = noised
        return noised

    @cached_property
    def _noisy_pieces(self) -> dict[bytes, Mapping[str, Piece]]:
        """The noisy entries for each run's key; one method object may serve several runs."""
        return {}

    def sigma(self, fed: Federation) -> float:
        """Standard deviation of the noise on each entry of w_pre, computed only from w_0, which is public."""
        live = fed.model.live()
        return self.noise * fed.initial.only(live).norm() / math.sqrt(sum(x.numel() for x in live.values()))

    def baselines(self) -> dict[str, Method[Any]]:
        """The base method without a foundation model, and the base method with that model as the start."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Around)}
        return {"no-foundation": self.base, "weight-initialisation": WeightInit(**given)}


def _uniform(key: bytes, at: str, name: str) -> float:
    """A value in [0, 1): the HMAC-SHA256 of ``at`` and ``name`` under the server's key, as a 64-bit fraction."""
    word = hmac.new(key, f"{at}\x1f{name}".encode(), hashlib.sha256).digest()[:8]
    return int.from_bytes(word, "little") / 2**64


def _uniforms(key: bytes, at: str, name: str, like: Tensor) -> Tensor:
    """One uniform float32 value for each entry of ``like``, from a ChaCha20 stream for ``at`` and ``name``."""
    words = np.frombuffer(stream(key, f"alpha/{at}/{name}", 4 * like.numel()), dtype="<u4")
    return torch.from_numpy((words >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)).view(like.shape)
