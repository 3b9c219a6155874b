"""Runs whose messages are files: bits, bytes and ledgers as on the local engine, whatever happens to the files."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest

import fedfm
from carried import NAMES, Carried, Heard, waiting
from fedfm.cli.entry import main
from fedfm.engines.folder import link
from fedfm.errors import InputError, RunError
from processes import begin, rounds, same, until

SCAFFOLD = {"method": {"name": "scaffold", "rounds": 2}}


@pytest.fixture
def carried(tmp_path):
    return Carried(tmp_path)


@pytest.mark.parametrize("changes", [{}, SCAFFOLD], ids=["fedavg", "scaffold"])
def test_the_bits_the_bytes_and_the_ledgers_are_those_of_other_engines(carried, monkeypatch, changes):
    waiting(monkeypatch, carried.pump)
    result = fedfm.run(carried.engine(**changes), carried.root / "run", progress=fedfm.Progress())
    same(result, carried.local(**changes))
    assert result["engine"] == "folder"
    assert (carried.root / "run").stat().st_mode & 0o077 == 0
    assert result["excluded"] == []
    sent = [json.loads(line) for line in (carried.root / "run/messages.jsonl").read_text().splitlines()]
    for name in NAMES:
        left = [(line["round"], line["handler"], line["bytes"]) for line in carried.left(name)]
        assert left == [(m["round"], m["handler"], m["bytes"]) for m in sent if m["from"] == name]
        assert left[0][1] == "query.hello"
        assert carried.letters("to", name) == []  # answered requests are removed
        assert len(carried.letters("from", name)) == 1


@pytest.mark.proof
def test_sums_stay_hidden(tmp_path, monkeypatch):
    """Secure aggregation takes four calls a round, and its masks cancel as on the local engine."""
    carried = Carried(tmp_path, names=("east", *NAMES))
    waiting(monkeypatch, carried.pump)
    changes = {"privacy": {"aggregator": "secagg"}}
    result = fedfm.run(carried.engine(**changes), carried.root / "run", progress=fedfm.Progress())
    assert result["params_sha256"] == carried.local(**changes)["params_sha256"]
    assert {line["form"] for line in carried.left("north") if line["exposes"] == "mean"} >= {"masked"}


def test_a_silo_and_the_server_stop_anywhere_and_nobody_is_asked_twice(carried, monkeypatch):
    """Every time a file has come, the server stops, and each silo's process is a new one: scaffold has two memories."""
    asked: list[tuple[str, str]] = []
    told = carried.told

    def once():
        before = len(told)
        for name in NAMES:
            carried.desks[name] = carried.desk(name)  # a process that has just been started
            carried.desks[name].answer()
            asked.extend((name, line.rpartition("request ")[2]) for line in told[before:])
            if len(told) > before:
                return True
        return False

    waiting(monkeypatch, once)
    stops, result, path = 0, None, carried.root / "run"
    while result is None:
        try:
            run = fedfm.run if not path.exists() else fedfm.resume
            result = (
                run(path, progress=fedfm.Progress())
                if path.exists()
                else run(carried.engine(**SCAFFOLD), path, progress=fedfm.Progress())
            )
        except KeyboardInterrupt:
            stops += 1
    monkeypatch.undo()
    assert result["params_sha256"] == carried.local(**SCAFFOLD)["params_sha256"]
    assert stops == len(asked) == len(set(asked))
    for name in NAMES:
        kept = [(line["round"], line["call"], line["handler"]) for line in carried.left(name)]
        assert len(kept) == len(set(kept)) == len(asked) / 2


def test_damaged_swapped_foreign_and_old_files_are_ignored_and_the_bits_stay(carried, monkeypatch):
    """Somebody who can write to the folder, and a sync tool that delivers halves, old files and copies."""
    old: dict[tuple[str, str], bytes] = {}
    turn = 0

    def litter(way, name):
        place = carried.disk / way / name
        place.mkdir(parents=True, exist_ok=True)
        for path in carried.letters(way, name):
            old.setdefault((f"{way}/{name}", path.name), path.read_bytes())
        for (of, file), data in old.items():  # a replay, under a name of its own
            if of == f"{way}/{name}":
                (place / f"old-{file}").write_bytes(data)
        (place / "note.letter").write_text("hello")
        (place / "empty.letter").touch()
        if not (place / "link.letter").is_symlink():
            (place / "link.letter").symlink_to(carried.root / "server.key")

    def damage():
        """The requests, before they are answered: the server finds them gone or changed, and writes them again."""
        north, south = (carried.letters("to", name)[0] for name in NAMES)
        whole = north.read_bytes()
        for text in (b"fedavg-silos:", b"[data]", b'"handler"'):
            assert text not in whole  # nothing of the content is legible
        north.write_bytes(whole[: len(whole) // 2])  # half
        south.write_bytes(whole)  # swapped
        carried.pump()
        flipped = bytearray(whole)
        flipped[-1] ^= 1
        north.write_bytes(flipped)
        carried.pump()
        north.unlink()

    def mischief():
        nonlocal turn
        turn += 1
        if turn % 2 and all(carried.letters("to", name) for name in NAMES):
            damage()
            return
        for name in NAMES:
            for way in ("to", "from"):
                litter(way, name)
        carried.pump()
        for name, other in (NAMES, NAMES[::-1]):
            for path in carried.letters("from", name):
                shutil.copy(path, carried.disk / "from" / other / f"of-{name}.letter")
                shutil.copy(path, path.with_name(f"copy-{path.name}"))  # twice

    heard = Heard()
    waiting(monkeypatch, mischief)
    result = fedfm.run(carried.engine(), carried.root / "run", progress=heard)
    same(result, carried.local())
    assert result["excluded"] == []
    said = "\n".join(heard.lines)
    assert "from/north/note.letter is ignored: not a letter of this version of the format" in said
    assert "from/north/of-south.letter is ignored: a reply from south to server, and not a reply from north" in said
    assert "a request from server to north, and not a request from server to south" in carried.log("south")
    assert "-00000001.letter is ignored: altered, or written by another sender" in carried.log("north")
    for name in NAMES:
        assert f"to/{name}/link.letter is ignored: a link" in carried.log(name)
        assert "is ignored: request 5 has come" in carried.log(name)  # an older one
        kept = [(line["round"], line["call"], line["handler"]) for line in carried.left(name)]
        assert len(kept) == len(set(kept))  # nothing was answered twice


def test_a_late_silo_is_left_out_and_comes_back(carried, monkeypatch):
    def absent():
        carried.desks["north"].answer()
        if rounds != [1]:
            carried.desks["south"].answer()

    rounds: list[int] = []

    class Rounds(Heard):
        def round(self, line):
            rounds[:] = [1] if line["round"] == 0 else [2]

    waiting(monkeypatch, absent)
    monkeypatch.setattr(link, "_QUIET", 0.05)
    heard = Rounds()
    tables = carried.engine(run={"timeout": 0.5, "min_clients": 1})
    result = fedfm.run(tables, carried.root / "run", progress=heard)
    assert {(e["round"], e["client"], e["code"]) for e in result["excluded"]} == {(1, "south", "E_TIMEOUT")}
    assert any(
        line.startswith("waiting for 1 of 2 silos: south (last reply less than a minute") for line in heard.lines
    )
    trained = [line["round"] for line in carried.left("south") if line["handler"].startswith("train.")]
    assert trained == [2]  # the request of round 1 was withdrawn


def test_a_silo_whose_hello_is_late_joins(carried, monkeypatch):
    def absent():
        carried.desks["north"].answer()
        if carried.left("north")[-1]["round"] >= 1:
            carried.desks["south"].answer()

    waiting(monkeypatch, absent)
    heard = Heard()
    tables = carried.engine(run={"timeout": 0.5, "min_clients": 1, "evaluate_every": 0})
    result = fedfm.run(tables, carried.root / "run", progress=heard)
    assert {(e["round"], e["client"], e["code"]) for e in result["excluded"]} == {(1, "south", "E_DIED")}
    assert "no answer to the hello from south" in heard.lines
    assert [line["round"] for line in carried.left("south")] == [0, 2, 2]
    sent = [json.loads(line) for line in (carried.root / "run/messages.jsonl").read_text().splitlines()]
    assert [m["round"] for m in sent if m["from"] == "south" and m["handler"] == "query.hello"] == [0]


def test_a_resumed_run_needs_its_records_and_its_silos(carried, monkeypatch):
    class Stop(fedfm.Progress):
        def round(self, line):
            if line["round"] == 1:
                raise RuntimeError

    waiting(monkeypatch, carried.pump)
    path, roster = carried.root / "run", carried.root / "roster.toml"
    with pytest.raises(RuntimeError):
        fedfm.run(carried.engine(), path, progress=Stop())
    text = roster.read_text()
    roster.write_text(text.splitlines()[0])
    with pytest.raises(InputError, match="has other silos than this run began with"):
        fedfm.resume(path, progress=fedfm.Progress())
    roster.write_text(text)
    record = path / "private/folder/south/sent.json"
    kept = record.read_bytes()
    for damage in (lambda: record.write_bytes(kept[:9]), record.unlink):
        damage()
        with pytest.raises(InputError, match=r"south/sent.json is damaged or missing: put it back"):
            fedfm.resume(path, progress=fedfm.Progress())
    record.write_bytes(kept)
    assert fedfm.resume(path, progress=fedfm.Progress())["params_sha256"] == carried.local()["params_sha256"]


@pytest.mark.proof
def test_the_stick_is_away_and_another_one_comes(carried, monkeypatch):
    """Between two journeys the folder does not exist; a new stick has none of the old one's files."""
    turn = 0

    def journey():
        nonlocal turn
        turn += 1
        if turn % 3 == 1:
            carried.disk.rename(carried.root / f"drawer-{turn}")
        elif turn % 3 == 2:
            carried.disk.mkdir()
        else:
            carried.pump()

    waiting(monkeypatch, journey)
    result = fedfm.run(carried.engine(), carried.root / "run", progress=fedfm.Progress())
    assert result["params_sha256"] == carried.local()["params_sha256"]


@pytest.mark.proof
def test_policies_and_budgets_hold(tmp_path, monkeypatch):
    carried = Carried(tmp_path, 'allow = ["mean"]\n[budget]\nrounds = 1\n')
    waiting(monkeypatch, carried.pump)
    path = tmp_path / "run"
    with pytest.raises(RunError, match=r"budget.rounds: 1 of 1 is spent"):
        fedfm.run(carried.engine(), path, progress=fedfm.Progress())
    assert {line["exposes"] for line in carried.left("south")} == {"hello", "mean"}
    for name in NAMES:
        carried.file(name).write_text(carried.file(name).read_text().replace("rounds = 1", "rounds = 2"))
    result = fedfm.resume(path, progress=fedfm.Progress())  # a refusal is not an answer: it is asked again
    assert result["params_sha256"] == carried.local()["params_sha256"]


def test_a_silo_that_does_not_fit_is_named(carried, monkeypatch):
    text = carried.file("south").read_text()
    carried.file("south").write_text(text + 'allow_methods = ["fedpft"]\n')
    waiting(monkeypatch, carried.pump)
    heard = Heard()
    result = fedfm.run(carried.engine(run={"min_clients": 1}), carried.root / "run", progress=heard)
    assert {(e["client"], e["code"]) for e in result["excluded"]} == {("south", "E_EXPERIMENT")}
    assert any(line.startswith("south does not take part: E_EXPERIMENT") for line in heard.lines)
    assert 'method.name = "fedavg": allow_methods is "fedpft"' in carried.log("south")


def test_another_experiment_under_the_same_key_is_refused_once(carried, monkeypatch):
    counts: list[list[int]] = []

    def pump():
        for name in NAMES:
            counts.append([carried.desks[name].answer() for _ in range(3)])
        for path in carried.root.glob("south/.fedfm/runs/*/silo/site.json"):
            path.write_text(path.read_text().replace("learning_rate = ", "learning_rate = 1"))

    waiting(monkeypatch, pump)
    tables = carried.engine(run={"min_clients": 1, "evaluate_every": 0}, method={"rounds": 1})
    result = fedfm.run(tables, carried.root / "run", progress=fedfm.Progress())
    assert {(e["client"], e["code"]) for e in result["excluded"]} == {("south", "E_EXPERIMENT")}
    assert all(later == [0, 0] for _, *later in counts)
    assert [line["handler"] for line in carried.left("south")] == ["query.hello"]


def test_the_command_answers_what_is_there(carried, monkeypatch, capsys):
    def command():
        for name in NAMES:
            code = main(["silo", "serve", str(carried.file(name)), "--folder", str(carried.disk), "--once"])
            assert code == 0

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")  # the command sets it, too
    waiting(monkeypatch, command)
    result = fedfm.run(carried.engine(method={"rounds": 1}), carried.root / "run", progress=fedfm.Progress())
    assert result["excluded"] == []
    out = capsys.readouterr()
    assert "north: answered 1" in out.out
    assert "answered request 1, query.hello" in out.err


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"folder": "nowhere"}, 'run.folder = "nowhere": no such folder'),
        ({"roster": "nowhere"}, "run.roster: nowhere cannot be read"),
        ({"identity": "nowhere/key"}, "run.identity: nowhere is not a folder"),
        ({"folder": None}, "run.folder: engine"),
        ({"roster": None}, "run.roster: a file with the silos' public keys is needed"),
        ({"attack": {"name": "sign_flip", "fraction": 0.5}}, "real silos, which do not attack"),
        ({"engine": "local"}, 'run.folder: only engine = "folder" takes it, not "local"'),
    ],
)
def test_a_wrong_experiment_is_refused(carried, changes, reason):
    tables = carried.engine()
    tables |= {"attack": changes.pop("attack")} if "attack" in changes else {}
    tables["run"] = {k: v for k, v in {**tables["run"], **changes}.items() if v is not None}
    with pytest.raises(InputError, match=reason):
        fedfm.run(tables, carried.root / "run", progress=fedfm.Progress())


def test_a_wrong_silo_is_refused(carried, capsys):
    path, text = carried.file("north"), carried.file("north").read_text()

    def refused(*arguments):
        assert main(["silo", "serve", str(path), *arguments, "--once"]) == 2
        found = capsys.readouterr().err.strip()
        assert "\n" not in found
        return found

    disk = ("--folder", str(carried.disk))
    assert "give the folder for the messages" in refused()
    assert "no such folder" in refused("--folder", str(carried.root / "nowhere"))
    path.write_text(text.replace(carried.server, ""))
    assert "server: set it to the server's public key" in refused(*disk)
    path.write_text(text.replace(carried.server, "01" + 62 * "0"))
    assert "is not a public key" in refused(*disk)
    path.write_text(text.replace('identity = "silo.key"\n', ""))
    assert "a folder needs a lasting key" in refused(*disk)
    path.write_text(text.replace(carried.server, "me"))
    assert "expected 64 hexadecimal digits" in refused(*disk)
    path.write_text(text)
    assert main(["silo", "check", str(path)]) == 0
    assert f"answers the files of the server {carried.server}" in capsys.readouterr().out
    assert main(["silo", "check", str(path), "--once"]) == 2
    assert "are for `fedfm silo serve`" in capsys.readouterr().err
    (carried.root / "roster.toml").write_text(f'server = "{carried.server}"\n')
    with pytest.raises(InputError, match="cannot be a silo's name"):
        fedfm.run(carried.engine(), carried.root / "run", progress=fedfm.Progress())


@pytest.mark.proof
def test_processes_that_are_killed_go_on(carried):
    """The command line at all three places; each process is killed with SIGKILL, and started again."""

    def serve(name):
        return begin("silo", "serve", carried.file(name), "--folder", carried.disk)

    def end(process):
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    exp, out = carried.root / "exp.toml", carried.root / "run"
    paths = "".join(f'{name} = "{carried.root / name / "rows.npz"}"\n' for name in NAMES)
    exp.write_text(
        f'[data.clients]\n{paths}[model]\nname = "features"\n[method]\nname = "scaffold"\nrounds = 4\n'
        '[run]\nseed = 3\nengine = "folder"\nfolder = "disk"\nroster = "roster.toml"\nidentity = "server.key"\n'
    )
    server, sites = begin("run", exp, "--out", out), {name: serve(name) for name in NAMES}
    try:
        until(lambda: rounds(out) >= 2, what="no round was completed")
        end(sites["south"])
        until(lambda: carried.letters("to", "south"), what="the silo that is away was not asked")
        end(server)
        sites["south"] = serve("south")
        server = begin("resume", out)
        text, errors = server.communicate(timeout=300)
        assert server.returncode == 0, errors
    finally:
        for process in (server, *sites.values()):
            if process.poll() is None:
                end(process)
    result = json.loads(text.splitlines()[-1])
    assert result["params_sha256"] == carried.local(method={"name": "scaffold", "rounds": 4})["params_sha256"]
    for name in NAMES:
        kept = [(line["round"], line["call"], line["handler"]) for line in carried.left(name)]
        assert len(kept) == len(set(kept))


@pytest.mark.parametrize("tables", [{}, {"privacy": {"aggregator": "secagg"}}], ids=["clear", "secagg"])
def test_a_survey_by_files_has_the_figures_of_one_process(tmp_path, monkeypatch, tables):
    carried = Carried(tmp_path, names=("east", *NAMES))
    waiting(monkeypatch, carried.pump)
    found = fedfm.survey(carried.engine(**tables), tmp_path / "run", progress=fedfm.Progress())
    expected = fedfm.survey(carried.tables(**tables), tmp_path / "local", progress=fedfm.Progress())
    assert found["rows"] == 144
    assert found["counts"]["targets"] == expected["counts"]["targets"]
    assert {line["exposes"] for line in carried.left("north")} == {"hello", "mean" if tables else "reply"}
