"""Links to other projects' documents: from an inventory that a host gives, and none to a host that does not answer."""

import functools
import http.server
import importlib.util
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("inventories", ROOT / "docs" / "inventories.py")
inventories = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(inventories)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def host(tmp_path, monkeypatch):
    """The address of documents with one class, other.Thing."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "other"
    folder.mkdir()
    head = b"# Sphinx inventory version 2\n# Project: other\n# Version: 1\n# The remainder is compressed using zlib.\n"
    (folder / "objects.inv").write_bytes(head + zlib.compress(b"other.Thing py:class 1 api.html#$ -\n"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_host_without_an_answer_is_left_out_and_named(host, capsys):
    found = inventories.reachable({"other": host, "away": "http://127.0.0.1:9", "empty": f"{host}/empty"})
    assert found == {"other": (host, None)}
    assert capsys.readouterr().err == "no links to the documents of away, empty: no answer in 3 s\n"


def test_a_name_of_another_project_is_a_link(host, tmp_path):
    pytest.importorskip("sphinx", reason="needs the extra docs")
    source = tmp_path / "docs"
    source.mkdir()
    mapping = inventories.reachable({"other": host})
    (source / "conf.py").write_text(f'extensions = ["sphinx.ext.intersphinx"]\nintersphinx_mapping = {mapping!r}\n')
    (source / "index.rst").write_text("A page\n======\n\n:class:`other.Thing`\n")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(source), str(tmp_path / "site")]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert f'href="{host}/api.html#other.Thing"' in (tmp_path / "site/index.html").read_text(encoding="utf-8")
