"""Draws the packages, a round, and what crosses the wire, each as an SVG that is readable on a phone and in the dark.

`python docs/generate.py` writes docs/figures/ with it. The background belongs to a drawing, so that its text can be
read on every page.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "figures"
HOUSE = {  # from the roof down: a package imports only those below it
    "cli": "commands, help",
    "api": "run, resume, federate, predict, join, studies",
    "reports": "HTML and tables from a run directory",
    "audits": "attacks replayed on a finished run",
    "engines": "local; flower: simulation, deployment; folder",
    "runtime": "one run: server loop, clients, evaluation",
    "config": "TOML, registry, rules across tables",
    "methods": "one file an algorithm",
    "attacks": "poisoning by clients",
    "training": "client optimisers, heads",
    "tasks": "one file a task: rows, loss, scores",
    "models": "load, adapt, score, export",
    "aggregation": "how a mean is made",
    "data": "sources, tables, partitions",
    "privacy": "noise, calibration, accountant",
    "core": "Client, Federation, Method, wire format",
    "linalg": "Params, algebra of vectors, compiled loops",
}
WINGS = {"encrypted": "wing: BlindFed on encrypted rows", "sites": "wing: silo file, ledger, kits"}
ROOT = ("errors", "seeds", "version")
PARTIES = (
    *(("runtime", "server"), ("method", "server half"), ("core", "Federation")),
    *(("engine", ""), ("runtime", "client"), ("method", "client half")),
)
ROUND = (  # from, to, what
    (0, 1, "step(fed, state, t)"),
    (1, 2, "fed.mean(self.train, w=...)"),
    (2, 3, "one Request a client"),
    (3, 4, "in this process, by a worker, or as a Flower message"),
    (4, 4, "the silo's policy, payload against annotations"),
    (4, 5, "train(client, w)"),
    (5, 4, "Update(delta, weight, metrics)"),
    (4, 3, "what the aggregation protects of it"),
    (3, 2, "Reply, or a fault with a code"),
    (2, 2, "names, shapes, dtypes, NaN, norms; fold by names"),
    (2, 1, "the mean"),
    (1, 0, "state"),
    (0, 0, "checkpoint, then metrics.jsonl"),
)
_AVG = "fedavg, fedprox, fedavgm, fedadam, fedyogi"
WIRE = {  # system -> what goes up, what comes down: row and words of docs/reference/who-sees-what.md
    "FedPFT, in one round": (
        [
            ("fedpft", "Gaussian mixtures of each client's features by class, and their counts"),
            ("fedpft", "with `[privacy]` noisy sums, (epsilon, delta)-private for a record"),
        ],
        [("fedpft", "the foundation model and the head")],
    ),
    "FedBaF on FedAvg": (
        [(_AVG, "each client's update in the clear, its number of rows, its training loss")],
        [
            ("fedbaf", "weights pulled towards the server's foundation model"),
            ("fedbaf", "Clients that see two rounds together can compute this model"),
        ],
    ),
    "FedBip": (
        [("fedbip", "each client's task vector in the clear, and which clients are alike")],
        [("fedbip", "its own mixture of all task vectors")],
    ),
    "FedMS": (
        [
            ("fedms", "stage one: as fedavg"),
            ("fedms", "stage two: each client's change of the gate adapter"),
            ("fedms", "the losses of gate and expert, the gate's mean share, its weight"),
            ("fedms", "how many of its layers are active, how many rows decide that"),
            ("fedms", "the seconds of its backward passes"),
            ("fedper, fedrep", "after the last round each client's own model, unless its silo refuses `reveal`"),
        ],
        [("fedms", "the global expert, and the gate adapter of every round")],
    ),
    "BlindFed, masked": (
        [
            ("blindfed, masked", "ciphertexts under each client's key, evaluation keys, numbers of rows"),
            ("blindfed, masked", "then as fedavg, adapters and head only (with `secagg` their sums)"),
        ],
        [
            ("blindfed, masked", "released states of its own rows in every block, masked numbers"),
            ("blindfed, masked", "the mean adapters and head"),
            ("blindfed, masked", "no weight of the foundation model but, with texts, its tables of embeddings"),
        ],
    ),
}
WIDTH = 380  # pixels, as a phone shows them
_STYLE = """<style>
svg { --paper: #ffffff; --ink: #1f2933; --pale: #c3ccd5; --box: #eef3f6; --up: #b5540c; --down: #0b6e99 }
@media (prefers-color-scheme: dark) {
svg { --paper: #1b1f23; --ink: #e6e9ec; --pale: #59636e; --box: #283038; --up: #f0a35e; --down: #6cc4ea } }
text { fill: var(--ink) } .name { font-weight: 600 } .box { fill: var(--box); stroke: var(--pale) }
.line { stroke: var(--pale); fill: none } .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 5px }
.down { stroke: var(--down); fill: none } .up { stroke: var(--up); fill: none } .du { fill: var(--down) }
.uu { fill: var(--up) }
</style>"""


def files() -> dict[Path, str]:
    """Every drawing, by its file."""
    drawn = {"packages": house(), "round": one_round(), "wire": wire()}
    return {FOLDER / f"{name}.svg": text for name, text in drawn.items()}


def house() -> str:
    """The packages: a floor imports only floors below it, and no floor imports a wing."""
    step, left, wide, top = 38, 48, WIDTH - 96, 64
    floors = [*HOUSE.items(), (", ".join(ROOT), "")]
    end = top + step * len(floors)
    parts = [f'<path class="box" d="M{left} {top - 4}L{WIDTH // 2} 12L{left + wide} {top - 4}Z"/>']
    parts.append(_text(WIDTH // 2, 50, "the trunk", "name", "middle"))
    for place, (name, about) in enumerate(floors):
        y = top + step * place
        parts.append(f'<rect class="box" x="{left}" y="{y}" width="{wide}" height="{step - 4}" rx="3"/>')
        parts.append(_text(left + 10, y + (15 if about else 22), name, "name"))
        parts.append(_text(left + 10, y + 29, about, size=12) if about else "")
    for (name, about), x in zip(WINGS.items(), (6, WIDTH - 40), strict=True):
        parts.append(f'<rect class="box" x="{x}" y="{top}" width="34" height="{end - top - 4}" rx="3"/>')
        parts.append(f'<g transform="translate({x + 22} {(top + end) // 2}) rotate(-90)">')
        parts.append(f'<text text-anchor="middle"><tspan class="name">{name}</tspan> {escape(about)}</text></g>')
    parts.append(_text(WIDTH // 2, end + 20, "imports go down; no floor imports a wing", anchor="middle", size=12))
    return _svg("The packages of fedfm, from the commands down to the algebra, with two wings", end + 32, parts)


def one_round() -> str:
    """The messages of one round, from top to bottom."""
    step, top = 34, 56
    at = [32 + 63 * place for place in range(len(PARTIES))]
    end = top + step * len(ROUND) + 8
    parts = []
    for x, (name, half) in zip(at, PARTIES, strict=True):
        parts.append(_text(x, 22, name, "name", "middle", 11.5))
        parts.append(_text(x, 37, half, "", "middle", 11) if half else "")
        parts.append(f'<path class="line" d="M{x} 44V{end}"/>')
    for place, (begin, to, what) in enumerate(ROUND):
        y = top + step * place + 22
        kind = "down" if to > begin else "up"
        half = 3.05 * len(what)  # half of the text's width
        middle = min(max((at[begin] + at[to]) / 2, 6 + half), WIDTH - 6 - half)
        parts.append(_text(middle, y - 7, what, "halo", "middle", 11.5))
        if begin == to:
            parts.append(f'<circle class="{kind[0]}u" cx="{at[to]}" cy="{y}" r="4"/>')
        else:
            parts.append(_arrow(at[begin], y, at[to], y, kind))
    return _svg("One round: which part calls which, from the server's loop to the client's code", end + 10, parts)


def wire() -> str:
    """Three hospitals and a server: what each system sends up and down."""
    parts = ['<rect class="box" x="130" y="14" width="120" height="34" rx="4"/>']
    parts.append(_text(190, 36, "server", "name", "middle"))
    for x, name in ((66, "hospital A"), (190, "hospital B"), (314, "hospital C")):
        parts.append(f'<rect class="box" x="{x - 52}" y="112" width="104" height="34" rx="4"/>')
        parts.append(_text(x, 134, name, "name", "middle"))
        aim = 190 + (x - 190) * 0.35
        parts += [_arrow(x - 6, 110, aim - 6, 52, "up"), _arrow(aim + 6, 52, x + 6, 108, "down")]
    y = 176
    for system, ways in WIRE.items():
        parts.append(f'<path class="line" d="M12 {y - 18}H{WIDTH - 12}"/>')
        parts.append(_text(14, y, system, "name"))
        for kind, label, said in zip(("up", "down"), ("to server", "to hospital"), ways, strict=True):
            y += 20
            parts.append(_text(14, y, label, f"name {kind[0]}u", size=11.5))
            for words in (words.replace("`", "") for _, words in said):
                for line in textwrap.wrap(words, 43):
                    parts.append(_text(92, y, line, size=12))
                    y += 16
                y += 3
            y -= 16
        y += 36
    return _svg("Three hospitals and a server: what each of the five systems sends up and down", y - 14, parts)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img">'
    )
    paper = f'<rect width="{WIDTH}" height="{height:g}" rx="6" style="fill: var(--paper)"/>'
    lines = [head, f"<title>{escape(title)}</title>", _STYLE, paper, *filter(None, parts), "</svg>"]
    return "\n".join(lines) + "\n"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start", size: float = 13) -> str:
    """A line of text; a kind ``uu`` or ``du`` has the colour of its way."""
    kind = f' class="{kind}"' if kind else ""
    colour = re.search(r"\b([ud])u\b", kind)
    style = f' style="fill: var(--{"up" if colour[1] == "u" else "down"})"' if colour else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{kind}{style}>{escape(text)}</text>'


def _arrow(x: float, y: float, to: float, down: float, kind: str) -> str:
    """A line with a head at its end."""
    length = ((to - x) ** 2 + (down - y) ** 2) ** 0.5
    ux, uy = (to - x) / length, (down - y) / length
    bx, by = to - 7 * ux, down - 7 * uy
    tip = f"M{bx - 4 * uy:.1f} {by + 4 * ux:.1f}L{to:.1f} {down:.1f}L{bx + 4 * uy:.1f} {by - 4 * ux:.1f}"
    return f'<path class="{kind}" d="M{x:.1f} {y:.1f}L{to:.1f} {down:.1f}{tip}"/>'
