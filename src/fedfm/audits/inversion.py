"""Feature inversion: an attacker that has images of its own computes the clients' images from their messages.

Beitollahi et al. Parametric Feature Transfer. 2024. arXiv:2402.01862, Section 6.3, Figure 7 and Appendix H: from raw
features, from draws of a mixture, and from draws of a mixture with noise. The paper compares each computed image with
the true ones by SSIM and PSNR, over all of them, over the 1 % that the attacker trusts most, and over the best 1 %.
The attacker trusts an image if several inverters agree about it; in the paper, if several samples of one inverter do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedfm import seeds
from fedfm.audits.audit import Audit
from fedfm.audits.fedpft_view import SentClass, View
from fedfm.audits.finding import ABOVE, Finding, VerdictRule, nothing
from fedfm.audits.inference import rates, similarity
from fedfm.audits.inference.inverter import SIDE, Inverters, train
from fedfm.audits.inference.rates import ALARMS, Array
from fedfm.audits.member_scores import finding_on_rate
from fedfm.audits.replay import Replay
from fedfm.data.pictures import rgb
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.runtime.run_directory import Run

# Largest numbers of images under attack and of the attacker's images; draws from a mixture; inverters.
TARGETS, OWN, DRAWS, NETS = 300, 1000, 16, 3
LEAST = 50  # smallest number of images to train the inverters on
TOP = 0.01  # share of the images that the attacker trusts most, and of the best ones
CLEAR = 60.0  # largest PSNR that is reported, in dB, since equal images have infinite PSNR
_ASKED: Mapping[str, tuple[str, str]] = {
    "inversion_features": (
        "Which images would raw features disclose? This is for comparison, since this run sends none.",
        "their raw features",
    ),
    "inversion_components": ("Which images do the components' means disclose?", "the means of their class's mixture"),
    "inversion_samples": ("Which images do draws from the mixtures disclose?", "draws from their class's mixture"),
}
_ROWS = "Does an image that is computed from a mixture show a row of the client, more than other rows of its class?"


class Inversion(Audit):
    """Compares the best computed image, and the best of the attacker's own images, with the true image by SSIM."""

    methods: ClassVar[tuple[str, ...]] = ("fedpft",)
    by_default: ClassVar[bool] = False
    takes: ClassVar[float] = 120.0

    def unfit(self, run: Run) -> str | None:
        kind = run.manifest["model"]["kind"]
        return None if kind == "image" else f"it needs images, and this run is on {kind}"

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        view = View(replay)
        features, own, used = _own(view, options.get("pictures"))
        cells = _cells(view, used)
        notice(f"training {NETS} inverters on {len(own)} images of the attacker's own")
        seed = replay.run.experiment.run.seed
        inverters = Inverters(
            [train(features, own, seeds.derive(seed, "audit", "inverter", str(i))) for i in range(NETS)]
        )
        notice(f"comparing images with {sum(len(cell.true) for cell in cells)} true ones")
        baseline = Compared.of([(own, np.zeros(len(own)), np.concatenate([cell.true for cell in cells]))])
        sources = {name: [_invert(view, inverters, name, cell) for cell in cells] for name in _ASKED}
        found = {
            name: Compared.of(
                [(*images, cell.true) for images, cell in zip(sources[name], cells, strict=True)],
                paired=name == "inversion_features",
            )
            for name in _ASKED
        }
        findings = [_finding(name, of, baseline, len(own)) for name, of in found.items()]
        both = [np.concatenate([sources[name][i][0] for name in [*_ASKED][1:]]) for i in range(len(cells))]
        return [*findings, _rows(view, cells, both)]


class ClassImages(NamedTuple):
    """A class of a client: its mixture, rows under attack with their images, and images of rows that no client has."""

    sent: SentClass
    rows: Array
    true: Array  # (t, 32, 32, 3)
    strangers: Array  # (s, 32, 32, 3)


class Compared(NamedTuple):
    """Computed images, compared with true ones: for each true image, and for each computed image.

    Attributes:
        best: (m, 2) SSIM and PSNR of the computed image that is most like each true image.
        score: (k, 2) SSIM and PSNR of each computed image with the true image that is most like it.
        trust: (k,) the attacker's own measure of each computed image.
    """

    best: Array
    score: Array
    trust: Array

    @classmethod
    def of(cls, cells: Sequence[tuple[Array, Array, Array]], *, paired: bool = False) -> Compared:
        """From (computed images, trust, true images) of each cell; ``paired``: each belongs to one true image.

        ``paired`` images are compared with this one only.
        """
        best, score = list[Array](), list[Array]()
        for some, _, true in cells:
            if paired:
                both = _pairs(some, true)
                best.append(both)
                score.append(both)
            else:
                whole = np.stack([_pairs(some, one[None]) for one in true])  # (t, k, 2)
                best.append(whole.max(1))
                score.append(whole.max(0))
        return cls(np.concatenate(best), np.concatenate(score), np.concatenate([trust for _, trust, _ in cells]))

    def figures(self) -> dict[str, dict[str, float]]:
        """The paper's three rows: mean SSIM and PSNR of all computed images, of the trusted ones, and of the best."""
        count = max(round(TOP * len(self.score)), 1)
        ranks = {"all": self.trust, "attacker": self.trust, "oracle": self.score[:, 0]}
        tops = {name: self.score[np.argsort(-of, kind="stable")[:count]] for name, of in ranks.items()}
        tops["all"] = self.score
        return {name: dict(zip(("ssim", "psnr"), of.mean(0).tolist(), strict=True)) for name, of in tops.items()}


def _pairs(a: Array, b: Array) -> Array:
    """SSIM and PSNR (n, 2) of n pairs of images."""
    return np.stack([similarity.ssim(a, b), np.minimum(similarity.psnr(a, b), CLEAR)], -1)


def _own(view: View, path: Path | None) -> tuple[Array, Array, Array]:
    """The attacker's features and images, and the table's rows from which they are (none if they are from a file).

    The attacker gets half of the run's test rows, if these are enough; ``_rows`` uses the other half.
    """
    population = view.replay.population
    if path is None:
        rows = view.rng("own").permutation(view.federated.test)
        rows = rows[: min(OWN, len(rows) // 2 if len(rows) >= 2 * LEAST else len(rows))]
        features, own = view.features(rows), pictures(view.federated.table, rows.tolist())
    else:
        from fedfm.data.rows_to_predict import read_inputs

        table = read_inputs(Path(path), view.replay.run.experiment.data, kind="image")
        chosen = view.rng("own").permutation(len(table))[:OWN]
        features = population.model.features(population.model.prepare(table, chosen)).numpy()
        features, own, rows = view.as_used(features), pictures(table, chosen.tolist()), view.federated.test[:0]
    if len(own) < LEAST:
        raise InputError(f"--attack inversion: {len(own)} images to train on, expected {LEAST}; give --pictures FILE")
    return features, own, rows


def _cells(view: View, used: Array) -> list[ClassImages]:
    """The cells with rows under attack, and as many rows that neither a client nor the attacker has.

    Raises:
        InputError: no message contains a mixture.
    """
    pairs = [(i, row) for i, cell in enumerate(view.cells) if cell.mixture is not None for row in cell.rows.tolist()]
    if not pairs:
        raise InputError("--attack inversion: the messages contain no mixture, so there is nothing to invert")
    chosen = np.sort(view.rng("targets").permutation(len(pairs))[:TARGETS])
    cells, table = [], view.federated.table
    for i, sent in enumerate(view.cells):
        rows = np.array([row for k, row in (pairs[j] for j in chosen) if k == i], dtype=np.int64)
        if len(rows):
            rest = np.setdiff1d(view.held_out(sent.client, sent.label), used)
            rest = view.rng("strangers", sent.client, sent.label).permutation(rest)[: max(len(rows), rates.FEW)]
            cells.append(ClassImages(sent, rows, pictures(table, rows.tolist()), pictures(table, rest.tolist())))
    return cells


def _invert(view: View, inverters: Inverters, name: str, cell: ClassImages) -> tuple[Array, Array]:
    """The images that the attacker computes of a cell from this source, and how far the inverters agree on each."""
    sent = cell.sent
    assert sent.mixture is not None  # noqa: S101 - see _cells
    if name == "inversion_features":
        return inverters(view.features(cell.rows))
    if name == "inversion_components":
        return inverters(sent.mixture.means)
    return inverters(sent.mixture.sample(DRAWS, view.rng("draws", sent.client, sent.label)))


def _finding(name: str, found: Compared, baseline: Compared, own: int) -> Finding:
    question, source = _ASKED[name]
    (ssim, psnr), (own_ssim, own_psnr) = (of.best.mean(0).tolist() for of in (found, baseline))
    # The baseline has the same targets, so the interval is computed from the paired differences.
    low, high = rates.mean_interval(found.best[:, 0], baseline.best[:, 0])
    rule = (
        ABOVE
        if name != "inversion_features"
        else VerdictRule(otherwise="the finding is a comparison, since no client sends raw features")
    )
    figures = found.figures()
    says = (
        f"The best image computed from {source} has SSIM {ssim:.3f} and PSNR {psnr:.1f} dB with the true one; the "
        f"best of the attacker's own {own} images has {own_ssim:.3f} and {own_psnr:.1f} dB. Of all computed images the "
        f"SSIM with the most similar true one is {figures['all']['ssim']:.3f}, of the 1 % that the attacker trusts "
        f"most {figures['attacker']['ssim']:.3f}, of the best 1 % {figures['oracle']['ssim']:.3f}."
    )
    detail: dict[str, Any] = {"psnr": psnr, "baseline_ssim": own_ssim, "baseline_psnr": own_psnr}
    detail |= {"targets": len(found.best), "own_pictures": own, "computed": len(found.score), **figures}
    detail["baseline_oracle"] = baseline.figures()["oracle"]
    return Finding(name, question, ssim, low, high, own_ssim, rule, says, False, detail)


def _rows(view: View, cells: Sequence[ClassImages], computed: Sequence[Array]) -> Finding:
    """Whether rows of the clients are nearer to images computed from their mixture than rows that no client has."""
    scores = []
    for cell, some in zip(cells, computed, strict=True):
        both = [np.array([similarity.ssim(some, one[None]).max() for one in of]) for of in (cell.true, cell.strangers)]
        scores.append((both[0], both[1]))
    rate = rates.tpr_at(scores, ALARMS, view.rng("bootstrap inversion"))
    if rate is None:
        return nothing("inversion_rows", _ROWS, f"No class has {rates.FEW} rows that neither client nor attacker has.")
    detail = {"threshold": rate.threshold, "hits": rate.hits, "members": rate.positives}
    detail |= {"false_alarms": rate.alarms, "stranger_scores": rate.negatives}
    return finding_on_rate("inversion_rows", _ROWS, rate, detail, "the SSIM of the most similar computed image")


def pictures(table: Table, rows: Sequence[int]) -> Array:
    """Rows of a table of images as (n, 32, 32, 3) float32 in [0, 1]."""
    from PIL import Image

    done = [np.asarray(rgb(table.inputs[i]).resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for i in rows]
    return np.asarray(np.stack(done).astype(np.float32) / 255) if done else np.zeros((0, SIDE, SIDE, 3), np.float32)
