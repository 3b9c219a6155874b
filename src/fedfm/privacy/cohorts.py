"""Draw the cohorts on which a run's privacy depends: by secret coins, or by a fixed rotation."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

from fedfm import seeds


def by_coins(key: bytes, round: int, names: Sequence[str], rate: float) -> list[str]:
    """Draw each name with probability ``rate``, independently. This is Poisson sampling; the epsilon accounts for it.

    The coins disclose the cohort, so they come from a secret key and not from the experiment's seed. A coin
    depends on key, round and name alone: a repeated round asks the same clients.

    Args:
        key: the server's secret.
        rate: q; a coin compares 53 bits of an HMAC-SHA256 with q.
    """
    least = int(rate * 2.0**53)

    def takes_part(name: str) -> bool:
        drawn = hmac.digest(key, f"cohort\x1f{round}\x1f{name}".encode(), "sha256")
        return int.from_bytes(drawn[:8], "little") >> 11 < least

    return [name for name in names if takes_part(name)]


def rotation(seed: int, names: Sequence[str], period: int, known: Mapping[str, int]) -> dict[str, int]:
    """A group 0, ..., period - 1 for each name. Group sizes differ by at most one; known names keep their groups.

    The experiment's seed determines the order in which groups are filled: groups are not secret.
    """
    groups = {name: known[name] for name in names if name in known}
    new = [name for name in names if name not in known]
    sizes = [sum(group == i for group in groups.values()) for i in range(period)]
    for at in seeds.generator(seed, "server", "rotation").permutation(len(new)):
        smallest = sizes.index(min(sizes))
        groups[new[at]] = smallest
        sizes[smallest] += 1
    return groups
