"""Which combinations of parameters `make test` takes; `make test-proofs` and `make test-release` take the others.

`@pytest.mark.each_value`: of all combinations so many that each value of each parameter occurs. The others repeat what
these show, and are marked `release`. `@pytest.mark.sample("a", "b")`: those with one of these values; the others are
marked `proof`. `.ci/run` finds the files of long tests by the marks' names in their text.
"""

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import pytest

LONG = re.compile(r"mark\.(proof|sample|simulation|deployment)")  # as in .ci/run


def values(item: pytest.Function) -> dict[tuple[str, ...], tuple[int, ...]]:
    """For each `parametrize` of a test: its names, and which of its values this combination has."""
    marks = [m.args[0] for m in item.iter_markers("parametrize")]
    names = [tuple(n.strip() for n in (m.split(",") if isinstance(m, str) else m)) for m in marks]
    return {each: tuple(id(item.callspec.params[n]) for n in each) for each in names}


def cover(combinations: Sequence[Mapping[Hashable, Hashable]]) -> list[int]:
    """Places of combinations in which each value of each parameter occurs, found greedily from the first one on."""
    left = {pair for c in combinations for pair in c.items()}
    chosen = []
    while left:
        best = max(range(len(combinations)), key=lambda i: (len(left & set(combinations[i].items())), -i))
        chosen.append(best)
        left -= set(combinations[best].items())
    return sorted(chosen)


def mark(items: Sequence[pytest.Function]) -> None:
    """Mark what `make test` leaves to longer targets."""
    products = defaultdict(list)
    for item in items:
        if item.get_closest_marker("each_value"):
            products[item.nodeid.split("[")[0]].append(item)
        if (sample := item.get_closest_marker("sample")) and not (
            set(sample.args) & {item.callspec.id, *map(str, item.callspec.params.values())}
        ):
            item.add_marker("proof")
    for product in products.values():
        chosen = cover([values(item) for item in product])
        for i, item in enumerate(product):
            if i not in chosen:
                item.add_marker("release")
    marks = ("proof", "simulation", "deployment")
    for path in {item.path for item in items if any(map(item.get_closest_marker, marks))}:
        if not LONG.search(path.read_text(encoding="utf-8")):
            raise pytest.UsageError(f"{path}: .ci/run finds long tests by pytest.mark.NAME in their file")
