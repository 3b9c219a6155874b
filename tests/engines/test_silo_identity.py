"""A silo's lasting key and its roster: the files, and runs of real sites in which the server shows other keys."""

from __future__ import annotations

import json
import stat

import pytest
from test_silo_terms import NAMES, SECAGG, Federation

from fedfm.cli.entry import main
from fedfm.engines.flower.private_api import identity
from fedfm.errors import InputError, RunError
from fedfm.privacy.crypto import keys
from fedfm.sites import identity as silo_identity
from fedfm.sites import silo_config

KEYS = {"identity": "silo.key", "roster": "../roster.toml"}


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


def agreed(folder, **other):
    """Three silos whose owners made keys, and told one another; ``other`` replaces keys of the roster."""
    federation = Federation(folder, identity="silo.key")
    public = {}
    for name in NAMES:
        public[name] = silo_config.report(folder / name / "silo.toml")["public_key"]
        federation.write(name, **KEYS)
    (folder / "roster.toml").write_text("".join(f'{n} = "{key}"\n' for n, key in (public | other).items()))
    return federation, public


def test_the_key_is_made_once_and_for_its_owner_only(tmp_path, capsys):
    federation = Federation(tmp_path, identity="keys/silo.key")
    path = tmp_path / "north" / "silo.toml"
    (tmp_path / "north" / "keys").mkdir()
    assert main(["silo", "check", str(path), "--format", "json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])["public_key"]
    key = tmp_path / "north" / "keys" / "silo.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert keys.identity_of(bytes.fromhex(key.read_text().strip())).hex() == first
    assert silo_config.report(path)["public_key"] == first
    found = silo_config.render(silo_config.report(path))
    assert f"signs as {first}" in found
    assert "trusts the other silos' keys on first use" in found
    federation.write("north")
    assert "signs as a new key in each run" in silo_config.render(silo_config.report(path))


def test_files_that_cannot_be_used_are_named(tmp_path):
    agreed(tmp_path)
    path, key, roster = tmp_path / "north" / "silo.toml", tmp_path / "north" / "silo.key", tmp_path / "roster.toml"
    silo = silo_config.load(path)
    assert sorted(silo_identity.of(silo).roster) == sorted(NAMES)
    table = {name: value.hex() for name, value in silo_identity.of(silo).roster.items()}
    (tmp_path / "roster.json").write_text(json.dumps(table))
    (tmp_path / "other.toml").write_text(path.read_text().replace("roster.toml", "roster.json"))

    def refused(reason):
        with pytest.raises(InputError, match=reason):
            silo_identity.of(silo)

    twice = json.dumps(table)[:-1] + f', "north": "{"ab" * 32}"}}'
    (tmp_path / "twice.json").write_text(twice)
    with pytest.raises(InputError, match="a name occurs twice"):
        silo_identity.of(silo.__class__(**vars(silo) | {"roster": str(tmp_path / "twice.json")}))
    as_json = silo_config.load(path).__class__(**vars(silo) | {"roster": str(tmp_path / "roster.json")})
    assert silo_identity.of(as_json) == silo_identity.of(silo)
    text = roster.read_text()
    for bad, reason in (
        ("", "has no silos"),
        ("north = 3\n", "the key of north is not 64"),
        ("north.east = 'x'\n", "quote names with dots"),
        ("north", "roster: .* cannot be read"),
        (text.replace(table["north"], "ab" * 32), "north has the key"),
        (text.replace(table["north"], table["south"]), "have the same key, so one silo would count twice"),
        (text + f"North = '{'ab' * 32}'\n", "north and North are alike"),
    ):
        roster.write_text(bad)
        refused(reason)
    roster.write_text(text)
    key.chmod(0o640)
    refused("is open to other users")
    key.chmod(0o600)
    key.write_text("abc")
    refused("is not 64 hexadecimal digits")
    key.unlink()
    refused("does not exist; `fedfm silo check` creates it")
    alone = silo.__class__(**vars(silo) | {"identity": ""})
    with pytest.raises(InputError, match="set identity"):
        silo_identity.of(alone)


def test_silos_with_a_roster_trust_nobody_on_first_use(tmp_path):
    federation, _ = agreed(tmp_path)
    result = federation.run(**SECAGG)
    assert result["rounds"] == 2
    manifest = json.loads((federation.directory / "manifest.json").read_text())
    assert not [notice for notice in manifest["notices"] if "first use" in notice]
    assert all("first use" not in federation.log(name) for name in NAMES)


def test_without_a_roster_the_manifest_and_the_log_say_so_with_fingerprints(tmp_path):
    federation = Federation(tmp_path)
    federation.run(**SECAGG)
    manifest = json.loads((federation.directory / "manifest.json").read_text())
    (notice,) = [notice for notice in manifest["notices"] if "trust identities on first use" in notice]
    for name in NAMES:
        print_of = notice.split(f"{name} ")[1][:16]
        assert bytes.fromhex(print_of)
        for other in set(NAMES) - {name}:
            assert f"{name} {print_of}" in federation.log(other)


def test_a_key_that_is_not_the_rosters_ends_the_run_with_the_name(tmp_path):
    """As if the server had put its own key in the place of east's."""
    federation, _ = agreed(tmp_path)
    other = keys.identity_of(keys.entropy(32)).hex()
    text = (tmp_path / "roster.toml").read_text().splitlines()
    (tmp_path / "south.toml").write_text("\n".join(f'east = "{other}"' if x.startswith("east") else x for x in text))
    federation.write("south", identity="silo.key", roster="../south.toml")
    with pytest.raises(RunError):
        federation.run(**SECAGG)
    log = federation.log("south")
    assert (
        "aggregate.SecAgg_share is not answered: E_REFUSED: secure aggregation: the server shows a key of east" in log
    )
    assert "that differs from the roster's" in log
