"""The page of `fedfm watch`: its content, its readers, its end, and its display in a real browser."""

import base64
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedfm
import small
from fedfm.api.watch import watch
from fedfm.cli import main
from fedfm.core.locks import Lock
from fedfm.errors import InputError
from fedfm.reports import live, watch_server
from fedfm.runtime import waiting_file
from fedfm.runtime.progress import Progress
from processes import until
from reports import runs
from reports.test_browser import BROWSER, FLAGS, MEASURE

SILOS = {"hospital-a": 5, "hospital-b": 6, '<b>"c"': 7}


def unfinished(folder: Path, engine: str = "deployment") -> Path:
    run = runs.make(folder, names=list(SILOS), n_rounds=3, finished=None, result=None, model=None)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["experiment"]["method"]["rounds"] = 9
    manifest["experiment"]["run"]["engine"] = engine
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "private").mkdir(exist_ok=True)
    return run


def tiles(page: str) -> dict[str, tuple[str, str]]:
    """The tiles of the line on what happens now."""
    now = re.search(r'<div id="live".*?</dl></div>', page, re.S)[0]
    return {a: (b, c) for a, b, c in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd><dd>(.*?)</dd>", now)}


def finish(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    whole = json.loads((runs.make(run.parent / "whole", names=list(SILOS), n_rounds=3) / "manifest.json").read_text())
    text = json.dumps(manifest | {key: whole[key] for key in ("result", "finished")})
    (run / "manifest.json").write_text(text)


def test_the_page_names_round_silos_and_bytes_and_changes_no_file(tmp_path):
    run = unfinished(tmp_path / "run")
    waiting_file.Writer(run).tell(SILOS, ["hospital-b", '<b>"c"'])
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    page, finished = live.render(run, 3)
    assert not finished
    found = tiles(page)
    assert found["Round"][0] == "3 of 9"
    assert found["Silos that answered"] == ("1", "hospital-a")
    assert found["Waited for"] == ("2", "&lt;b&gt;&quot;c&quot;, hospital-b")
    assert found["Epsilon spent"][1] == "nothing is claimed"
    assert "<dt>Sent</dt><dd>9.00\N{NO-BREAK SPACE}kB</dd><dd>up; 18.0\N{NO-BREAK SPACE}kB down</dd>" in page
    assert "fedfm resume" not in page.split("</header>")[0]
    assert "<script" not in page
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
    assert {path for path in run.rglob("*") if path.is_file()} == {*before}
    waiting_file.Writer(run).tell(SILOS, ())
    assert tiles(live.render(run, 3)[0])["Waited for"] == ("0", "no silo")
    assert tiles(live.render(unfinished(tmp_path / "here", "local"), 3)[0])["Clients"][0] == "3"


class Watched(Progress):
    """Renders the page whenever a client has finished its part of a round."""

    def __init__(self, run):
        self.run, self.found = run, []

    def client(self):
        tile = tiles(live.render(self.run, 3)[0])["Epsilon spent"]
        if tile not in self.found:
            self.found.append(tile)


@pytest.mark.proof
@pytest.mark.parametrize("mechanism", ["gaussian", "dp_sgd"])
def test_the_spent_epsilon_counts_the_round_that_is_computed(mechanism, tmp_path):
    privacy = {"noise_multiplier": 1.5, "clip_norm": 1.0, "mechanism": mechanism, "delta": 1e-5}
    privacy["unit"] = "record" if mechanism == "dp_sgd" else "client"
    spent = []
    for rounds in (1, 2, 3):
        tables = small.experiment(tmp_path, method={"rounds": rounds}, privacy=privacy, run={"workers": 1})
        spent.append(fedfm.run(tables, tmp_path / f"{rounds}", progress=Progress())["epsilon"])
    watched = Watched(tmp_path / "watched")
    fedfm.run(tables, watched.run, progress=watched)
    stated = [float(value) for value, words in watched.found if "no round has begun" not in words]
    if mechanism == "gaussian":
        assert stated == pytest.approx(spent, rel=1e-3)
    else:
        assert stated == pytest.approx([spent[-1]] * 2, rel=1e-3)
        assert [words.startswith("at most") for _, words in watched.found[-2:]] == [True, False]


def test_before_the_first_round_no_epsilon_is_stated(tmp_path):
    privacy = {"noise_multiplier": 1.5, "clip_norm": 1.0, "unit": "client", "delta": 1e-5}
    tables = small.experiment(tmp_path, method={"rounds": 2}, privacy=privacy, run={"workers": 1})
    fedfm.run(tables, tmp_path / "run", progress=Progress())
    manifest = json.loads((tmp_path / "run/manifest.json").read_text()) | {"result": None, "finished": None}
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "run/metrics.jsonl").write_text("")
    value, words = tiles(live.render(tmp_path / "run", 3)[0])["Epsilon spent"]
    assert not any(character.isdigit() for character in value)
    assert words.startswith("no round has begun; ")


def ask(server, path=None, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, server.path if path is None else path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    reply = connection.getresponse()
    return reply.status, dict(reply.getheaders()), reply.read().decode()


@pytest.fixture
def server(tmp_path):
    with watch_server.WatchServer(unfinished(tmp_path / "run")) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def test_only_the_printed_address_is_answered_and_nothing_may_run_in_the_page(server):
    status, headers, page = ask(server)
    assert (status, headers["Refresh"]) == (200, "3")
    assert page.startswith("<!DOCTYPE html>")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "script-src" not in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert not any(name.lower().startswith("access-control") for name in headers)
    assert ask(server, method="HEAD")[2] == ""
    port = server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", f"0.0.0.0:{port}", ""):
        status, _, page = ask(server, Host=host)
        assert (status, "fedavg-digits" in page) == (421, False), host
    assert ask(server, Host=f"localhost:{port}")[0] == 200
    for path in ("/", "/x/", server.path[:-1], f"{server.path}manifest.json", "/../" + server.path, "/favicon.ico"):
        assert ask(server, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(server, method=method)[0] == 501
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(InputError, match=f"--port {port}"):
        watch_server.WatchServer(server.run, port)


def test_a_file_that_is_being_written_is_no_end(server):
    whole = (server.run / "manifest.json").read_text()
    (server.run / "manifest.json").write_text(whole[:100])
    status, headers, page = ask(server)
    assert (status, headers["Refresh"]) == (503, "3")
    assert "manifest.json" in page
    (server.run / "manifest.json").write_text(whole)
    assert ask(server)[0] == 200


def test_two_addresses_of_a_run_differ(server):
    with watch_server.WatchServer(server.run) as other:
        assert other.path != server.path
        assert len(other.path) > 20


def test_the_page_ends_with_the_run_after_its_last_state_was_shown(tmp_path):
    run, found = unfinished(tmp_path / "run"), []
    with pytest.raises(InputError, match="no process of this machine is running it"):
        watch(run, 0, found.append)
    lock = Lock(run / "private/lock")
    assert lock.take()
    ended = []
    thread = threading.Thread(target=lambda: ended.append(watch(run, 0, found.append)))
    thread.start()
    while not found:
        thread.join(0.05)
    address = found[0].removeprefix("http://127.0.0.1:")
    port, path = address.split("/", 1)
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
    connection.request("GET", f"/{path}")
    assert connection.getresponse().getheader("Refresh") == "3"
    finish(run)
    lock.release()
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
    connection.request("GET", f"/{path}")
    last = connection.getresponse()
    assert (last.status, last.getheader("Refresh")) == (200, None)
    assert 'id="live"' not in last.read().decode()
    thread.join(30)
    assert ended == [True]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(port)), timeout=5)
    with pytest.raises(InputError, match="the run has finished; `fedfm report"):
        watch(run, 0, found.append)


@pytest.mark.parametrize("how", ["dies", "goes on"])
def test_the_end_of_the_page_says_whether_the_run_goes_on(how, tmp_path, monkeypatch, capsys):
    run = unfinished(tmp_path / "run")
    lock = Lock(run / "private/lock")

    def end(*args):
        if how == "dies":
            lock.release()
        return False

    assert lock.take()
    monkeypatch.setattr("fedfm.api.watch.watch", end)
    monkeypatch.setattr("fedfm.api.watch.is_locked", lambda path: lock.is_taken)
    assert main(["watch", str(run)]) == 0
    said = capsys.readouterr().out
    assert ("the run goes on" in said, "fedfm resume" in said) == (how == "goes on", how == "dies")


def browser(profile: Path, *flags: str) -> str:
    flags = (*(flag for flag in FLAGS if not flag.startswith(("--virtual", "--dump", "--window"))), *flags)
    command = [BROWSER, *flags, f"--user-data-dir={profile}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.proof
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the path")
def test_a_browser_shows_it_in_dark_and_light_at_two_widths_and_loads_it_again(server, tmp_path, monkeypatch):
    waiting_file.Writer(server.run).tell(SILOS, ["hospital-b", *(f"a silo of a long name {i}" for i in range(30))])
    shown, render = [], live.render
    monkeypatch.setattr(live, "render", lambda *args: shown.append(1) or render(*args))
    for scheme, flags in (("light", ()), ("dark", ("--force-dark-mode=1",))):
        picture = tmp_path / f"{scheme}.png"
        shot = (f"--screenshot={picture}", "--window-size=1280,900", "--timeout=2000", *flags)
        browser(tmp_path / scheme, *shot, server.url)
        with Image.open(picture) as image:
            edge = np.asarray(image.convert("L"))[:, :100].mean()
        assert edge > 220 if scheme == "light" else edge < 60
    flags = (*(f for f in FLAGS if not f.startswith(("--virtual", "--dump"))), "--remote-debugging-port=0")
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'stays'}", server.url]
    loads = len(shown)
    with open(tmp_path / "browser.log", "w") as log:
        stays = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: len(shown) >= loads + 3, limit=90, what="the page has not loaded itself again")
    finally:
        os.killpg(stays.pid, signal.SIGKILL)
        stays.wait()
    saved = tmp_path / "page.html"
    saved.write_text(ask(server)[2], encoding="utf-8")
    (tmp_path / "measure.html").write_text(MEASURE.replace("PAGE", saved.as_uri()), encoding="utf-8")
    measure = ("--virtual-time-budget=3000", "--window-size=1400,1000", "--dump-dom")
    dom = browser(tmp_path / "widths", *measure, (tmp_path / "measure.html").as_uri())
    found = json.loads(base64.b64decode(re.search(r'<pre id="measured">(.*?)</pre>', dom)[1]))
    assert sorted(m["width"] for m in found) == [390, 1280]
    for m in found:
        assert (m["inner"], m["wide"], m["fetched"]) == (m["width"], [], [])
        assert m["scroll"] <= m["inner"]
