"""Can one client compute a substitute of BlindFed's foundation model from the states that the protocol discloses to it?

The "permuted" protocol discloses the states of all tokens. :mod:`fedfm.encrypted.audits.block_order` matches states
before and after a block. So the client can fit and connect the blocks. The "masked" protocol discloses only some
activations, on which the client trains a student. The substitute is scored on the client's other rows, and on
photographs, which no client has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedfm.audits.audit import Audit
from fedfm.audits.finding import Finding, VerdictRule, nothing
from fedfm.audits.replay import Replay
from fedfm.encrypted.audits import inference_substitute
from fedfm.encrypted.audits.block_states import (
    States,
    largest_client,
    of_client,
    of_photographs,
    side_model,
    texts_unread,
)
from fedfm.encrypted.blindfed import BlindFed
from fedfm.linalg.threads import torch_threads
from fedfm.models.adapters.side_adapter import SideModel
from fedfm.runtime.run_directory import Run

BLOCKS = "Can a client compute the blocks of the server's model from pairs of states?"
STUDENT = "Can a client train a substitute of the server's model from the activations that it receives?"
FEW = 40  # smallest number of rows for the attack
STEPS = 300  # number of training steps for a block, and for the student
CLOSE, ALIKE = 0.1, 0.8  # a block below this relative squared error, and features above this cosine, count as copied
UNLIKE = 0.5
COPIED = VerdictRule(
    ("estimate < bound",), (f"estimate > {UNLIKE}",)
)  # the estimate is an error, so a small estimate is a leak
ALIKE_FEATURES = VerdictRule(("estimate >= bound",), (f"estimate < {UNLIKE}",))
SHARES = (0.25, 1.0)  # fractions of the client's rows on which students are trained
NOT_PROMISED = (
    "The protocol does not promise to prevent this: it hides weights, not the model's outputs for a client's own rows."
)


class SubstituteModel(Audit):
    """Measures how similar substitutes are to the model, on rows like the client's and on other rows."""

    methods: ClassVar[tuple[str, ...]] = ("blindfed",)
    replays: ClassVar[bool] = False
    takes: ClassVar[float] = 60.0

    def unfit(self, run: Run) -> str | None:
        return texts_unread(run)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        seed, population = replay.run.experiment.run.seed, replay.population
        client = largest_client(population)
        everything = of_client(population, client, "train", seed)
        method = replay.run.experiment.method_as(BlindFed)
        permuted = method.protocol == "permuted"
        if len(everything) < FEW:
            name, question = ("substitute.blocks", BLOCKS) if permuted else ("substitute.student", STUDENT)
            return [nothing(name, question, f"The largest client has {len(everything)} rows, fewer than {FEW}.")]
        cut = max(len(everything) // 5, 8)
        own, held, others = (
            everything.take(slice(cut, None)),
            everything.take(slice(cut)),
            of_photographs(population, seed),
        )
        with torch_threads(1):
            if permuted:
                return self._blocks(replay, own, held, others, seed, notice)
            return [self._student(replay, own, held, others, seed, notice)]

    def _blocks(
        self, replay: Replay, own: States, held: States, others: States, seed: int, notice: Callable[[str], None]
    ) -> list[Finding]:
        heads, hidden = _shape(replay)
        first = inference_substitute.fit_student(
            own.patches, own.blocks[:, :1].flatten(2, 3)[:, :, None], _Flat(), heads=heads, hidden=hidden,
            dim=own.blocks.shape[-1], seed=seed, steps=STEPS,
        )  # fmt: skip
        few, inside, outside = (list[float]() for _ in range(3))
        fits, quarter = [], own.take(slice(_share_of(own)))
        for level in range(1, own.blocks.shape[1]):
            notice(f"block {level + 1} of {own.blocks.shape[1]}")
            less, fit = (
                inference_substitute.fit_block(s.blocks[:, level - 1], s.blocks[:, level], heads, hidden, seed, STEPS)
                for s in (quarter, own)
            )
            fits.append(fit)
            for net, states, errors in ((less, held, few), (fit, held, inside), (fit, others, outside)):
                errors.append(
                    inference_substitute.update_error(net, states.blocks[:, level - 1], states.blocks[:, level])
                )
        error, far = sum(inside) / len(inside), sum(outside) / len(outside)
        before = sum(few) / len(few)
        says = (
            f"Blocks fitted from the states of one client's {len(own)} rows have a relative squared error of "
            f"{error:.3f} on its other rows and of {far:.2f} on photographs (0 means a copy, 1 as good as no block). "
            f"If the blocks are fitted from {len(quarter)} rows, the error on the other rows is {before:.3f}."
        )
        detail = {"rows": len(own), "by_block": _round(inside), "by_block_outside": _round(outside)}
        detail |= {"fewer_rows": len(quarter), "by_block_from_fewer_rows": _round(few)}
        found = Finding("substitute.blocks", BLOCKS, error, None, None, CLOSE, COPIED, says, False, detail)

        read = _Released(side_model(replay.population))

        def chain(states: States) -> Tensor:
            with torch.no_grad():
                x: Tensor = first(states.patches)[:, 0]
                for fit in fits:
                    x = fit(x)
                out: Tensor = read(x[:, None])[:, 0, 0]
            return out

        question = "Do these blocks, one after another, compute the model's features from pixels?"
        return [found, self._likeness(replay, "substitute.chain", question, own, held, others, chain)]

    def _student(
        self, replay: Replay, own: States, held: States, others: States, seed: int, notice: Callable[[str], None]
    ) -> Finding:
        heads, hidden = _shape(replay)
        read = _Released(side_model(replay.population))
        made: dict[float, nn.Module] = {}
        for share in SHARES:
            rows = own.take(slice(_share_of(own, share)))
            notice(f"a student from {len(rows)} rows")
            made[share] = inference_substitute.fit_student(
                rows.patches, rows.released, read, heads=heads, hidden=hidden, dim=own.blocks.shape[-1], seed=seed,
                steps=STEPS,
            )  # fmt: skip

        def features(net: nn.Module) -> Callable[[States], Tensor]:
            def compute(states: States) -> Tensor:
                with torch.no_grad():
                    out: Tensor = read(net(states.patches))[:, -1, 0]
                return out

            return compute

        finding = self._likeness(replay, "substitute.student", STUDENT, own, held, others, features(made[1.0]))
        few = features(made[SHARES[0]])
        near, far = (round(inference_substitute.likeness(_feature(s), few(s)), 4) for s in (held, others))
        more = {f"cosine{where}_from_{SHARES[0]:g}_of_the_rows": c for where, c in (("", near), ("_outside", far))}
        says = f"{finding.says} If the student is trained on {_share_of(own)} rows, the cosines are {near:.2f} and "
        says += f"{far:.2f}."
        return Finding(**{**vars(finding), "says": says, "detail": {**finding.detail, **more}})

    def _likeness(
        self, replay: Replay, name: str, question: str, own: States, held: States, others: States,
        features: Callable[[States], Tensor],
    ) -> Finding:  # fmt: skip
        classes = len(replay.population.federated.table.classes)
        near, far = (inference_substitute.likeness(_feature(s), features(s)) for s in (held, others))
        says = (
            f"A substitute is fitted to {len(own)} rows. Its features have a cosine of {near:.2f} with the model's on "
            f"the client's other rows, and of {far:.2f} on photographs. {NOT_PROMISED}"
        )
        detail: dict[str, Any] = {"rows": len(own), "cosine": round(near, 4), "cosine_outside": round(far, 4)}
        if own.labels is not None:
            fit = (_feature(own), own.labels)
            for key, states in (("agreement", held), ("agreement_outside", others)):
                detail[key] = round(inference_substitute.agreement(fit, _feature(states), features(states), classes), 4)
            says += (
                f" A classifier gives both kinds of features the same class for {detail['agreement']:.0%} of the other "
                f"rows, and for {detail['agreement_outside']:.0%} of the photographs."
            )
        return Finding(name, question, near, None, None, ALIKE, ALIKE_FEATURES, says, False, detail)


class _Released(nn.Module):
    """Maps a student's states to the form of disclosed states: it combines tokens into the disclosed positions.

    If the protocol projects the states by a secret matrix, the student learns a matrix of its own.
    """

    def __init__(self, model: SideModel) -> None:
        super().__init__()
        _, release, _ = model.frozen_parts
        self.positions, projection = release.positions, release.projection
        self.map = None if projection is None else nn.Linear(projection.shape[0], projection.shape[1], bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Compute the disclosed positions: (n, L, T, d) -> (n, L, P, d')."""
        out = torch.matmul(self.positions, states)
        return out if self.map is None else self.map(out)


class _Flat(nn.Module):
    """Joins tokens and features of states in one axis: (n, L, T, d) -> (n, L, 1, T d)."""

    def forward(self, states: Tensor) -> Tensor:
        """Flatten the last two axes."""
        return states.flatten(2, 3)[:, :, None]


def _share_of(own: States, share: float = SHARES[0]) -> int:
    """Return the number of rows in a fraction of a client's rows."""
    return max(int(share * len(own)), FEW // 2)


def _shape(replay: Replay) -> tuple[int, int]:
    """Return the true model's number of heads and MLP width; an attacker can find them by trial."""
    backbone, _, _ = side_model(replay.population).frozen_parts
    config: Any = backbone.module.config
    return int(config.num_attention_heads), int(config.intermediate_size)


def _feature(states: States) -> Tensor:
    """Return the features: the first position that the last block discloses, (n, d')."""
    return states.released[:, -1, 0]


def _round(values: Sequence[float]) -> list[float]:
    return [round(v, 4) for v in values]
