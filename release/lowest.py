"""Compare the lower bounds of pyproject.toml with the lowest versions that can be installed together.

python release/lowest.py        exit 1 where a bound is lower than every version that an installation can have

uv resolves the plain package and each extra with the lowest version of each package that pyproject.toml names. A bound
that no installation reaches was never tried: another package requires a later version.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
TOOLS = ("bench", "docs", "dev")  # extras that nobody installs for a run


def bounds(lines: Iterable[str]) -> dict[str, Version]:
    """The lower bound of each package.

    Raises:
        ValueError: a package has none.
    """
    found = {}
    for line in lines:
        wanted = Requirement(line)
        least = [Version(part.version) for part in wanted.specifier if part.operator in (">=", "==")]
        if not least:
            raise ValueError(f"{line}: no lower bound")
        found[wanted.name.lower()] = max(least)
    return found


def resolve(extra: str = "") -> dict[str, Version]:
    """The versions of all packages, with the lowest of those that pyproject.toml names.

    Raises:
        RuntimeError: no set of versions fits.
    """
    words = ["uv", "pip", "compile", "--quiet", "--resolution", "lowest-direct", "--no-annotate", "--no-header"]
    floor = tomllib.loads(PROJECT.read_text())["project"]["requires-python"].removeprefix(">=")
    words += ["--python-version", floor, *(["--extra", extra] if extra else []), str(PROJECT)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"[{extra}]: {done.stderr}")
    pairs = (line.partition(";")[0].split("==") for line in done.stdout.splitlines() if "==" in line)
    return {name.partition("[")[0].strip(): Version(version.strip()) for name, version in pairs}


def unused_bounds(low: Mapping[str, Version], installed: Iterable[Mapping[str, Version]]) -> dict[str, Version]:
    """Packages whose bound is below all installed versions, with the lowest of these.

    Example:
        >>> unused_bounds({"a": Version("1"), "b": Version("1")}, [{"a": Version("2"), "b": Version("1.0")}])
        {'a': <Version('2')>}
    """
    least: dict[str, Version] = {}
    for versions in installed:
        for name in low.keys() & versions.keys():
            least[name] = min(least.get(name, versions[name]), versions[name])
    return {name: version for name, version in sorted(least.items()) if version > low[name]}


def main() -> int:
    """Print what is wrong; return the exit code."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in TOOLS}
    plain = resolve()
    wrong = unused_bounds(bounds(project["dependencies"]), [plain])
    for name, lines in extras.items():
        wrong |= unused_bounds(bounds(lines), [resolve(name)])
    for name, version in wrong.items():
        print(f"{name}: the lowest version that an installation can have is {version}")
    if not wrong:
        print(
            f"all lower bounds can be installed: plain ({len(plain)} packages), and with each of {len(extras)} extras"
        )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
