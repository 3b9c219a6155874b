"""Access control: the SuperLink's gate, the nodes' names, a silo's bundles, and the workers that it keeps."""

import asyncio
import datetime
import fcntl
import io
import ipaddress
import socket
import ssl
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from fedfm.config.experiment import Experiment
from fedfm.engines.flower import app_writer, bundle, client_stub, gate, private_api, server_seen
from fedfm.engines.flower.registry import Registry
from fedfm.engines.flower.run_watch import RunWatch
from fedfm.errors import InputError
from fedfm.sites import certificate_authority
from grid import InProcessGrid

SECRET = b"s" * 64
HERE, AWAY = ("127.0.0.1", 4000), ("192.0.2.7", 4000)


# --- the gate ---------------------------------------------------------------------------------------------------------


def ask_gate(path: str, client=AWAY, bearer: tuple[bytes, ...] = (), kind: str = "http") -> int | str:
    """What the gate answers; "in" if it passes the request on."""
    sent = []

    async def app(scope, receive, send):
        sent.append({"status": "in"})

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", value) for value in bearer]
    scope = {"type": kind, "path": path, "client": client, "headers": headers}
    asyncio.run(gate.AccessGate(app, SECRET + b"\n")(scope, None, send))
    return sent[0].get("status", sent[0].get("type"))


@pytest.mark.parametrize(
    ("path", "silo", "machine"),
    [
        ("/v1/fleet/pull-messages", "in", "in"),
        ("/health", "in", "in"),
        ("/v1/runtime/acquire-task", 403, "in"),
        ("/v1/control/start-run", 403, 403),
        ("/v1/control/get-login-details", 403, 403),
        ("/openapi.json", 403, 403),
        ("/docs", 403, 403),
        ("/", 403, 403),
        ("//v1/fleet/x", 403, 403),
        ("/V1/FLEET/x", 403, 403),
        ("/v1/fleet", 403, 403),
        ("/healthy", 403, 403),
        ("/health/", 403, 403),
    ],
)
def test_silos_reach_the_fleet_interface_and_the_operator_all(path, silo, machine):
    assert ask_gate(path) == silo
    assert ask_gate(path, HERE) == ask_gate(path, ("::1", 1)) == machine
    assert ask_gate(path, None) == ask_gate(path, ("unix", 0)) == silo
    assert ask_gate(path, bearer=(b"Bearer " + SECRET,)) == "in"


@given(st.one_of(st.binary(max_size=80), st.integers(0, 63).map(lambda n: b"Bearer " + SECRET[:n])))
def test_only_the_exact_secret_is_accepted(value):
    assert ask_gate("/v1/control/start-run", HERE, (value,)) == 403


def test_a_secret_twice_a_socket_and_a_short_secret_are_refused():
    bearer = b"Bearer " + SECRET
    assert ask_gate("/v1/control/start-run", bearer=(bearer, bearer)) == 403
    assert ask_gate("/v1/fleet/x", kind="websocket", bearer=(bearer,)) == "websocket.close"
    assert ask_gate("", kind="lifespan") == "in"
    with pytest.raises(ValueError, match="32 bytes"):
        gate.AccessGate(None, b"short\n" + b" " * 40)  # type: ignore[arg-type]


# --- names ------------------------------------------------------------------------------------------------------------


class Named(InProcessGrid):
    """Nodes with names under which they are registered, or with none."""

    def __init__(self, names: dict[int, str | None]) -> None:
        super().__init__({})
        self._registered = names

    def get_nodes(self):
        return [SimpleNamespace(node_id=node, name=name) for node, name in self._registered.items()]


NAMES = st.sampled_from(["a", "b", "c", "A", ""])
NODES = st.integers(1, 6)


@given(st.dictionaries(NODES, st.none() | NAMES), st.dictionaries(NODES, NAMES.filter(bool)), st.data())
def test_a_registered_name_is_used_only_by_its_owner(registered, claims, data):
    taken = {name: node for node, name in registered.items() if name and data.draw(st.booleans())}
    registry = Registry(Named(registered), True)
    registry.look()
    refused = registry.refusals(claims, taken)
    admitted = {node: name for node, name in claims.items() if node not in refused}
    owners = [name for name in registered.values() if name]
    for node, name in admitted.items():
        assert registered.get(node) == name or (not registered.get(node) and name not in owners)
    assert len({*admitted.values()}) == len(admitted)  # one node a name
    for node, name in claims.items():
        if registered.get(node) == name and owners.count(name) == 1:
            assert node in admitted


def test_a_refused_node_is_reported_under_its_registered_name():
    registry = Registry(Named({1: "hospital-a", 2: "hospital-b", 3: None}), True)
    registry.look()
    refused = registry.refusals({1: "hospital-a", 2: "hospital-a", 3: "hospital-a"}, {})
    assert sorted(refused) == [2, 3]
    assert refused[2].reason == 'its silo.toml says name = "hospital-a", but its key is registered as "hospital-b"'
    assert "that name is registered for another node's key" in refused[3].reason
    assert [registry.display_name(node) for node in (1, 2, 3, 4)] == ["hospital-a", "hospital-b", "node 3", "node 4"]
    assert registry.nameless([1, 3])
    assert not registry.nameless([1, 2])
    long = registry.refusals({2: "x" * 10**6 + "\n"}, {})[2].reason
    assert len(long) < 200


# --- bundles ----------------------------------------------------------------------------------------------------------


def own(folder: Path) -> bytes:
    demo = Experiment.from_dict(app_writer._DEMO)
    app_writer.write_app(folder, demo, out=folder)
    return private_api.build(folder)


def zipped(*files: tuple[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files:
            archive.writestr(name, data)
    return content.getvalue()


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_a_silo_runs_fedfms_bundle_and_none_that_brings_or_names_code(tmp_path):
    good = own(tmp_path)
    bundle.check(good)
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        parts = [(name, archive.read(name)) for name in archive.namelist()]
    project = dict(parts)["pyproject.toml"]
    for content, says in (
        (zipped(*parts, ("fedfm/apps.py", b"")), "has 'fedfm/apps.py'"),
        (zipped(*parts, ("../x.py", b"")), "has '../x.py'"),
        (zipped(*parts, ("sitecustomize.py", b"")), "has 'sitecustomize.py'"),
        (zipped(*parts, ("pyproject.toml", project)), "the files of fedfm's app, each once"),
        (zipped(("pyproject.toml", project)), "the files of fedfm's app, each once"),
        (zipped(("pyproject.toml", b"#" * (5 << 20)), (".info/CONTENT", b"")), "more than 4194304 bytes"),
        (zipped(("pyproject.toml", b"x = "), (".info/CONTENT", b"")), "cannot be read"),
        (zipped(("pyproject.toml", b"\xff"), (".info/CONTENT", b"")), "cannot be read"),
        (zipped(("pyproject.toml", b"tool = 1"), (".info/CONTENT", b"")), "cannot be read"),
        (zipped(("pyproject.toml", project.replace(b"apps:client", b"x:y")), (".info/CONTENT", b"")), "'fedfm.x:y'"),
        (b"", "cannot be read"),
        (good[: len(good) // 2], "cannot be read"),
    ):
        with pytest.raises(InputError, match=r"this silo runs fedfm's own app only") as told:
            bundle.check(content)
        assert says in str(told.value)


# --- the server as a silo sees it -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("authority")
    certificate_authority.create(folder, "here")
    return folder


def certificate(signer: Path, out: Path, host: str, begin: int, end: int) -> Path:
    """A certificate that is valid from and until so many days from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate((signer / "ca.crt").read_bytes())
    signing = serialization.load_pem_private_key((signer / "ca.key").read_bytes(), None)
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder(issuer.subject, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begin * day)
        .not_valid_after(now + end * day)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False)
        .sign(signing, hashes.SHA256())  # type: ignore[arg-type]
    )
    out.mkdir(exist_ok=True)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (out / "server.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (out / "server.pem").write_bytes(made.public_bytes(pem))
    return out


def status_for(kit: Path | None, ca: Path, answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") -> str:
    """What a silo says of a server with this certificate; None: a server without TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            plain, _ = listener.accept()
            with plain:
                if kit is None:
                    plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    return
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(kit / "server.pem", kit / "server.key")
                try:
                    with context.wrap_socket(plain, server_side=True) as link:
                        link.recv(4096)
                        link.sendall(answer)
                except OSError:  # the other side does not trust it
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        problem = server_seen.look(f"127.0.0.1:{listener.getsockname()[1]}", ca / "ca.crt").problem
        thread.join()
    return problem


def test_each_way_in_which_a_server_is_the_wrong_one_has_its_line(tmp_path, signer):
    other = tmp_path / "other"
    certificate_authority.create(other, "elsewhere")
    good = certificate(signer, tmp_path / "good", "127.0.0.1", -1, 1)
    assert status_for(good, signer) == ""
    assert "certificate is of another federation" in status_for(good, other)
    assert "certificate has expired" in status_for(certificate(signer, tmp_path / "1", "127.0.0.1", -2, -1), signer)
    assert "not valid yet" in status_for(certificate(signer, tmp_path / "2", "127.0.0.1", 1, 2), signer)
    assert "is not for 127.0.0.1" in status_for(certificate(signer, tmp_path / "3", "10.0.0.1", -1, 1), signer)
    assert "status 404" in status_for(good, signer, b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
    assert "does not speak TLS" in status_for(None, signer)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # it never answers
        silent = f"127.0.0.1:{listener.getsockname()[1]}"
        assert "does not answer within 0.2 s" in server_seen.look(silent, signer / "ca.crt", 0.2).problem
    assert f"nothing listens at {silent}" in server_seen.look(silent, signer / "ca.crt").problem
    assert "no such host" in server_seen.look("no-such-host.invalid:1", signer / "ca.crt").problem


# --- workers ----------------------------------------------------------------------------------------------------------


def test_a_worker_is_let_go_once_when_its_run_has_ended_or_the_server_is_away(tmp_path, monkeypatch):
    folder = tmp_path / "runs/key/silo"
    folder.mkdir(parents=True)
    client_stub.enter_run(folder, 7, 2**63)
    assert client_stub.flower_run(folder) == (7, 2**63)
    state: dict[str, bool | None] = {"over": None, "clear": True}
    told, asked_of = list[str](), list[tuple[int, int]]()

    def over(node: int, run: int) -> bool | None:
        asked_of.append((node, run))
        return state["over"]

    watch = RunWatch(tmp_path / "runs", over, lambda: bool(state["clear"]), told.append)
    with open(folder / "worker.lock", "w") as lock, socket.socket(socket.AF_UNIX) as listener:
        lock.write("1")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        listener.bind(client_stub.address(folder))
        listener.listen(8)
        for answer in (None, False):
            state["over"] = answer
            watch.look()
        assert (told, asked_of) == ([], [(7, 2**63)] * 2)
        state["over"] = True
        watch.look()
        watch.look()  # it may be at work, and is asked once
        assert told == ["run key: its worker ends, since the run has ended"]
        link, _ = listener.accept()
        with link:
            message = client_stub.receive(link)
        assert message is not None
        assert message[1] == client_stub.END
        client_stub.enter_run(folder, 7, 8)  # the next run of the same folder
        state |= {"over": False, "clear": False}
        watch.look()
        assert len(told) == 1
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 121)
        watch.look()
        assert told[1:] == ["run key: its worker ends, since the server has not been reachable for 120 s"]
    watch.look()
    assert len(told) == 2
