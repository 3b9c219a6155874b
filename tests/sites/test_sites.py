"""Federations of kits, really started: the local engine's bits, whatever stops and comes back meanwhile."""

import json
import os
import signal
import socket
import sys
import time

import pytest

from fedfm.engines.flower import kit_manifest
from fedfm.sites import kits
from kit_sites import bits, once, passed, relayed, sites
from processes import fedfm, here, rounds, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a kit's processes are found in Linux's /proc")


@pytest.mark.deployment
def test_kits_behind_a_relay_give_the_bits_of_the_local_engine(tmp_path):
    """A run waits for its silos; the relay cuts idle connections and is away for a while; a certificate is renewed."""
    with relayed(tmp_path, rounds=3, idle=0.15) as (at, relay):
        alone = here("run", at.alone, "--out", tmp_path / "local")
        running = at.begin()  # before the server is there: it waits
        at.start("server", "hospital-a")
        until(lambda: "waiting for 1 of 2 silos: hospital-b, never seen" in at.told())
        at.start("hospital-b")
        passed(at, running, 1)
        relay.interrupt(4.0)
        at.provision("--renew")
        until(lambda: "the certificate is new" in (tmp_path / "server.log").read_text())
        assert bits(at.result(running)) == bits(alone)
        assert relay.cut > 3
        once(at)
        found = fedfm("silo", "check", at.kits / "hospital-a", at.experiment)
        assert found["fits"], found
        assert {line["what"]: line["status"] for line in found["checks"]}["clock"] == "ok"
        private = [p for p in (at.kits / "server" / ".fedfm").rglob("*") if p.is_file() and p.stat().st_mode & 0o077]
        assert private == []


@pytest.mark.deployment
def test_a_silo_whose_port_another_program_has_says_so_and_starts_when_it_is_free(tmp_path):
    with sites(tmp_path) as at:
        port = kit_manifest.load(at.kits / "hospital-a").port
        with socket.create_server(("127.0.0.1", port)):
            at.start("hospital-a")
            told = f"another program listens at port {port} of this machine: end it, or change port in kit.json"
            until(lambda: told in at.logs())
        until(lambda: not kits.free(port))


@pytest.mark.release
@pytest.mark.deployment
def test_an_asynchronous_run_that_is_submitted_again_takes_what_a_silo_was_at(tmp_path):
    """One of two silos stands still in its pass; the ServerApp is killed, and the SuperLink stays."""
    with sites(tmp_path, rounds=14) as at:
        text = at.experiment.read_text().replace("scaffold", "fedavg")
        at.experiment.write_text(text + "asynchronous = { buffer = 1 }\nevaluate_every = 14\n")  # it stops in a pass
        at.start()
        running = at.begin()
        passed(at, running, 1)
        (lock,) = (at.kits / "hospital-b/.fedfm/runs").glob("*/silo/worker.lock")
        worker = int(lock.read_text())
        os.kill(worker, signal.SIGSTOP)
        try:
            passed(at, running, rounds(at.folder / "run") + 3)
            os.kill(int((at.folder / "run/private/server.lock").read_text().split()[0]), signal.SIGKILL)
            waits = json.loads((at.folder / "run/private/underway.json").read_text())["hospital-b"]
            until(lambda: "submitted again" in at.told())
            passed(at, running, rounds(at.folder / "run") + 2)  # the resumed run does not wait for it
        finally:
            os.kill(worker, signal.SIGCONT)
        result = at.result(running)
        left = at.answers("hospital-b")
    assert left.count((waits["round"], waits["call"], waits["handler"])) == 2  # for each of Flower's runs
    assert result["rounds"] == 14
    assert not result["excluded"]
    lines = [json.loads(line) for line in (at.folder / "run/metrics.jsonl").read_text().splitlines()]
    ages = {line["round"]: line["largest_staleness"] for line in lines if "hospital-b" in line["cohort"]}
    (came,) = [t for t, age in ages.items() if t - age == waits["round"]]  # the answer to the request of before
    assert ages[came] >= 5
    assert min(t for t in ages if t > waits["round"]) == came  # and it was the next of this silo


@pytest.mark.outage
def test_a_silo_that_stops_or_is_killed_comes_back_into_the_same_round(tmp_path):
    with sites(tmp_path, rounds=4) as at:
        alone = here("run", at.alone, "--out", tmp_path / "local")
        at.start()
        running = at.begin()
        passed(at, running, 1)
        at.stop("hospital-b")
        until(lambda: "waiting for 1 of 2 silos: hospital-b, last seen less than a minute ago" in at.told())
        at.start("hospital-b")
        passed(at, running, 2)
        assert "all awaited silos are connected" in at.told()
        at.stop("hospital-b", signal.SIGKILL)  # says no goodbye: the SuperLink still counts on it
        at.start("hospital-b")
        assert bits(at.result(running)) == bits(alone)
        once(at, "hospital-a")  # nobody asked the other one again


@pytest.mark.outage
def test_a_superlink_that_is_killed_comes_back_into_the_same_run(tmp_path):
    with sites(tmp_path, rounds=4) as at:
        alone = here("run", at.alone, "--out", tmp_path / "local")
        at.start()
        running = at.begin()
        passed(at, running, 1)
        at.kill("server", "flower-superlink")
        passed(at, running, 2)
        assert "submitted again" not in at.told()  # the same run of Flower's went on
        at.stop("server", signal.SIGKILL)  # with the ServerApp
        at.start("server")
        assert bits(at.result(running)) == bits(alone)
        assert "submitted again" in at.told()


@pytest.mark.outage
def test_messages_that_a_relay_swallows_are_sent_again(tmp_path):
    """Flower counts them as delivered; the server notices, for the silos answer hellos that came later."""
    with relayed(tmp_path, rounds=4, idle=60.0) as (at, relay):
        alone = here("run", at.alone, "--out", tmp_path / "local")
        at.start()
        running = at.begin()
        passed(at, running, 1)
        relay.swallow = 2  # both silos' messages, or one and the hello that is to tell
        assert bits(at.result(running)) == bits(alone)
        assert relay.swallow == 0
        assert "gets its request again, since the request or the reply was lost" in at.told()


@pytest.mark.outage
def test_a_server_that_is_gone_for_long_comes_back_into_the_same_run(tmp_path):
    """For one minute, or for as many as FEDFM_OUTAGE_MINUTES says."""
    with sites(tmp_path, rounds=4) as at:
        alone = here("run", at.alone, "--out", tmp_path / "local")
        at.start()
        running = at.begin()
        passed(at, running, 1)
        at.stop("server", signal.SIGKILL)
        time.sleep(60 * float(os.environ.get("FEDFM_OUTAGE_MINUTES", "1")))
        at.start("server")
        assert bits(at.result(running)) == bits(alone)
        once(at)
