"""Silos that reach their server through NGINX, with the fragment of the server's kit."""

import contextlib
import os
import signal
import socket
import ssl
import threading
import time

import pytest

from fedfm.engines.flower import loopback_keys
from kit_sites import bits, once, passed, sites
from nginx import needed, nginx
from processes import fedfm, here, rounds, until

pytestmark = needed
PROXY = "proxy = true\n"
SHORT = "    keepalive_timeout 1s;\n    client_header_timeout 1s;\n    client_body_timeout 1s;\n    send_timeout 1s;"


def port(at) -> int:
    """The port to which the silos connect."""
    return int(at.server().server.rpartition(":")[2])


@pytest.mark.deployment
def test_silos_connect_through_nginx_and_reach_nothing_else(tmp_path):
    with sites(tmp_path, PROXY, rounds=3) as at, nginx(tmp_path / "nginx", at.kits / "server", port(at)) as proxy:
        alone = here("run", at.alone, "--out", tmp_path / "local")
        at.start()
        assert bits(at.result(at.begin())) == bits(alone)
        once(at)
        assert 413 not in proxy.statuses()
        told = fedfm("silo", "check", at.kits / "hospital-a", at.experiment)
        assert told["fits"], told
        assert proxy.answer("GET /health") == 200
        assert proxy.answer("POST /v1/fleet/pull-messages") == 415  # the SuperLink's own answer: it is not a message
        for path in ("/v1/control/list-nodes", "/v1/runtime/acquire-task", "/docs", "/"):
            assert proxy.answer(f"POST {path}") == 403
            assert proxy.answer(f"POST /v1/fleet/..%2f..{path}") == 403
        # What is below /v1/fleet/ for NGINX is so for the SuperLink as well.
        for path in ("/v1/control/list-nodes%3f/../../fleet/x", "/v1/control/list-nodes/..%2f..%2ffleet/x"):
            assert proxy.answer(f"POST {path}") == 404
        log = (at.kits / "server/.fedfm/logs/superlink.log").read_text()
        assert "/v1/fleet/x" in log
        assert "%2" not in log
        assert "%3" not in log


@pytest.mark.outage
def test_nginx_that_cuts_idle_connections_and_is_killed_and_reloaded_changes_no_bit(tmp_path):
    with sites(tmp_path, PROXY, rounds=4) as at:
        for file in (at.experiment, at.alone):  # its passes take longer than NGINX's patience
            file.write_text(file.read_text().replace('"scaffold"\n', '"scaffold"\nlocal = { epochs = 20000 }\n'))
        alone = here("run", at.alone, "--out", tmp_path / "local")
        with nginx(tmp_path / "nginx", at.kits / "server", port(at), SHORT) as proxy:
            at.start()
            running = at.begin()
            passed(at, running, 1)
            proxy.kill()
            time.sleep(5)
            proxy.start()
            passed(at, running, 2)
            before = proxy.certificate()
            at.provision("--renew")
            until(lambda: "the certificate is new" in (tmp_path / "server.log").read_text())
            assert proxy.certificate() == before
            proxy.reload()
            until(lambda: proxy.certificate() != before, what="the old certificate is still in use")
            assert bits(at.result(running)) == bits(alone)


@pytest.mark.outage
def test_messages_larger_than_nginxs_own_limit_pass(tmp_path):
    """A model of 6 MB: Flower cuts it into objects of 5 MB."""
    with sites(tmp_path, PROXY, rounds=2, width=500_000) as at:
        alone = here("run", at.alone, "--out", tmp_path / "local")
        line = "    limit_rate 4m;"  # slower than NGINX could read from the SuperLink: so it would fill files
        with nginx(tmp_path / "nginx", at.kits / "server", port(at), line) as proxy:
            at.start()
            running = at.begin()
            until(lambda: rounds(tmp_path / "run") > 1 or running.poll() is not None)
            proxy.reload()  # what is on its way arrives
            assert bits(at.result(running)) == bits(alone)
            assert "temporary file" not in proxy.log()


@pytest.mark.outage
def test_nginx_that_is_killed_in_the_middle_of_uploads_changes_no_bit(tmp_path):
    """The SuperLink stands still in the middle of an upload, so that NGINX is killed in it; up to five minutes."""
    with sites(tmp_path, PROXY, rounds=2, width=500_000) as at:
        alone = here("run", at.alone, "--out", tmp_path / "local")
        with nginx(tmp_path / "nginx", at.kits / "server", port(at)) as proxy:
            at.start()
            running = at.begin()
            passed(at, running, 1)
            superlink = at.process("server", "flower-superlink")
            log = at.kits / "hospital-a/.fedfm/logs/supernode.log"
            sent = log.read_text().count("Sending: train")
            until(lambda: log.read_text().count("Sending: train") > sent)
            os.kill(superlink, signal.SIGSTOP)
            time.sleep(1)
            proxy.kill()
            os.kill(superlink, signal.SIGCONT)
            proxy.start()
            assert bits(at.result(running)) == bits(alone)
            assert "Connection attempt failed" in log.read_text().split("Sending: train")[2]  # it was cut


@pytest.mark.deployment
def test_another_program_at_the_superlinks_port_gets_no_request(tmp_path):
    with sites(tmp_path, PROXY) as at:
        other = tmp_path / "other"
        other.mkdir()
        loopback_keys.write_certificates(other)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(other / "server.pem", other / "server.key")
        got = list[bytes]()
        with socket.create_server(("127.0.0.1", at.server().port)) as listener:

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        plain, _ = listener.accept()
                        with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as link:
                            got.append(link.recv(4096))

            threading.Thread(target=serve, daemon=True).start()
            with nginx(tmp_path / "nginx", at.kits / "server", port(at)) as proxy:
                assert proxy.answer("POST /v1/fleet/push-object") == 502
                assert "certificate verify error" in proxy.log()
            listener.shutdown(socket.SHUT_RDWR)
        assert b"".join(got) == b""
