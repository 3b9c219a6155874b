"""BlindFed: A Framework for Double-Blind Federated Adaptation of Foundation Models.

Tastan, Nandakumar. 2025. arXiv:2502.01289, Section 3. The paper numbers its equations and has no Algorithm.

The server computes on ciphertexts and sees no rows. Clients see neither the foundation model nor each other's rows.
They train side adapters and a head (equations 4 to 6) on disclosed activations, which are outputs of the model's
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fedfm.core.capabilities import HiddenModel, Judge, Needs, Planned, Traits
from fedfm.core.client import Client, ClientData, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.encrypted.paper import SETTINGS
from fedfm.encrypted.protocol import clear, foundation_check, permuted_clear, predictions
from fedfm.encrypted.protocol.client import ClientHalf
from fedfm.encrypted.protocol.handshake import Hello, Opened
from fedfm.encrypted.student.distillation_loss import Recipe
from fedfm.encrypted.student.folding import fold
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.models.spec import RELEASED
from fedfm.training import SGD, Local

if TYPE_CHECKING:
    from fedfm.encrypted.inference.cost_estimate import EncryptedPlan

RINGS = {"fast": 8192, "slow": 16384}  # ring degree for each kind of network


@dataclass(frozen=True)
class ServerState:
    """The server's state between rounds.

    Attributes:
        w: (theta, eta), adapters and head.
        figures: measurements of the encrypted forward pass, which the run's result reports.
    """

    w: Params
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BlindFed(HiddenModel, Planned, Method[ServerState]):
    """One encrypted forward pass of all rows through the server's frozen model, then FedAvg on the model's outputs.

    There are two protocols. In "masked" (ours), a client gets the disclosed activations of its rows in the clear, and
    its labels never leave the client. In "permuted" (the paper's), a client gets the activations of all tokens in
    secret orders, and sends its labels encrypted. The secret orders leak, as ``fedfm audit`` shows.
    """

    means: ClassVar[tuple[str, ...]] = ("train",)
    paper: ClassVar[Mapping[str, Paper]] = SETTINGS
    paper_tables: ClassVar[Mapping[str, Any]] = {"distil": Recipe()}

    rounds: int = setting(50, "T, rounds of averaging after the encrypted forward pass; 0 trains nothing", ge=0)
    fraction: float = setting(1.0, "C, the fraction of clients that a round asks", gt=0, le=1)
    local: Local = setting(SGD(learning_rate=0.05, batch_size=16), "client optimiser: E, B, eta")
    drops: bool = setting(
        True,
        'eta follows local.schedule = "steps" (Appendix D: a tenth after half of the rounds, a hundredth after four '
        "fifths) if no other schedule is set; false: eta stays constant",
    )
    protocol: str = setting("masked", "masked (ours) or permuted (the paper's)", choices=("masked", "permuted"))
    encryption: str = setting(
        "ckks", "ckks, or clear (a simulation in which the server sees the rows)", choices=("ckks", "clear")
    )
    foundation: str = setting(
        "",
        'the distilled model ("nano-vit-fhe", or a folder of `fedfm distil`); only the server reads this model',
        required=True,
        words='"nano-vit-fhe" or a folder that `fedfm distil` made',
        metadata={"server_only": True},
    )
    rank: int = setting(8, "r, rank of the side adapters", ge=1, le=65_536)
    released: str = setting(
        "class",
        "activations of each block that clients receive: class (the class token or the mean over tokens), grid (also "
        "the means of four quadrants), tokens (all tokens, through a secret projection)",
        choices=RELEASED,
    )
    projection: int = setting(32, 'number of values per token for released = "tokens"', ge=1, le=65_536)
    labels: str = setting(
        "permuted",
        "permuted protocol: the server returns the labels in its own order (permuted), or only the loss (loss_only, as "
        "the paper describes; it allows no training)",
        choices=("permuted", "loss_only"),
    )
    link: str = setting(
        "fast",
        "speed of the network to the clients: slow uses a larger ring, which needs a third of the messages, but more "
        "bytes and more computation per message",
        choices=("fast", "slow"),
    )
    predict: bool = setting(
        False,
        "no training: the model predicts the rows that a silo names in its file; only this silo gets the predictions",
    )
    trained: str = setting(
        "",
        "with predict = true: folder of a finished run whose adapters are used; only the server reads it",
        metadata={"server_only": True},
    )
    processes: int = setting(0, "worker processes of the server's encrypted computation; 0 for one per core", ge=0)

    @property
    def ring(self) -> int:
        """The degree of the ciphertexts' ring."""
        return RINGS[self.link]

    # --- server half --------------------------------------------------------------------------------------------------
    def init(self, fed: Federation) -> ServerState:
        model = foundation_check.check(fed.model, self.foundation)
        foundation_check.check_protocol(model, self.protocol)
        alike: dict[str, object] = {"foundation": self.foundation, "released": self.released}
        alike |= {"projection": self.projection, "rank": self.rank}
        w = predictions.load_trained(self.trained, alike, fed, model) if self.predict else fed.initial
        figures = self.run_forward_pass(fed)
        if self.predict:
            figures["predicted"] = float(sum(fed.ask(self.predicted, w=w).values()))
        return ServerState(w, figures)

    def run_forward_pass(self, fed: Federation) -> dict[str, float]:
        """Run steps 1 to 4 of the protocol once: the encrypted forward pass of all rows of all clients."""
        if self.encryption == "clear":
            return permuted_clear.run(self, fed) if self.protocol == "permuted" else clear.run(self, fed)
        from fedfm.encrypted.protocol import masked  # imported here, since these modules need TenSEAL
        from fedfm.encrypted.protocol import permuted as permuted_passes

        return permuted_passes.run(self, fed) if self.protocol == "permuted" else masked.run(self, fed)

    def step(self, fed: Federation, state: ServerState, t: int) -> ServerState:
        cohort = fed.sample(self.fraction)
        return replace(state, w=state.w + fed.mean(self.train, of=cohort, w=state.w))  # equation 7

    def params_for(self, state: ServerState, client: ClientId) -> Params:
        return state.w

    # --- client half --------------------------------------------------------------------------------------------------
    @on_client
    def train(self, client: Client, w: Params) -> Update:
        mine = self.view(client)
        w_k = client.trained = self.scheduled_local(mine, w)
        return Update(w_k - w, len(mine.data.train), mine.metrics)

    @cached_property
    def scheduled_local(self) -> Local:
        """The client optimiser, with the paper's schedule if no other schedule is set."""
        return replace(self.local, schedule="steps") if self.drops and self.local.schedule == "constant" else self.local

    def view(self, client: Client) -> Client:
        return self.client_half.view(client)

    @on_client(kind="query")
    def open(self, client: Client, hello: Hello) -> Opened:
        """Step 1: receive the format that rows must have; return the client's row counts and its keys."""
        return self.client_half.open(client, hello)

    @on_client(kind="query")
    def rows(self, client: Client, batch: int, session: Tensor | None = None, go_on: bool = False) -> Tensor:
        """Step 2: send a batch of rows in the client's order, or no rows if ``go_on``: the server has their states."""
        return self.client_half.rows(client, batch, session, go_on)

    @on_client(kind="query", varying=("states",))
    def keep(self, client: Client, batch: int, block: int, states: Tensor) -> int:
        """Step 4: store disclosed activations, which all rounds use; return the number of rows."""
        return self.client_half.keep(client, batch, block, states)

    @on_client(kind="query", varying=("message",))
    def refresh(self, client: Client, message: Tensor) -> Tensor:
        """Step 3: decrypt masked values and encrypt them again."""
        return self.client_half.refresh(client, message)

    @on_client(kind="query")
    def labelled(
        self, client: Client, batch: int, session: Tensor | None = None, go_on: bool = False
    ) -> dict[str, Tensor]:
        """Permuted, step 1: send a batch of rows and labels, or no rows if ``go_on``: the server has their states."""
        return self.client_half.rows_with_labels(client, batch, session, go_on)

    @on_client(kind="query", varying=("states",))
    def turn(self, client: Client, batch: int, block: int, states: Tensor) -> Tensor:
        """Permuted, step 3: store the states of all tokens, which arrive in a secret order; return them encrypted."""
        return self.client_half.turn(client, batch, block, states)

    @on_client(kind="query", varying=("orders", "labels"))
    def align(self, client: Client, batch: int, orders: Tensor, labels: Tensor) -> int:
        """Permuted, steps 4 and 6: store the orders from each block to the next, and the labels in the last order."""
        return self.client_half.align(client, batch, orders, labels)

    @on_client(kind="query")
    def predicted(self, client: Client, w: Params) -> int:
        """With ``predict``: store the predictions for the client's rows; return their number."""
        return predictions.keep(client, self.view(client), w)

    @cached_property
    def client_half(self) -> ClientHalf:
        """The client half of the protocol for all clients of this process."""
        return ClientHalf(self.protocol, self.encryption)

    # --- needs and promises of the method -----------------------------------------------------------------------------
    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Only the server has the model. Without encryption, server and clients have to be in one process."""
        local = 'method.encryption = "clear"' if self.encryption == "clear" else ""
        return Needs("side_adapter", ("side_adapter",), model="server", local=local)

    @property
    def asks(self) -> tuple[str, ...]:  # type: ignore[override]
        """The client halves that the protocol calls."""
        renewed = ("refresh",) if self.encryption == "ckks" else ()
        if self.protocol == "permuted":
            return ("open", "labelled", "turn", "align", *renewed)
        return ("open", "rows", "keep", *renewed, *(("predicted",) if self.predict else ()))

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Secrets are needed for orders and key agreements. Rows to predict have no labels, so there are no scores."""
        encrypted = self.encryption == "ckks"
        orders = ("orders",) if self.protocol == "permuted" else ()
        return Traits(
            server_secrets=(*orders, "channel") if encrypted else orders,
            sealed_replies=self.asks if encrypted else (),  # ciphertexts, keys and numbers of rows
            hides_counts=self.predict,
            predicts_only=self.predict,
            clients_judge=encrypted,
        )

    def fidelity(self, visible: ClientData, clear: Callable[[str], Rows]) -> dict[str, float]:
        return self.client_half.errors(visible, clear) if self.encryption == "ckks" else {}

    def encode(self, model: Model, rows: Rows) -> Rows:
        if self.encryption == "clear":
            return model.encode(rows)
        from fedfm.encrypted.protocol import masked
        from fedfm.encrypted.protocol import permuted as permuted_passes

        student = foundation_check.check(model, self.foundation)
        alone = permuted_passes.in_one_place if self.protocol == "permuted" else masked.in_one_place
        return alone(student, rows, self.ring)

    def model_table(self) -> dict[str, Any]:
        adapt = {"name": "side_adapter", "rank": self.rank, "released": self.released, "projection": self.projection}
        return {"name": self.foundation, "task": "classification", "adaptation": adapt}

    def check_model(self) -> None:
        foundation_check.check_place(self.foundation)
        if self.encryption == "ckks":
            from fedfm.encrypted.ckks import seal
            from fedfm.encrypted.ckks.ring import Parameters

            seal.ring_of(Parameters())  # raises MissingExtra without the extra

    def plan(self, model: Model, rows: Sequence[Sequence[int]]) -> EncryptedPlan | None:
        student = foundation_check.check(
            model, self.foundation
        )  # a simulation refuses the same models as encryption does
        foundation_check.check_protocol(student, self.protocol)
        if self.encryption == "clear":
            return None
        from fedfm.encrypted.inference import cost_estimate
        from fedfm.encrypted.inference.messages import parameters_of

        matrices = fold(student.frozen_parts[0].module)
        parameters = parameters_of(self.ring)
        if self.protocol == "permuted":
            return cost_estimate.plan(matrices, rows, self.released, permuted=len(model.classes), parameters=parameters)
        counts = [sum(parts) for parts in rows]
        return cost_estimate.plan(matrices, counts, self.released, projection=self.projection, parameters=parameters)

    def details(self, state: ServerState, judge: Judge | None) -> dict[str, Any]:
        figures: dict[str, Any] = dict(state.figures)
        if "statistical_distance" in figures:
            from fedfm.encrypted.ckks.refresh import HOLDS_WHILE

            figures["statistical_distance_holds"] = HOLDS_WHILE
        if self.predict:
            return figures
        return figures | {"accuracy_clear": None if judge is None else judge(state.w).get("accuracy")}

    def validate(self) -> None:
        if self.predict and (self.rounds or self.protocol != "masked" or not self.trained):
            raise InputError(
                'method.predict = true does not train; expected rounds = 0, protocol = "masked", and trained = the '
                "folder of a finished run",
                key="method.predict",
            )
        if self.protocol != "permuted":
            if self.labels != "permuted":
                raise InputError(
                    f'method.labels = "{self.labels}" belongs to protocol = "permuted"; drop it', key="method.labels"
                )
            return
        if self.released == "tokens":
            raise InputError(
                'method.released = "tokens" hides tokens by a projection, but protocol = "permuted" sends all of them; '
                'expected "class" or "grid"',
                key="method.released",
            )
        if self.labels == "loss_only" and self.encryption == "ckks":
            raise InputError(
                'method.labels = "loss_only": under encryption, clients compute scores from the returned labels; '
                'expected encryption = "clear", or labels = "permuted"',
                key="method.labels",
            )
        if self.labels == "loss_only" and self.rounds:
            raise InputError(
                f'method.labels = "loss_only": a client that gets only the loss has no gradient, so nothing can '
                f'be trained in {self.rounds} rounds; expected rounds = 0, or labels = "permuted"',
                key="method.labels",
            )
