"""The bill of materials: what an installation of fedfm has, with licences, as CycloneDX says it."""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("sbom", ROOT / "release" / "sbom.py")
sbom = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sbom)
VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()))
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("sbom") / "fedfm.cdx.json"
    assert sbom.main(["--out", str(out)]) == 0
    return out


def test_the_bill_names_each_package_once_with_version_licence_and_requirements(written):
    bill = json.loads(written.read_text())
    root = bill["metadata"]["component"]
    assert (root["name"], root["version"]) == ("fedfm", version("fedfm"))
    found = {entry["name"]: entry for entry in bill["components"]}
    assert len(found) == len(bill["components"])
    assert {"torch", "transformers", "peft", "numpy"} <= set(found)
    assert "flwr" not in found  # an extra
    assert all(version(name) == entry["version"] for name, entry in found.items())
    assert all(entry["licenses"] for entry in found.values())
    refs = {entry["bom-ref"] for entry in (root, *bill["components"])}
    assert {d["ref"] for d in bill["dependencies"]} == refs
    assert {ref for d in bill["dependencies"] for ref in d["dependsOn"]} | {root["bom-ref"]} == refs


def test_the_same_environment_gives_the_same_file_and_an_extra_adds_its_packages(written, tmp_path):
    assert sbom.main(["--out", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_text() == written.read_text()
    assert sbom.main(["--extra", "flower", "--out", str(tmp_path / "flower.json")]) == 0
    assert "pkg:pypi/flwr@" in (tmp_path / "flower.json").read_text()


@pytest.mark.release
def test_the_bill_is_valid_cyclonedx(written, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "v"], check=True)
    python = tmp_path / "v/bin/python"
    wanted = "cyclonedx-python-lib[json-validation]==11.4.0"
    done = subprocess.run([python, "-m", "pip", "install", "-q", wanted], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the validator could not be installed: {done.stderr[-200:]}")
    done = subprocess.run([python, "-c", VALIDATE, written], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
