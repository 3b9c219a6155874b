"""Files of version 0.1.0 are read, and files of a later version are refused with both numbers.

``tests/formats/made_by_0.1.0.tar.gz`` has what the code of commit 2cb60641 (28 November 2026) wrote: ``fedfm run`` of
FedAvg with two clients on 60 rows of four Gaussian numbers, ``fedfm sign``, ``fedfm provision``; two lines of a ledger;
and a letter of a server with the private key of bytes 0 to 31 to a silo with that of bytes 1 to 32.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

import fedfm
from fedfm.cli import main
from fedfm.engines.flower import kit_manifest
from fedfm.engines.folder import letters
from fedfm.errors import ClientFault, InputError
from fedfm.privacy.crypto import keys
from fedfm.privacy.policy import Budget
from fedfm.reports import read
from fedfm.runtime import run_folder
from fedfm.sites.ledger import VERSION, Cost, Entry, Ledger, entries

OLD = Path(__file__).parents[1] / "formats" / "made_by_0.1.0.tar.gz"


@pytest.fixture
def old(tmp_path, monkeypatch):
    """The files, in the folder that the test works in, since the run names its rows relatively."""
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "silo.toml").write_text('name = "a"\ndata = "rows.npz"\nledger = "ledger.jsonl"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def called(capsys, *words):
    """(exit code, last line of stdout as JSON, stderr) of a command."""
    code = main([*words, "--format", "json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]) if out.strip() else None, err


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_run_is_verified_shown_used_and_continued(old, capsys):
    assert json.loads((old / "run/manifest.json").read_text())["fedfm"] == "0.1.0"
    code, found, _ = called(capsys, "verify", "run", "--key", "key.pem.pub")
    assert (code, found["valid"]) == (0, True)
    assert main(["report", "run"]) == 0
    first = called(capsys, "predict", "run", "rows.npz")
    assert first[0] == 0
    code, result, _ = called(capsys, "resume", "run")
    assert (code, result["rounds"], round(result["accuracy"], 4)) == (0, 2, 0.6667)
    code, result, _ = called(capsys, "resume", "run", "--rounds", "3")
    assert (code, result["rounds"]) == (0, 3)
    code, found, _ = called(capsys, "verify", "run", "--key", "key.pem.pub")
    assert (code, found["valid"]) == (1, False)  # it has a round more than was signed


@pytest.mark.parametrize(
    "words", [("report", "run"), ("predict", "run", "rows.npz"), ("resume", "run"), ("audit", "run")]
)
def test_a_run_of_a_later_schema_is_refused(words, old, capsys):
    assert run_folder.SCHEMA == read.SCHEMA
    change(old / "run/manifest.json", schema=run_folder.SCHEMA + 1)
    assert main([*words]) == 2
    err = capsys.readouterr().err
    assert f"its schema is {run_folder.SCHEMA + 1}, " in err
    assert f" {run_folder.SCHEMA}; use the release " in err


def test_a_signature_of_a_later_version_is_refused(old, capsys):
    change(old / "run/signature.json", version=2)
    assert main(["verify", "run"]) == 2
    assert "it has version 2, but this release reads up to 1" in capsys.readouterr().err


def test_a_kit_is_read_and_one_of_a_later_schema_or_with_other_keys_is_refused(old):
    assert kit_manifest.load(old) == kit_manifest.Kit("a", "127.0.0.1:9876", 9194, True, False, old)
    change(old / "kit.json", more=1)
    with pytest.raises(InputError, match=r"kit.json is damaged: 'more' is not a key of it"):
        kit_manifest.load(old)
    change(old / "kit.json", schema=kit_manifest.SCHEMA + 1)
    with pytest.raises(
        InputError, match="its schema is 2, and this fedfm reads 1; use the version that made the kit, or"
    ):
        kit_manifest.load(old)


def test_a_ledger_without_versions_and_one_of_version_1_count_the_same(old, capsys):
    shown = called(capsys, "silo", "show", "silo.toml")
    assert shown[0] == 0
    total = shown[1]["total"]
    assert (total["messages"], total["bytes"], total["rounds"]) == (2, 2000, 2)
    assert total["epsilon"] > 0
    lines = [json.loads(line) for line in (old / "ledger.jsonl").read_text().splitlines()]
    assert not any("version" in line or "concentrated" in line["cost"] for line in lines)
    (old / "ledger.jsonl").write_text("".join(json.dumps(line | {"version": 1}) + "\n" for line in lines))
    assert called(capsys, "silo", "show", "silo.toml")[1] == shown[1]


def entry():
    cost = Cost("record", "add_or_remove", 1.0, 1.0, 1, "silo", concentrated=True)
    where = {"time": "2026-11-29T12:00:00+0000", "run": "run-2", "experiment": "0" * 64, "round": 1, "call": 0}
    what = {"method": "fedavg", "handler": "train.train", "exposes": "mean", "form": "masked", "bytes": 10}
    return Entry(**where, **what, sha256="0" * 64, epsilon=None, cost=cost)


def test_a_line_that_an_older_version_would_count_too_low_has_a_number_that_it_refuses(old):
    Ledger(old / "ledger.jsonl", Budget()).enter(entry())
    *before, last = [json.loads(line) for line in (old / "ledger.jsonl").read_text().splitlines()]
    assert len(before) == 2
    assert last["version"] == VERSION == 2  # version 1 has no `concentrated`
    assert [one.cost.concentrated for one in entries(old / "ledger.jsonl")] == [False, False, True]


def test_a_ledger_of_a_later_version_is_refused_and_nothing_leaves(old, capsys):
    with (old / "ledger.jsonl").open("a") as file:
        file.write(json.dumps({"version": VERSION + 1, "new": True}) + "\n")
    assert main(["silo", "show", "silo.toml"]) == 2
    assert f"line 3 has version {VERSION + 1}, and this fedfm reads up to {VERSION}" in capsys.readouterr().err
    with pytest.raises(ClientFault, match="a later version of fedfm wrote it: nothing leaves"):
        Ledger(old / "ledger.jsonl", Budget()).enter(entry())


def test_a_letter_is_opened_and_one_of_a_later_version_is_none(old):
    key = letters.shared_key(bytes(range(1, 33)), keys.identity_of(bytes(range(32))))
    with letters.Letter(old / "letter") as letter:
        assert (letter.header.kind, letter.header.sender, letter.header.receiver) == ("request", "server", "a")
        content = letter.content(key)
    assert (content.front, content.head, content.data) == ({"handler": "x", "experiment": "e"}, "[]", b"abc")
    data = (old / "letter").read_bytes()
    (old / "letter").write_bytes(data.replace(b"fedfm letter 1\n", b"fedfm letter 2\n", 1))
    with pytest.raises(ValueError, match="not a letter of this version of the format"):
        letters.Letter(old / "letter")


def test_a_polynomial_student_of_a_later_version_is_refused(old, capsys):
    model = shutil.copytree(Path(fedfm.__file__).parent / "models/nano_vit_fhe", old / "student")
    config = json.loads((model / "config.json").read_text())
    (key,) = (key for key, value in config.items() if isinstance(value, dict) and "blocks" in value)
    change(model / "config.json", **{key: config[key] | {"version": 2}})
    tables = '[data]\nname = "digits"\nlimit = 40\n[model]\nname = "student"\n[method]\nname = "fedavg"\n'
    (old / "e.toml").write_text(tables)
    assert main(["check", "e.toml"]) == 2
    assert "it has version 2, but this fedfm reads 1" in capsys.readouterr().err
