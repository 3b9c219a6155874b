"""Letters of the engine `folder`: which letters open, and for whom."""

from __future__ import annotations

import os
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedfm.engines.folder import letters
from fedfm.engines.folder.letters import REPLY, REQUEST, SERVER, Content, Header, Letter, Unfinished, seal, shared_key
from fedfm.engines.folder.mailbox import Mailbox
from fedfm.errors import InputError, RunError
from fedfm.privacy.crypto import keys

SILO = Header(REQUEST, SERVER, "north", "run-1", 3, 0)
TEXT = Content({"handler": "train.x", "experiment": "e"}, '{"m":{}}', bytes(range(256)) * 5)


@pytest.fixture
def key():
    return shared_key(bytes(32), keys.identity_of(bytes([1] * 32)))


@pytest.fixture
def written(tmp_path, key, monkeypatch):
    monkeypatch.setattr(letters, "PIECE", 500)
    path = tmp_path / "x.letter"
    path.write_bytes(b"".join(seal(key, SILO, TEXT)))
    return path


def content(path, key):
    with Letter(path) as letter:
        return letter.header, letter.content(key)


def test_a_signing_key_has_one_key_for_agreement():
    """The public half by the curves' map equals the library's own, of the private half."""
    for number in range(20):
        private = bytes([number] * 32)
        identity = Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
        assert keys.exchange_public_of(identity) == keys.public_of(keys.exchange_of(private))
    a, b = bytes([1] * 32), bytes([2] * 32)
    assert shared_key(a, keys.identity_of(b)) == shared_key(b, keys.identity_of(a))
    with pytest.raises(InputError, match="is not a public key"):
        shared_key(a, (1).to_bytes(32, "little"))


def test_a_letter_comes_as_it_was_sent(written, key):
    header, found = content(written, key)
    assert found == TEXT
    assert (header.kind, header.sender, header.receiver, header.run, header.number) == tuple(vars(SILO).values())[:5]
    assert TEXT.data[:32] not in written.read_bytes()


def test_every_shorter_file_is_unfinished(written, key):
    whole = written.read_bytes()
    for size in [*range(0, 170, 3), len(whole) - 1]:
        written.write_bytes(whole[:size])
        with pytest.raises(Unfinished):
            content(written, key)
    written.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="but its header requires"):
        content(written, key)


def test_no_changed_byte_opens(written, key):
    whole = written.read_bytes()
    for at in [*range(0, 180, 4), *range(180, len(whole), 97)]:
        flipped = bytearray(whole)
        flipped[at] ^= 4
        written.write_bytes(flipped)
        with pytest.raises((ValueError, Unfinished)):
            content(written, key)


def test_pieces_cannot_change_places(written, key):
    whole = written.read_bytes()
    size = 500 + keys.SEALED
    at = len(whole) - (len(whole) - whole.index(b"}") - 1)
    swapped = whole[:at] + whole[at + size : at + 2 * size] + whole[at : at + size] + whole[at + 2 * size :]
    assert len(swapped) == len(whole)
    written.write_bytes(swapped)
    with pytest.raises(ValueError, match="altered"):
        content(written, key)


def test_another_header_or_party_does_not_open(written, key):
    other = shared_key(bytes(32), keys.identity_of(bytes([2] * 32)))
    with pytest.raises(ValueError, match="written by another sender"):
        content(written, other)
    whole = written.read_bytes()
    for old, new in ((b"run-1", b"run-2"), (b'"number":3', b'"number":4'), (b"north", b"south")):
        written.write_bytes(whole.replace(old, new))
        with pytest.raises(ValueError, match="altered"):
            content(written, key)
    for bad in (b'"number":"', b'"number":-', b'"sizes":'):
        written.write_bytes(whole.replace(b'"number":3'[: len(bad)], bad, 1))
        with pytest.raises((ValueError, Unfinished)):
            content(written, key)


def test_neither_links_nor_pipes_are_read(tmp_path, written, key):
    (tmp_path / "link").symlink_to(written)
    with pytest.raises(ValueError, match="a link"):
        content(tmp_path / "link", key)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a file"):
        content(tmp_path / "pipe", key)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert REPLY != REQUEST


def test_a_mailbox_takes_only_its_own_letters_of_a_size_that_can_be(tmp_path, key):
    heard: list[str] = []
    back = Mailbox(tmp_path, REPLY, "north", key, heard.append)
    assert back.put("run-1", 1, TEXT)
    assert [content for _, content in back.letters(lambda header: True)] == [TEXT]
    assert back.holds("run-1", 1)
    assert not back.holds("run-1", 2)
    back.most = 1000
    assert list(back.letters(lambda header: True)) == []
    assert "bytes, expected at most 1000" in heard[0]
    back.drop("run-1", 2)
    assert not back.holds("run-1", 1)
    gone = Mailbox(tmp_path / "gone", REPLY, "north", key, heard.append)
    assert not gone.put("run-1", 1, TEXT)
    assert not (tmp_path / "gone").exists()
    (tmp_path / "to").mkdir()
    (tmp_path / "to/north").symlink_to(tmp_path / "from")
    with pytest.raises(RunError, match="is a link; make it a folder"):
        Mailbox(tmp_path, REQUEST, "north", key, heard.append).put("run-1", 1, TEXT)
