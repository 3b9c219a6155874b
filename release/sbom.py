"""Write the bill of materials of an installation: CycloneDX 1.6 in JSON, with each package's licence.

python release/sbom.py [--extra flower ...] [--out dist/fedfm-VERSION.cdx.json]

It reads importlib.metadata of the environment that runs it: fedfm, what it requires, what that requires, and so on. The
serial number follows from the content, so the same environment gives the same file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

SPEC = "1.6"
_SHORT = 100  # a licence field longer than this is the licence's text, not its name


def name_of(text: str) -> str:
    """A package's name in its normal form."""
    return re.sub(r"[-_.]+", "-", text).lower()


def requirements(found: Distribution, extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """What a package requires here, with these of its extras."""
    for text in found.requires or ():
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield wanted


def closure(root: str, extras: Iterable[str] = ()) -> dict[str, tuple[Distribution, set[str]]]:
    """All packages that the root needs, each with the names of those that it requires itself.

    Raises:
        PackageNotFoundError: one of them is not installed.
    """
    found: dict[str, tuple[Distribution, set[str]]] = {}
    seen, left = set[tuple[str, frozenset[str]]](), [(root, frozenset(extras))]
    while left:
        name, wanted = left.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        package, direct = found.setdefault(name, (distribution(name), set()))
        for requirement in requirements(package, wanted):
            direct.add(name_of(requirement.name))
            left.append((name_of(requirement.name), frozenset(requirement.extras)))
    return found


def licences(package: Distribution) -> list[dict[str, Any]]:
    """A package's licence as CycloneDX has it: an SPDX expression, or names."""
    about = package.metadata
    if expression := about.get("License-Expression"):
        return [{"expression": expression}]
    names = [c.split(" :: ")[-1] for c in about.get_all("Classifier") or () if c.startswith("License :: ")]
    field = (about.get("License") or "").strip()
    if not names and field:
        names = [field if len(field) <= _SHORT and "\n" not in field else field.splitlines()[0][:_SHORT]]
    return [{"license": {"name": name}} for name in names]


def component(package: Distribution, kind: str = "library") -> dict[str, Any]:
    """One package."""
    name, version = name_of(package.metadata["Name"]), package.version
    purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    entry = {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return entry | ({"licenses": found} if (found := licences(package)) else {})


def bill(packages: Mapping[str, tuple[Distribution, set[str]]], root: str = "fedfm") -> dict[str, Any]:
    """The bill of materials of these packages."""
    made = {name: component(package) for name, (package, _) in sorted(packages.items())}
    made[root]["type"] = "application"
    refs = {name: entry["bom-ref"] for name, entry in made.items()}
    body = {
        "metadata": {"component": made.pop(root)},
        "components": list(made.values()),
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[other] for other in direct)}
            for name, (_, direct) in sorted(packages.items())
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(body, sort_keys=True))
    return {"bomFormat": "CycloneDX", "specVersion": SPEC, "serialNumber": f"urn:uuid:{serial}", "version": 1} | body


def main(words: list[str] | None = None) -> int:
    """Write the file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", action="append", default=[], help="an extra of fedfm that is installed, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    try:
        packages = closure("fedfm", args.extra)
    except PackageNotFoundError as error:
        print(f"{error.name} is required, but not installed here", file=sys.stderr)
        return 2
    made = bill(packages)
    unsaid = [entry["name"] for entry in made["components"] if "licenses" not in entry]
    out = args.out or Path("dist") / f"fedfm-{made['metadata']['component']['version']}.cdx.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for entry in made["components"]:
        said = [x.get("expression") or x["license"]["name"] for x in entry.get("licenses", ())]
        print(f"{entry['name']:<28} {entry['version']:<16} {'; '.join(said) or 'no licence in its metadata'}")
    print(
        f"{out}: {len(made['components'])} packages" + (f"; without a licence: {', '.join(unsaid)}" if unsaid else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
