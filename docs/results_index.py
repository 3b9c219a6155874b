"""docs/results/index.md, from the JSON files beside the pages, and the pages that are written from theirs alone."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
REPRODUCE = ROOT / "reproduce"
sys.path[:0] = [str(ROOT / "benchmarks"), str(REPRODUCE)]

import common  # noqa: E402
import gpu_page  # noqa: E402
import secagg_page  # noqa: E402
from claims import NO_CLAIMS, left_out, reasons, verdicts  # noqa: E402
from rates import EDGE  # noqa: E402

PAGES = {
    "performance": ("Speed and memory", "all measurements with their goals, also those that miss"),
    "gpu": ("On a GPU", "rounds of LoRA of 1.2 B and 8 B, compared with TRL and FlowerTune"),
    "fedpft": ("FedPFT", "FedPFT and its baselines on four data sets"),
    "fedbaf": ("FedBaF", "FedBaF against no foundation model and against weight initialisation"),
    "fedbaf-secrecy": ("FedBaF's secret", "what clients can compute of the foundation model"),
    "fedbip": ("FedBip", "FedBip against local training, one model for all and other personalised methods"),
    "fedms": ("FedMS", "FedMS against fine-tuning, prompts and local training of a small CLIP, also under attack"),
    "fedms-traffic": ("FedMS's traffic", "what FedMS and its baselines train and send, and how long that takes"),
    "blindfed": ("BlindFed", "side adapters on a model that clients do not see, against a linear head"),
    "blindfed-twin": (
        "BlindFed's polynomials",
        "what nano-vit-fhe loses against nano-vit; exp and 1 / x by degree",
    ),
    "blindfed-vit-tiny": (
        "BlindFed with a ViT-tiny",
        "its polynomial student, one batch of encrypted pictures block by block, and Table 4",
    ),
    "blindfed-texts": ("BlindFed with texts", "a MiniLM's student on banking77, and one batch of encrypted texts"),
    "tasks": ("Tasks", "each task federated and with clients that train alone"),
    "one-shot": ("One round", "accuracy of the one-round methods against bytes and epsilon on five sets of features"),
    "privacy": ("Accuracy against epsilon", "record and client level, plain and hidden sums, FedPFT's one release"),
    "secure-aggregation": (
        "Secure aggregation",
        "sums under dropouts at every message, and servers that cheat",
    ),
    "campaign": ("The campaign", "kills, damage, faults and attacks at full size"),
}
FEDBAF = ("fedbaf_psi_1.iid", "none.iid", "weight_init.iid")
HELD_OUT = ("held_out", "jpeg", "unseen")
INTRODUCTION = """# Results

<!-- Written by docs/generate.py from the JSON files of docs/results: change these, then run it again. -->

Each row names the command that made it. Rows come only from runs of this code. Measurements of speed are of both kinds
of processor on which they were made; `-` stands where one was not used.
"""
DEMO_TIME = (
    "The demo adapts the built-in model by LoRA over ten clients with skewed digits. On two cores it took {took}. It "
    "printed:"
)
DEMO = """## The demo

{took}

```text
{table}
```

`global` is the accuracy on all test rows; `local` is the mean accuracy of the clients' models on their own test rows. A
client alone does well on its own few classes and fails on the others.
"""
WHY = """\
- The ratios of LoRA and of heads depend on the processor: where the matrix products of the plain loop already run at
  the peak, less is left to gain. Without AMX, bfloat16 multiplies at half the speed of float32; `fedfm doctor` shows
  it.
- `secagg_compact` is about the default. `compact` halves the bytes of a client, and no bound serves all runs: where the
  figure is above 1, a bound that is small enough for the error of one run refuses updates of another
  ([figures](performance.md#secure-aggregation-with-32-bits-an-entry)).
- The rows of the GPU with all logits at once are of before the loss took logits in pieces.
"""


def index() -> str:
    """The page."""
    parts = [INTRODUCTION, _table(("what", "figure", "command"), headlines()), "## The pages\n"]
    parts.append(_table(("page", "what"), [(f"[{title}]({name}.md)", what) for name, (title, what) in PAGES.items()]))
    parts += ["## Goals that are missed\n", _goals(), "## Claims of the papers\n", _claims()]
    parts += [_demo(), "```{toctree}\n:hidden:\n\n" + "\n".join(PAGES) + "\n```\n"]
    return "\n".join(parts)


def pages() -> dict[Path, str]:
    """The index, and each page that follows from its JSON alone."""
    return {
        RESULTS / "index.md": index(),
        RESULTS / "gpu.md": gpu_page.page(_results("gpu")),
        RESULTS / "secure-aggregation.md": secagg_page.page(_results("secure-aggregation")),
    }


# --- figures ----------------------------------------------------------------------------------------------------------


def headlines() -> list[tuple[str, str, str]]:
    """What was measured, the figure, and the command."""
    printed = dict(re.findall(r"^(fedavg\S*) +fedavg +(\S+)", "\n".join(_results("demo")["printed"]), re.M))
    return [
        (
            "Built-in model, digits, 10 clients, Dirichlet(0.1), LoRA, 10 rounds of FedAvg: accuracy from pretrained "
            "weights, from random weights",
            ", ".join(f"{float(printed[run]):.3f}" for run in ("fedavg", "fedavg-random-weights")),
            "make demo",
        ),
        (
            "One round of MiniLM LoRA (r = 8, AdamW, batch 16, 10 clients of 64 rows) against a hand-written PyTorch + "
            "PEFT loop, CPU time, one thread",
            _by_cpu(lambda cpu: "{:.1f} times faster; bf16 {:.1f}; in the last two layers {:.1f}".format(
                *_goal_values("lora", cpu), *_goal_values("lora_last_layers", cpu))),
            "python benchmarks/run.py --only lora lora_last_layers",
        ),
        (
            "The same against Flower's simulation as its examples are written, wall-clock time, two cores",
            _by_cpu(lambda cpu: "{:.1f} times faster; bf16 {:.1f}".format(*_goal_values("flower_lora", cpu))),
            "python benchmarks/run.py --only flower_lora",
        ),
        (
            "One round of FedPFT, CIFAR-10 features of a ViT-tiny, 50 clients, Dirichlet(0.1), three or ten seeds: "
            "accuracy and traffic with ten diagonal components, with one spherical component; private at epsilon "
            "1; centralised",
            _fedpft(),
            "python reproduce/run.py fedpft --only table5_cifar10",
        ),
        (
            "FedBaF, small pre-activation ResNet, CIFAR-10 at 16 px, 20 clients, iid, five seeds: accuracy; "
            "without a foundation model; with its weights sent to all",
            "; ".join(f"{mean('fedbaf', 'table3', row):.3f}" for row in FEDBAF),
            "python reproduce/run.py fedbaf --only table3",
        ),
        (
            "FedBip, PACS features of a ViT-tiny, 24 clients of 14 rows, half of them with other class names, "
            f"{len(_results('fedbip')['vision']['rows']['fedbip.contradict'])} seeds, mean accuracy of the clients' "
            "models: FedBip; local; FedAvg with a last local pass, "
            "without; FedAMP; FedALA; FedAvg in each group",
            _fedbip(),
            "python reproduce/run.py fedbip --only vision oracle",
        ),
        (
            "The same with one client for each domain, four clients of 70 rows: FedBip; local",
            f"{_own('fedbip.domains')}; {_own('local.domains')}",
            "python reproduce/run.py fedbip --only vision",
        ),
        (
            f"nano-vit-fhe against nano-vit, linear probes on the same folds, {_twin()[0]:,} held-out pictures of "
            "six sets: difference in points, its standard error",
            "{1:.1f}, {2:.1f}".format(*_twin()),
            "python reproduce/blindfed/twin.py",
        ),
        (
            "The foundation model of a FedBaF run (a two-layer network, two seeds), computed by all clients "
            "together: relative error",
            _extraction(),
            "python reproduce/fedbaf/extraction.py",
        ),
        (
            "Mixtures of many classes against scikit-learn's, one class after another, one thread, K = 1, 5, 10 "
            "(diagonal, 192 features)",
            _by_cpu(lambda cpu: "{:.1f}, {:.1f}, {:.1f} times faster".format(*_goal_values("mixtures", cpu)[:3])),
            "python benchmarks/run.py --only mixtures",
        ),
        (
            "One message to a client and back on the local engine, microseconds of CPU; with a million floats "
            "(the scan of the floats for NaN is extra)",
            _by_cpu(lambda cpu: "{:.1f}; {:.1f}".format(*_goal_values("messages", cpu))),
            "python benchmarks/run.py --only messages",
        ),
    ]  # fmt: skip


def mean(page: str, table: str, row: str, key: str = "accuracy", scale: float = 0.01) -> float:
    """The mean of a figure over the seeds of a row."""
    return scale * statistics.fmean(kept[key] for kept in _results(page)[table]["rows"][row].values())


def _fedpft() -> str:
    table = "table5_cifar10"
    sent = [
        f"{mean('fedpft', table, row):.3f} for {mean('fedpft', table, row, 'megabytes_up', 1.0):.2f} MB"
        for row in ("fedpft_diag_10", "fedpft_spherical_1")
    ]
    rest = [f"{mean('fedpft', table, row):.3f}" for row in ("fedpft_private_eps1", "centralised")]
    return "; ".join([", ".join(sent), *rest])


def _extraction() -> str:
    found = statistics.fmean(run["all"] for run in _results("fedbaf-secrecy")["as printed"]["IID"])
    return f"{found:.0e}".replace("e-0", "e-")


def _own(row: str) -> str:
    return f"{mean('fedbip', 'vision', row, 'own'):.3f}"


def _fedbip() -> str:
    shared = f"{mean('fedbip', 'vision', 'fedavg.contradict', 'start'):.3f}"
    groups = [mean("fedbip", "oracle", f"fedavg.contradict_{group}", "own") for group in ("plain", "turned")]
    first = [_own(f"{method}.contradict") for method in ("fedbip", "local", "fedavg")]
    rest = [_own(f"{method}.contradict") for method in ("fedamp", "fedala")]
    return f"{'; '.join(first)}, {shared}; {'; '.join(rest)}; {statistics.fmean(groups):.3f}"


def _twin() -> tuple[int, float, float]:
    """Held-out pictures, the mean of the differences by their rows, and its standard error: independent sets."""
    sets = [(p["rows"], p) for of in _results("blindfed-twin").values() for kind, p in of.items() if kind in HELD_OUT]
    n = sum(rows for rows, _ in sets)
    error = sum((rows * p["error"]) ** 2 for rows, p in sets) ** 0.5 / n
    return n, abs(sum(rows * p["difference"] for rows, p in sets) / n), error


def _goal_values(benchmark: str, cpu: str) -> list[float]:
    """The measured values of a benchmark's goals, in the goals' order."""
    return [goal["measured"] for goal in _results("performance")[benchmark][cpu]["goals"]]


def _by_cpu(say: Callable[[str], str]) -> str:
    """A figure of each processor."""
    return ". ".join(f"{_short(cpu)}: {say(cpu)}" for cpu in _processors())


# --- misses -----------------------------------------------------------------------------------------------------------


def _goals() -> str:
    """Each goal that a processor misses, with what the other one measured."""
    rows = list(missed_goals())
    processors = _processors()
    head = ("measurement", "goal", "wanted", *map(_short, processors))
    cells = [(name, goal, wanted, *(found.get(cpu, "-") for cpu in processors)) for name, goal, wanted, found in rows]
    gpu = [
        (f"gpu, {name}", goal["goal"], goal["wanted"], f"{goal['measured']:.3g}, {common.verdict(goal)}")
        for name in gpu_page.TITLES
        for goal in gpu_page.goals(_results("gpu").get(name, {"rows": []}))
        if not goal["met"]
    ]
    count = f"{len(rows)} of {sum(1 for _ in _every_goal())}"
    said = f"{count} goals are missed on a processor, {len(gpu)} on a GPU; [all of speed](performance.md#goals)."
    parts = [said, "", _table(head, cells)]
    if gpu:
        parts += [_table(("measurement", "goal", "wanted", _results("gpu")["1B"]["machine"]["gpu"]), gpu)]
    return "\n".join([*parts, WHY])


def _every_goal() -> Iterator[tuple[str, str, str, dict[str, dict[str, Any]]]]:
    """Benchmark, goal, what is wanted, and the goal on each processor."""
    for name, by_cpu in (_results("performance") | {"secagg_gate": _gate()}).items():
        found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        for cpu, result in by_cpu.items():
            for goal in result.get("goals", []):
                found.setdefault((goal["goal"], goal["wanted"]), {})[cpu] = goal
        for (goal_name, wanted), of in found.items():
            yield name, goal_name, wanted, of


def _gate() -> dict[str, Any]:
    """Secure aggregation's own page, as the other ones by processor."""
    result = _results("secure-aggregation")
    return {result["machine"]["cpu"]: result}


def missed_goals() -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """Benchmark, goal, what is wanted, and what each processor measured: of goals that one of them misses."""
    for name, goal, wanted, of in _every_goal():
        if not all(found["met"] for found in of.values()):
            said = {cpu: f"{found['measured']:.3g}, {common.verdict(found)}" for cpu, found in of.items()}
            yield name, goal, wanted, said


def _claims() -> str:
    """How many claims of each page hold, every one that does not, and how many comparisons are no claims."""
    counts, lines = [], []
    for name, checks in claims().items():
        kinds = Counter(re.split("[:,]", check["verdict"])[0] for check in checks)
        edges = sum(check["verdict"].endswith(EDGE) for check in checks)
        of = [kinds[kind] for kind in KINDS]
        few = sum(int(found[1]) <= FEW for c in checks if (found := FEW_SEEDS.search(c["verdict"])))
        if others := set(kinds) - set(KINDS):
            raise ValueError(f"{name}: no column for {sorted(others)}")
        without, why = no_claims()[name]
        page = f"[{PAGES[name][0]}]({name}.md#the-claims)"
        beside = f"{without} ([{why}]({name}.md#{NO_CLAIMS.lower().replace(' ', '-')}))" if without else "0"
        counts.append((page, *map(str, (*of, few, edges)), beside))
        lines += [
            (PAGES[name][0], _cell(c["claim"]), _cell(c["what"]), c["bound"], c["measured"], c["seeds"])
            for c in checks
            if c["verdict"].startswith("does not hold")
        ]
    parts = [gpu_page.wrap_lines(CLAIMS), "", _table((*HEADINGS, "no claims"), counts)]
    parts += ["Every claim that does not hold, in points:", "", _table(LINE, lines)]
    return "\n".join(parts)


KINDS = ("holds", "does not hold", "open", "one seed")
FEW = 20
FEW_SEEDS = re.compile(r"\((\d+) seeds\)")
HEADINGS = ("page", "hold", "do not hold", "open", "one seed", f"open, {FEW} seeds", "of these at a grid's edge")
CLAIMS = (
    "A page compares rows seed by seed with a bound. A claim *holds* or *does not hold* where the whole 95 % interval "
    f"lies on that side; else it is *open*. *Open, {FEW} seeds*: so many seeds or fewer would decide the claim if its "
    "mean and standard deviation stayed what they are; the page says how many. A comparison is a claim only if the "
    "rate of each of its rows was chosen on validation rows at that row's own point; *no claims* counts the others, "
    "with the reason. *At a grid's edge*: the best rate that was tried was the last one of its grid."
)
LINE = ("page", "claim", "what", "bound", "measured", "seeds")


def claims() -> dict[str, list[dict[str, str]]]:
    """Page -> its claims with their verdicts."""
    return {name: verdicts(*of) for name, of in _checks_by_page().items()}


def no_claims() -> dict[str, tuple[int, str]]:
    """Page -> how many of its comparisons are no claims, and why."""
    return {name: (len(left_out(*of)), reasons(*of)) for name, of in _checks_by_page().items()}


def _checks_by_page() -> dict[str, tuple[Any, Any, Any]]:
    """Page -> its checks, its figures, and what is to be doubted of their rates."""
    out = {}
    reproduced = _reproduce()
    for path in sorted(REPRODUCE.glob("*/tables.json")):
        about, name = json.loads(path.read_text(encoding="utf-8")), path.parent.name.replace("_", "-")
        if about.get("claims") and name in PAGES:
            page = _results(name)
            out[name] = about["claims"], reproduced.figures(page), reproduced.doubtful(page)
    return out


def _reproduce() -> Any:
    """reproduce/run.py, by its path: benchmarks/ has a module of this name, too."""
    spec = importlib.util.spec_from_file_location("reproduce_run", REPRODUCE / "run.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(REPRODUCE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _demo() -> str:
    """What the demo printed."""
    kept = _results("demo")
    *first, last = kept["took"]
    took = gpu_page.wrap_lines(DEMO_TIME.format(took=f"{', '.join(first)} and {last}"))
    return DEMO.format(took=took, table="\n".join(kept["printed"]))


# --- words ------------------------------------------------------------------------------------------------------------


def _results(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def _processors() -> list[str]:
    return sorted({cpu for by_cpu in _results("performance").values() for cpu in by_cpu})


def _short(cpu: str) -> str:
    return cpu.replace("(R)", "").replace(" Processor", "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    """A table in Markdown; the cells under the heading ``command`` are code."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [f"`{cell}`" if title == "command" else cell for title, cell in zip(head, row, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
