"""Feature inversion: an attacker that has images of its own computes the clients' images from their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedfm import seeds
from fedfm.audits.audit import Audit
from fedfm.audits.fedpft_view import SentClass, View
from fedfm.audits.finding import ABOVE, Finding, VerdictRule
from fedfm.audits.inference import rates, similarity
from fedfm.audits.inference.inverter import SIDE, Inverter, train
from fedfm.audits.inference.rates import Array
from fedfm.audits.replay import Replay
from fedfm.data.pictures import rgb
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.runtime.run_directory import Run

TARGETS, OWN, DRAWS = (
    100,
    1000,
    16,
)  # numbers of images under attack, of the attacker's images, and of draws from a mixture
LEAST = 50  # smallest number of images to train the inverter on
CLEAR = 60.0  # largest PSNR that is reported, in dB, since equal images have infinite PSNR
_ASKED: Mapping[str, tuple[str, str]] = {
    "inversion_features": (
        "Which images would raw features disclose? This is for comparison, since this run sends none.",
        "their raw features",
    ),
    "inversion_components": ("Which images do the components' means disclose?", "the means of their class's mixture"),
    "inversion_samples": ("Which images do draws from the mixtures disclose?", "draws from their class's mixture"),
}


class Inversion(Audit):
    """Compares the best computed image, and the best of the attacker's own images, with the true image by SSIM."""

    methods: ClassVar[tuple[str, ...]] = ("fedpft",)
    by_default: ClassVar[bool] = False
    takes: ClassVar[float] = 60.0

    def unfit(self, run: Run) -> str | None:
        kind = run.manifest["model"]["kind"]
        return None if kind == "image" else f"it needs images, and this run is on {kind}"

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        view = View(replay)
        features, own = _own(view, options.get("pictures"))
        targets = [(cell, row) for cell in view.cells if cell.mixture is not None for row in cell.rows.tolist()]
        if not targets:
            raise InputError("--attack inversion: the messages contain no mixture, so there is nothing to invert")
        chosen = np.sort(view.rng("targets").permutation(len(targets))[:TARGETS])
        targets = [targets[i] for i in chosen]
        notice(f"training an inverter on {len(own)} images of the attacker's own")
        inverter = train(features, own, seeds.derive(replay.run.experiment.run.seed, "audit", "inverter"))
        true = pictures(view.federated.table, [row for _, row in targets])  # (m, 32, 32, 3)
        baseline = [_best(own, picture) for picture in true]
        return [
            _finding(view, name, [_best(p, t) for p, t in zip(some, true, strict=True)], baseline, len(own))
            for name, some in _invert(view, inverter, targets).items()
        ]


def _own(view: View, path: Path | None) -> tuple[Array, Array]:
    """Features and images that the attacker has, from a file or from the rows that nobody trained on."""
    population = view.replay.population
    if path is None:
        rows = view.rng("own").permutation(view.federated.test)[:OWN]
        features, own = view.features(rows), pictures(view.federated.table, rows.tolist())
    else:
        from fedfm.data.rows_to_predict import read_inputs

        table = read_inputs(Path(path), view.replay.run.experiment.data, kind="image")
        rows = view.rng("own").permutation(len(table))[:OWN]
        features = population.model.features(population.model.prepare(table, rows)).numpy()
        features = view.as_used(features)
        own = pictures(table, rows.tolist())
    if len(own) < LEAST:
        raise InputError(f"--attack inversion: {len(own)} images to train on, expected {LEAST}; give --pictures FILE")
    return features, own


def _invert(view: View, inverter: Inverter, targets: Sequence[tuple[SentClass, int]]) -> dict[str, list[Array]]:
    """For each source, the images that the attacker computes for each target from this source."""
    raw = inverter(view.features(np.array([row for _, row in targets])))
    means: dict[int, Array] = {}
    draws: dict[int, Array] = {}
    for cell, _ in targets:
        if id(cell) not in means and cell.mixture is not None:
            means[id(cell)] = inverter(cell.mixture.means)
            draws[id(cell)] = inverter(cell.mixture.sample(DRAWS, view.rng("draws", cell.client, cell.label)))
    return {
        "inversion_features": [picture[None] for picture in raw],
        "inversion_components": [means[id(cell)] for cell, _ in targets],
        "inversion_samples": [draws[id(cell)] for cell, _ in targets],
    }


def _best(some: Array, true: Array) -> tuple[float, float]:
    """Largest SSIM and largest PSNR of any of these images with the true one."""
    clear = np.minimum(similarity.psnr(some, true[None]), CLEAR)
    return float(similarity.ssim(some, true[None]).max()), float(clear.max())


def _finding(
    view: View, name: str, found: list[tuple[float, float]], baseline: list[tuple[float, float]], own: int
) -> Finding:
    question, source = _ASKED[name]
    (ssim, psnr), (own_ssim, own_psnr) = (np.array(pairs).mean(0).tolist() for pairs in (found, baseline))
    # The baseline has the same targets, so the interval is computed from the paired differences.
    low, high = rates.mean_interval(np.array(found)[:, 0], np.array(baseline)[:, 0])
    rule = (
        ABOVE
        if name != "inversion_features"
        else VerdictRule(otherwise="the finding is a comparison, since no client sends raw features")
    )
    says = (
        f"The best image computed from {source} has SSIM {ssim:.3f} and PSNR {psnr:.1f} dB with the true one; the "
        f"best of the attacker's own {own} images has {own_ssim:.3f} and {own_psnr:.1f} dB."
    )
    detail = {"psnr": psnr, "baseline_ssim": own_ssim, "baseline_psnr": own_psnr, "targets": len(found)}
    detail |= {"own_pictures": own}
    return Finding(name, question, ssim, low, high, own_ssim, rule, says, False, detail)


def pictures(table: Table, rows: Sequence[int]) -> Array:
    """Rows of a table of images as (n, 32, 32, 3) float32 in [0, 1]."""
    from PIL import Image

    done = [np.asarray(rgb(table.inputs[i]).resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for i in rows]
    return np.asarray(np.stack(done).astype(np.float32) / 255)
