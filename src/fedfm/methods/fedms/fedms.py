"""FedMS: Federated Learning with Mixture of Sparsely Activated Foundations Models.

Wu, Li, Wang, Wang. 2023. arXiv:2312.15926, equations 1 to 7, Figure 2 and Section 3; no Algorithm is printed.

Stage one trains LoRA in both encoders of a CLIP-like model by federated averaging (equation 1). In stage two this
global expert W_g is frozen, every client trains a local expert W_i that it never sends (equation 2), and the gate
adapter Z is averaged (equations 3, 6, 7). If the paper omits something or an equation has no meaning, docstrings and
settings describe the choice made here.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedfm.core.capabilities import Comparable, Joinable, Judge, Needs, Personal, Predictor, Traits
from fedfm.core.checks import match
from fedfm.core.client import Client, ClientId, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.errors import E_FIELD, E_LOST, E_NONFINITE, ClientFault, InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedms.activation import next_k, split, with_rows
from fedfm.methods.fedms.gate import LAST, TRUNK, Gating
from fedfm.methods.fedms.in_code import mixture_code
from fedfm.methods.fedms.local_pass import local_pass
from fedfm.methods.fedms.mixture import check_mixture, is_mixture, mixture_logits
from fedfm.methods.fedms.paper import SETTINGS
from fedfm.models.adapters.pair_names import GATE, GLOBAL, LOCAL
from fedfm.models.dual_encoder import DualModel, active_layers, image_trunk, need, trunk_paths
from fedfm.models.layers import layers
from fedfm.models.model import Model
from fedfm.training import AdamW, Local

LEAST_LOSS = 1e-3  # with gate_weights = "inverse_loss", smaller losses are replaced by this one
NOTHING = Params({})


@dataclass(frozen=True)
class MSState:
    """Server state.

    Attributes:
        W_g: the global expert, LoRA of both encoders.
        Z_g: the gate adapter.
        k: number of active layers at each client that has a local expert.
        has: clients that got W_g after stage one and have answered since then.
        deciding: for each client in ``k``, the number of rows whose accuracy decides when a layer is unfrozen.
        frozen: number of parameters of the foundation model.
    """

    W_g: Params
    Z_g: Params
    k: dict[ClientId, int]
    has: dict[ClientId, bool]
    deciding: dict[ClientId, int]
    frozen: int


@dataclass(frozen=True)
class Activity:
    """A client's report on its round: k, the number of deciding rows, and the seconds that its backward passes took."""

    k: int
    rows: int
    backward: float


def check_activity(found: Activity, deepest: int) -> None:
    """Refuse a report that no client of a model with encoders of ``deepest`` layers can give.

    Raises:
        ClientFault: E_FIELD.
    """
    if not 1 <= found.k <= deepest or found.rows < 0 or found.backward < 0:
        raise ClientFault(
            E_FIELD, f"{found.k} of {deepest} layers, {found.rows} rows, {found.backward} s: no client has it"
        )


@dataclass(frozen=True)
class FedMS(Personal, Predictor, Joinable, Comparable, Method[MSState]):
    """A federated gate mixes a global and a local LoRA expert of a CLIP-like model.

    Layers of the local expert are unfrozen one by one, when the accuracy stalls.
    """

    needs: ClassVar[Needs] = Needs(adaptations=("lora",), tasks=("zero_shot",))
    means: ClassVar[tuple[str, ...]] = ("train", "adapt")
    asks: ClassVar[tuple[str, ...]] = ("activity",)
    figures: ClassVar[tuple[str, ...]] = (
        "active_layers",
        "trainable",
        "trainable_mean",
        "deciding_rows",
        "backward_seconds",
    )
    paper: ClassVar[Mapping[str, Paper]] = SETTINGS

    global_rounds: int = setting(25, "stage one: rounds of the global expert", ge=0)
    local_rounds: int = setting(25, "stage two: rounds of the local experts and the gate", ge=0)
    fraction: float = setting(1.0, "the fraction of clients that a round asks", gt=0, le=1)
    weighting: str = setting(
        "uniform", "weights of stage one's mean: uniform (equation 1) or size", choices=("uniform", "size")
    )
    queue: int = setting(5, "Q, length of the capability queue of accuracies", ge=1)
    threshold: float = setting(0.01, "delta: a smaller gain in accuracy unfreezes a layer (equation 5)", finite=True)
    reset: bool = setting(False, "empty the queue when a layer is unfrozen")
    accuracy_of: str = setting(
        "mixture", "model whose accuracy fills the queue: mixture or local expert", choices=("mixture", "local")
    )
    gate: str = setting(
        "adapter",
        "trained part of the gate: adapter, last (its last layer) or all (also an image block)",
        choices=("adapter", "last", "all"),
    )
    gate_backbone: str = setting(
        "",
        "an image classifier, by name or folder, whose frozen features the gate reads instead of the global expert's",
        metadata={"client_model": True},
    )
    gate_weights: str = setting(
        "loss",
        "a_i of equation 7: loss, size, inverse_loss or uniform",
        choices=("loss", "size", "inverse_loss", "uniform"),
    )
    share: float | None = setting(None, "a fixed lambda for every row, instead of a gate", ge=0, le=1)
    objective: str = setting(
        "separate",
        "losses of stage two: separate (the gate minimises the mixture's loss, and the expert minimises its own) or "
        "joint (both minimise the mixture's loss)",
        choices=("separate", "joint"),
    )
    local: Local = setting(AdamW(learning_rate=2e-4, weight_decay=0.05, decay_of="all"), "client optimiser: E, B, eta")

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """The number of rounds of both stages."""
        return self.global_rounds + self.local_rounds

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """The result is complete after the first round of stage two. Before, clients have no expert and no gate."""
        return Traits(complete_from=self.global_rounds + 1 if self.local_rounds else 0)

    def init(self, fed: Federation) -> MSState:
        Z = self.gating.initial(need(fed.model), fed.seed)
        if self.gate == "all":
            Z = Params(dict(Z) | {f"{TRUNK}{n}": t for n, t in image_trunk(fed.model).items()})
        total = sum(p.numel() for p in fed.model.module.parameters())
        return MSState(fed.initial, Z, {}, {}, {}, total - sum(fed.initial.layout.sizes.values()))

    def step(self, fed: Federation, s: MSState, t: int) -> MSState:
        cohort = fed.sample(self.fraction)
        if t <= self.global_rounds:
            return dataclasses.replace(s, W_g=s.W_g + fed.mean(self.train, of=cohort, w=s.W_g))  # equation 1
        if t == self.global_rounds + 1 and self.queue >= self.local_rounds - 1:
            fed.notice(
                f"method.queue = {self.queue}: local_rounds = {self.local_rounds} are too few to fill the queue; every "
                "client trains its top layer only"
            )
        Z_g = self.gating.travelling(s.Z_g)
        experts = Params.join(**{GLOBAL: s.W_g, GATE: s.Z_g})
        start = each({i: NOTHING if i in s.has else experts for i in cohort})
        Z = Z_g + fed.mean(self.adapt, of=cohort, like=Z_g.layout, Z_g=Z_g, start=start)  # equation 7
        out = {e.client for e in fed.excluded if e.round == t}
        check = partial(check_activity, deepest=max(map(len, need(fed.model).parts.encoders)))
        asked = [i for i in cohort if i not in out]
        activities: dict[ClientId, Activity] = fed.ask(self.activity, of=asked, least=0, check=check)
        for i in sorted(activities.keys() & s.k.keys() - s.has.keys()):
            fed.notice(f"{i} has lost its local expert: it starts again from the global one")
        fed.metrics |= self.effort(need(fed.model), s, list(activities.values()))
        return MSState(
            s.W_g,
            s.Z_g.replace(Z),
            s.k | {i: a.k for i, a in activities.items()},
            dict.fromkeys(sorted((s.has.keys() | set(cohort)) - out), True),
            s.deciding | {i: a.rows for i, a in activities.items()},
            s.frozen,
        )

    # --- stage one ----------------------------------------------------------------------------------------------------
    @on_client
    def train(self, client: Client, w: Params) -> Update:
        """Train LoRA of both encoders from W_g, without the rows that later decide when a layer is unfrozen."""
        rows, _ = split(client)
        W_i = self.local(with_rows(client, rows), w)
        return Update(W_i - w, len(rows) if self.weighting == "size" else 1, client.metrics)

    # --- stage two ----------------------------------------------------------------------------------------------------
    @on_client(varying=("start",))
    def adapt(self, client: Client, Z_g: Params, start: Params) -> Update:
        """Decide whether to unfreeze a layer, then train expert and gate. The local expert stays at the client."""
        memory = client.memory
        if len(start):
            memory["W_g"], memory["gate"] = start.part(GLOBAL), start.part(GATE)
            memory["W_i"], memory["k"], memory["q"] = memory["W_g"], 1, Params({"q": torch.zeros(0)})
        elif "W_i" not in memory:
            raise ClientFault(E_LOST, "the local expert is lost: it starts again from the global one")
        Z_g = memory["gate"].replace(Z_g)
        rows, deciding = split(client)
        W_g, W_i = memory["W_g"], memory["W_i"]
        if not len(start):  # in the first round there is no trained expert to measure
            self.measure(client, deciding, W_g, W_i, Z_g)
        W_i, Z_i, L_i = self.local_pass(with_rows(client, rows), W_g, W_i, Z_g, memory["k"])
        if not np.isfinite(L_i):
            raise ClientFault(E_NONFINITE, f"the gate's loss is {L_i}")
        # The update has no times, because its bits must be the same on every engine.
        memory["W_i"], memory["backward"] = W_i, client.metrics.pop("backward_seconds")
        return Update(
            self.gating.travelling(Z_i) - self.gating.travelling(Z_g), self.weight(L_i, len(rows)), client.metrics
        )

    def measure(self, client: Client, deciding: Rows, W_g: Params, W_i: Params, Z_g: Params) -> None:
        """Equation 5: unfreeze one more layer when the last Q accuracies stall."""
        own = Params.join(**{GLOBAL: W_g, LOCAL: W_i, GATE: Z_g})
        said = self.logits(client.model, own if self.accuracy_of == "mixture" else W_i, deciding)
        a = client.model.evaluate(deciding, said)["accuracy"]
        deepest = max(map(len, client.model.parts.encoders))
        q = deque(client.memory["q"]["q"].tolist(), maxlen=self.queue)
        k = next_k(q, a, client.memory["k"], self.threshold, deepest)
        if self.reset and k > client.memory["k"]:
            q.clear()
        q.append(a)
        client.memory["q"], client.memory["k"] = Params({"q": torch.tensor(list(q), dtype=torch.float64)}), k

    def local_pass(self, client: Client, W_g: Params, W_i: Params, Z_g: Params, k: int) -> tuple[Params, Params, float]:
        """Train for E epochs on both objectives; returns W_i, Z_i and the gate's mean loss L_i."""
        return local_pass(client, self.local, self.gating, self.objective == "separate", W_g, W_i, Z_g, k)

    @property
    def gating(self) -> Gating:
        """The gate of these settings."""
        return Gating(self.gate, self.gate_backbone, self.share)

    def weight(self, L_i: float, n_i: int) -> float:
        """a_i of equation 7 before normalisation; if all losses are 0, all weights are equal."""
        if self.gate_weights == "loss":
            return max(L_i, 1e-12)
        return {"size": float(n_i), "inverse_loss": 1 / max(L_i, LEAST_LOSS), "uniform": 1.0}[self.gate_weights]

    @on_client
    def activity(self, client: Client) -> Activity:
        """The client's number of active layers, number of deciding rows, and time of backward passes."""
        return Activity(client.memory["k"], len(split(client)[1]), client.memory.get("backward", 0.0))

    def effort(self, model: DualModel, s: MSState, activities: Sequence[Activity]) -> dict[str, float]:
        """Costs of the clients' local training, by the names in :attr:`figures`.

        ``active_layers`` and ``trainable_mean`` are means over the clients; the other values are sums.
        """
        if not activities:
            return {}
        named = layers(model, "layer")
        gate = sum(
            t.numel() for n, t in s.Z_g.items() if "running_" not in n and (self.gate != "last" or n.startswith(LAST))
        )
        at = {
            k: gate + sum(s.W_g[n].numel() for layer in active_layers(model, k) for n in named.get(layer, ()))
            for k in {a.k for a in activities}
        }
        n, trainable = len(activities), sum(at[a.k] for a in activities)
        values = (
            sum(a.k for a in activities) / n,
            trainable,
            trainable / n,
            sum(a.rows for a in activities),
            sum(a.backward for a in activities),
        )
        return dict(zip(self.figures, map(float, values), strict=True))

    # --- the result ---------------------------------------------------------------------------------------------------
    def params_for(self, s: MSState, client: ClientId) -> Params:
        return Params.join(**{GLOBAL: s.W_g, GATE: s.Z_g}) if s.has else s.W_g

    def own(self, client: Client, w: Params) -> Params:
        """The global expert, the local one and the gate.

        Before stage two, or without a local expert, the client has W_g alone.
        """
        if not is_mixture(w):
            return w
        W_g, W_i = w.part(GLOBAL), client.memory.get("W_i")
        return W_g if W_i is None else Params.join(**{GLOBAL: W_g, LOCAL: W_i, GATE: w.part(GATE)})

    def start_of(self, client: Client, w: Params) -> Params:
        return w.part(GLOBAL) if is_mixture(w) else w

    def start_models(self, s: MSState) -> dict[ClientId, Params]:
        return {"": s.W_g}  # for comparison: stage one alone

    def check_own(self, w: Params, model: Model) -> None:
        """Refuse a client's own model if its layout is wrong.

        Raises:
            ClientFault: a tensor differs; the fault names the first such tensor.
        """
        if not is_mixture(w):
            match(w, model.layout, "model")
            return
        check_mixture(w, need(model), self.gating)

    def logits(self, model: Model, w: Params, rows: Rows) -> Tensor:
        """Logits S O of equation 6, (n, C); for a single expert, its scaled cosines."""
        if not is_mixture(w) or not any(n.startswith(f"{LOCAL}/") for n in w):
            model.load(w.part(GLOBAL) if is_mixture(w) else w)
            return model.predict(rows)
        return mixture_logits(need(model), w, rows, self.gating)

    def mixture_in_code(self, model: Model) -> list[str]:
        """Lines of Python that compute the mixture of an export."""
        return mixture_code(self.share, trunk_paths(model) if self.gate == "all" else {}, self.gate_backbone)

    def newcomer(
        self, model: Model, s: MSState, w_0: Params, client: ClientId, adapt: Callable[[Params], Params]
    ) -> tuple[Params, dict[ClientId, float]]:
        """The global expert, a local expert trained from it, and the current gate; no client has a weight."""
        return Params.join(**{GLOBAL: s.W_g, LOCAL: adapt(s.W_g), GATE: s.Z_g}), {}

    def details(self, s: MSState, judge: Judge | None) -> dict[str, Any]:
        lora, gate = (sum(w.layout.sizes.values()) for w in (s.W_g, s.Z_g))
        share = {"stage one": lora / s.frozen, "stage two": (lora + gate) / s.frozen}  # Table 1
        return {"active_layers": dict(s.k), "deciding_rows": dict(s.deciding), "trainable_share": share}

    def baselines(self) -> dict[str, Method[Any]]:
        """Stage one alone for the same number of rounds, and mixtures with a fixed lambda of 0, 0.5 or 1."""
        fixed = {f"lambda-{share:g}": dataclasses.replace(self, share=share) for share in (0.0, 0.5, 1.0)}
        return {"stage-one": FedAvg(self.rounds, self.fraction, self.weighting, self.local), **fixed}

    def validate(self) -> None:
        if self.gate == "all" and self.gate_backbone:
            raise InputError(
                'method.gate_backbone: a gate backbone is frozen, but gate = "all" trains the gate\'s trunk: choose '
                "one",
                key="method.gate_backbone",
            )
        if self.local.personal:
            raise InputError(
                "method.local.name: this method gives each client its own expert; take a plain optimiser",
                key="method.local.name",
            )
        if self.local.batch_size == 1:
            raise InputError(
                "method.local.batch_size = 1: the gate's batch norm needs a variance, and one row has none; take at "
                "least 2",
                key="method.local.batch_size",
            )
        if self.local.micro_batch:
            raise InputError(
                "method.local.micro_batch: the gate's batch norm mixes the rows of a batch, so the results of "
                "micro-batches do not add up to those of the batch; drop this setting",
                key="method.local.micro_batch",
            )
