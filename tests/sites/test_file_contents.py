"""A process that answers for a silo obeys the silo's files as they are now: its settings, its key, its roster."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedfm.config.toml import to_toml
from fedfm.core.wire import payload
from fedfm.engines.flower import client_host, client_stub
from fedfm.engines.folder.letters import Content, shared_key
from fedfm.engines.folder.mailbox import mailboxes
from fedfm.privacy.crypto import keys
from fedfm.privacy.exposure import HELLO
from fedfm.sites.folder_server import SiloDesk

CLASSES = ["a", "b"]
OWN, OTHER, FIRST, SECOND = (bytes([number] * 32) for number in range(1, 5))
EXPERIMENT = to_toml(
    {
        "data": {"path": "x.npz"},
        "model": {"name": "features"},
        "method": {"name": "fedavg", "rounds": 2, "local": {"learning_rate": 0.1}},
    }
)


def public(key: bytes) -> str:
    return keys.identity_of(key).hex()


@pytest.fixture
def silo(tmp_path) -> Path:
    folder = tmp_path / "north"
    folder.mkdir()
    y = np.arange(12) % 2
    np.savez(folder / "rows.npz", x=np.eye(12, dtype=np.float32), y=y, classes=np.array(CLASSES))
    (folder / "silo.key").write_text(OWN.hex())
    (folder / "silo.key").chmod(0o600)
    (folder / "roster.toml").write_text(f'north = "{public(OWN)}"\nsouth = "{public(OTHER)}"\n')
    text = 'name = "north"\ndata = "rows.npz"\nidentity = "silo.key"\nroster = "roster.toml"\n'
    (folder / "silo.toml").write_text(text + f'server = "{public(FIRST)}"\n')
    return folder / "silo.toml"


def hello() -> tuple[str, bytes]:
    head, pieces = payload.encode({"round": 0, "call": 0, "body": {"classes": CLASSES}})
    return head, b"".join(pieces)


def test_a_changed_roster_is_read_before_the_next_answer(silo):
    folder = client_stub.admit({"experiment": EXPERIMENT, "key": "run"}, {"silo": str(silo)}, 1)
    host = client_host.of_folder(folder)[0]

    def answer_hello():
        return payload.decode(*host.answer("", HELLO, *hello()), None)

    def roster():
        client = next(iter(host.silos.population.clients))
        assert client == "north"
        return {*host._own.of_client["roster"]}

    assert "body" in answer_hello()
    assert roster() == {"north", "south"}
    whole = (silo.parent / "roster.toml").read_text()
    (silo.parent / "roster.toml").write_text(whole.splitlines()[0])
    assert "body" in answer_hello()
    assert roster() == {"north"}
    (silo.parent / "roster.toml").write_text(f'north = "{public(OTHER)}"\n')  # it would not know itself
    assert answer_hello()["fault"]["code"] == "E_REFUSED"
    (silo.parent / "roster.toml").write_text(whole)
    assert "body" in answer_hello()
    log = (silo.parent / ".fedfm" / "silo.log").read_text()
    assert log.count("roster.toml changed: silo.toml is read again") == 2
    assert "nothing is answered: " in log


def test_a_desk_leaves_a_server_whose_key_its_owner_replaced(silo, tmp_path):
    said: list[str] = []
    root = tmp_path / "disk"
    root.mkdir()
    desk = SiloDesk(silo, root, said.append)

    def ask(server: bytes, run: str) -> bool:
        """Whether a letter of this server gets an answer."""
        requests, replies = mailboxes(root, "north", shared_key(server, keys.identity_of(OWN)), said.append)
        assert requests.put(run, 1, Content({"handler": HELLO, "experiment": EXPERIMENT}, *hello()))
        desk.answer()
        return replies.holds(run, 1)

    assert ask(FIRST, "a")
    silo.write_text(silo.read_text().replace(public(FIRST), public(SECOND)))
    assert not ask(FIRST, "b")
    assert ask(SECOND, "c")
    whole = silo.read_text()
    silo.write_text(whole.replace("rows.npz", ""))
    assert not ask(SECOND, "d")
    assert desk.answer() == 0
    assert sum("nothing is answered" in text for text in said) == 1  # and not once for each look into the folder
    silo.write_text(whole)
    assert desk.answer() == 1
    assert json.loads((silo.parent / ".fedfm/runs/d/silo/letters.json").read_text())["number"] == 1
