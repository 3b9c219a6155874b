"""Kits of a federation: keys, certificates, ports, kept files, refusals, and the check against experiments."""

import contextlib
import datetime
import http.server
import json
import os
import re
import shutil
import ssl
import stat
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedfm import __version__
from fedfm.cli import main
from fedfm.engines.flower import kit_manifest
from fedfm.sites import certificate_authority, supervisor

SILOS = ("hospital-a", "hospital-b")


def provision(folder: Path, more: str = "", *args: str, server: str = "127.0.0.1:0", silos=SILOS) -> Path:
    """Kits in ``folder/kits``."""
    file = folder / "federation.toml"
    file.write_text(f'server = "{server}"\nsilos = {json.dumps(list(silos))}\n{more}')
    assert main(["provision", str(file), "--out", str(folder / "kits"), *args]) == 0
    return folder / "kits"


def refused(folder: Path, capsys, text: str) -> str:
    """The one line with which a file is refused."""
    (folder / "federation.toml").write_text(text)
    assert main(["provision", str(folder / "federation.toml"), "--out", str(folder / "new")]) == 2
    told = capsys.readouterr().err.strip()
    assert "\n" not in told
    assert not (folder / "new").exists()
    return told


def digest(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("umask", [0, 0o077])
def test_private_files_are_their_owners_and_silos_get_no_key_of_another(tmp_path, umask):
    before = os.umask(umask)
    try:
        out = provision(tmp_path)
    finally:
        os.umask(before)
    assert not any(stat.S_IMODE(p.stat().st_mode) & 0o022 for p in out.rglob("*"))  # nobody else changes ca.crt
    private = {p for p in out.rglob("*") if p.suffix in (".key", ".secret")}
    assert {p.name for p in private} == {"ca.key", "server.key", "superexec.secret", "operator.secret", "node.key"}
    assert {stat.S_IMODE(p.stat().st_mode) for p in private} == {0o600}
    assert {stat.S_IMODE((out / name).stat().st_mode) for name in ("authority", "server", *SILOS)} == {0o700}
    secrets = {p.read_bytes() for p in private}
    assert len(secrets) == len(private)
    for name in SILOS:
        mine = {p for p in (out / name).rglob("*") if p.is_file() and p.read_bytes() in secrets}
        assert mine == {out / name / "node.key"}
        key = serialization.load_ssh_private_key((out / name / "node.key").read_bytes(), None)
        public = serialization.load_pem_public_key((out / "server" / "silos" / f"{name}.pub").read_bytes())
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert key.public_key().public_numbers() == public.public_numbers()


def test_the_certificate_is_the_authoritys_for_the_servers_names_and_days(tmp_path):
    out = provision(tmp_path, 'days = 20\nhosts = ["10.0.0.7", "fed.internal"]\n', server="fed.example.org:9443")
    authority, server = (
        x509.load_pem_x509_certificate((out / name).read_bytes()) for name in ("authority/ca.crt", "server/server.pem")
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fed.example.org", "fed.internal", "localhost"}
    assert {str(a) for a in names.get_values_for_type(x509.IPAddress)} == {"10.0.0.7", "127.0.0.1", "::1"}
    left = server.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=19) < left < datetime.timedelta(days=21)
    assert all((out / name / "ca.crt").read_bytes() == (out / "authority/ca.crt").read_bytes() for name in SILOS)


def test_ports_do_not_collide_with_each_other_nor_with_what_listens(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        out = provision(tmp_path, f"first_port = {min(first, 65000)}\n", silos=[f"s{i}" for i in range(6)])
        found = [json.loads(p.read_text())["port"] for p in out.glob("*/kit.json")]
        assert len({*found, first}) == 8


def test_again_with_more_silos_adds_kits_and_keeps_every_key(tmp_path, capsys):
    out = provision(tmp_path)
    before = digest(out)
    provision(tmp_path, silos=(*SILOS, "hospital-c"))
    after = digest(out)
    assert {k: after[k] for k in before} == before
    assert {k.split("/")[0] for k in after.keys() - before.keys()} == {"hospital-c", "server"}
    assert after["server/silos/hospital-c.pub"] == after["hospital-c/node.pub"]
    capsys.readouterr()
    provision(tmp_path, "", "--renew")
    renewed = digest(out)
    changed = {k for k in after if renewed[k] != after[k]}
    assert changed == {"server/server.pem", "server/server.key"}
    assert "certificate is new" in capsys.readouterr().out


def test_kits_that_were_stopped_at_any_file_are_completed(tmp_path, monkeypatch):
    """As by Ctrl-C or a full disk: the same command goes on, and no certificate is left without its key."""
    whole = sorted(str(p.relative_to(tmp_path)) for p in provision(tmp_path, silos=SILOS[:1]).rglob("*"))
    shutil.rmtree(tmp_path / "kits")
    opened, write, write_text, left = os.open, Path.write_bytes, Path.write_text, [0]

    def count():
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    def counted_open(path, flags, *more, **how):
        if flags & os.O_CREAT and "kits" in str(path):
            count()
        return opened(path, flags, *more, **how)

    def counted_write(self, data):
        count()
        return write(self, data)

    def counted_text(self, *args, **how):
        count()
        return write_text(self, *args, **how)

    monkeypatch.setattr(os, "open", counted_open)
    monkeypatch.setattr(Path, "write_bytes", counted_write)
    monkeypatch.setattr(Path, "write_text", counted_text)
    kits, begun = tmp_path / "kits", set()
    for at in (2, 5, 8, 16):
        left[0] = at
        assert main(["provision", str(tmp_path / "federation.toml"), "--out", str(kits)]) == 130
        for pair in (("authority/ca.key", "authority/ca.crt"), ("server/server.key", "server/server.pem")):
            assert len({(kits / name).exists() for name in pair}) == 1
        begun |= {
            name for name in ("server", *SILOS) if (kits / name).is_dir() and not (kits / name / "kit.json").exists()
        }
        left[0] = -1
        provision(tmp_path, silos=SILOS[:1])
        assert sorted(str(p.relative_to(tmp_path)) for p in kits.rglob("*")) == whole
        shutil.rmtree(kits)
    assert begun == {"server", SILOS[0]}  # a kit of each kind was there in part


def test_kits_of_another_server_and_other_folders_are_refused(tmp_path, capsys):
    out = provision(tmp_path)
    before = digest(out)
    (tmp_path / "other.toml").write_text('server = "fed.example.org:443"\nsilos = ["x"]\n')
    assert main(["provision", str(tmp_path / "other.toml"), "--out", str(out)]) == 2
    assert "another server in another folder" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert main(["provision", str(tmp_path / "federation.toml"), "--out", str(tmp_path / "full")]) == 2
    assert digest(out) == before
    (out / "authority" / "ca.key").unlink()
    assert main(["provision", str(tmp_path / "federation.toml"), "--out", str(out)]) == 2
    assert "ca.key is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('silos = ["a"]', 'server = "": expected a host'),
        ('server = "h:1"', "silos"),
        ('server = "h:1"\nsilos = []', "silos"),
        ('server = "h:1"\nsilos = ["a", "A"]', 'silos: "a" is there twice'),
        ('server = "h:1"\nsilos = ["\uff41", "a"]', 'silos: "a" is there twice'),  # a of full width
        ('server = "h:1"\nsilos = ["../a"]', 'silos[0] = "../a"'),
        ('server = "h:1"\nsilos = ["server"]', "give the silo another"),
        ('server = "h:0"\nsilos = ["a"]', 'expected "h:8443"'),
        ('server = "h:70000"\nsilos = ["a"]', "65535"),
        ('server = "https://h"\nsilos = ["a"]', "expected a host and a port"),
        (
            'server = "0.0.0.0:8443"\nsilos = ["a"]',
            "server: 0.0.0.0 is an address for listening, not for connecting",
        ),
        ('server = "0:8443"\nsilos = ["a"]', "an address for listening"),
        ('server = "0.1.2.3"\nsilos = ["a"]', "an address for listening"),
        ('server = "[::]:8443"\nsilos = ["a"]', "an address for listening"),
        ('server = "224.0.0.1"\nsilos = ["a"]', "an address of many machines"),
        ('server = "255.255.255.255"\nsilos = ["a"]', "an address of many machines"),
        ('server = "[ff02::1]"\nsilos = ["a"]', "an address of many machines"),
        ('server = "240.0.0.1"\nsilos = ["a"]', "an address of no machine"),
        ('server = "[fe80::1]"\nsilos = ["a"]', "another machine in each network"),
        ('server = "h:1"\nsilos = ["a"]\nhosts = ["0.0.0.0"]', "hosts: 0.0.0.0 is an address for listening"),
        ('server = "h:1"\nsilos = ["a"]\ndays = 0', "days = 0"),
        ('server = "h:1"\nsilos = ["a"]\nsilo = 1', "unknown key"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, capsys, text, says):
    assert says in refused(tmp_path, capsys, text)


def test_an_incomplete_kit_does_not_start(tmp_path, capsys):
    out = provision(tmp_path)
    told = []
    for change, says in (
        (lambda: None, "rows.csv does not exist"),
        (lambda: (out / "hospital-a" / "node.key").chmod(0o644), "open to other users"),
        (lambda: (out / "hospital-a" / "node.key").unlink(), "node.key is missing"),
        (lambda: (out / "hospital-a" / "kit.json").write_text("{}"), "its schema is None, and this fedfm reads 1"),
        (lambda: (out / "hospital-a" / "kit.json").unlink(), "there is no kit"),
    ):
        change()
        assert main(["start", str(out / "hospital-a")]) == 2
        told.append(capsys.readouterr().err)
        assert says in told[-1]


# --- the check -------------------------------------------------------------------------------------------------------

EXPERIMENT = """
[data]
classes = ["a", "b", "c"]
kind = "features"
width = 5
[model]
name = "features"
{model}
[method]
name = "fedavg"
rounds = 2
[run]
engine = "deployment"
"""


def rows(place: Path, seed: int = 0) -> None:
    """A silo's rows, and their place in its file."""
    rng, y = np.random.default_rng(seed), np.arange(60) % 3
    x = (rng.normal(size=(60, 5)) + y[:, None]).astype(np.float32)
    split = np.where(np.arange(60) % 5 == 0, "test", "train")
    np.savez(place / "rows.npz", x=x, y=y, classes=np.array(["a", "b", "c"]), split=split)
    file = place / "silo.toml"
    file.write_text(file.read_text().replace("rows.csv", "rows.npz"))


@contextlib.contextmanager
def answering(kit: kit_manifest.Kit, ahead: float):
    """A server with the kit's certificate at the kit's port, whose clock is ahead by these seconds."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def date_time_string(self, timestamp=None):
            return super().date_time_string(datetime.datetime.now().timestamp() + ahead)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", kit.port), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kit.folder / "server.pem", kit.folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def examined(capsys, *args: object) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and (status, found) of each line of `fedfm silo check`."""
    capsys.readouterr()
    code = main(["silo", "check", *map(str, args), "--format", "json"])
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found["fits"] == (code == 0)
    return code, {line["what"]: (line["status"], line["found"]) for line in found["checks"]}


def test_check_reports_the_differences(tmp_path, capsys):
    out = provision(tmp_path)
    kit = out / "hospital-a"
    rows(kit)
    exp = tmp_path / "exp.toml"
    exp.write_text(EXPERIMENT.format(model=""))
    code, found = examined(capsys, kit, exp)
    assert code == 1
    assert [what for what, (status, _) in found.items() if status == "differs"] == ["server"]
    capsys.readouterr()
    with answering(kit_manifest.load(out / "server"), 0.0):
        code, found = examined(capsys, kit, exp)
        assert code == 0, found
        assert main(["silo", "check", str(kit), str(exp)]) == 0
        assert "hospital-a: fits" in capsys.readouterr().out
        exp.write_text(EXPERIMENT.format(model=f'fingerprint = "{"0" * 64}"'))
        silo = (kit / "silo.toml").read_text()
        text = silo.replace("# classes", "classes").replace('["...", "..."]', '["a", "c", "b"]')
        (kit / "silo.toml").write_text(text.replace('allow = ["mean", "scores"]', 'allow = ["scores"]'))
        (kit / "node.key").chmod(0o640)
        code, found = examined(capsys, kit, exp)
        assert code == 1
        assert {what for what, (status, _) in found.items() if status == "differs"} == {"files", "policy", "classes"}
        assert "another order" in found["classes"][1]
        (kit / "silo.toml").write_text(silo)
        code, found = examined(capsys, kit, exp)
        assert "the experiment needs 000000" in found["model"][1]
    with answering(kit_manifest.load(out / "server"), 400.0):
        code, found = examined(capsys, kit, exp)
        assert found["clock"] == ("differs", found["clock"][1])
        seconds = re.search(r"(\d+) s behind the server's", found["clock"][1])
        assert 395 <= float(seconds[1]) <= 405


def test_check_tries_the_silos_rows(tmp_path, capsys):
    kit = provision(tmp_path) / "hospital-a"
    rows(kit)
    with np.load(file := kit / "rows.npz") as arrays:
        changed = dict(arrays)
    changed["x"] = changed["x"].astype(np.float32)
    changed["x"][:, 1] *= 1e30
    np.savez(file, **changed)
    exp = tmp_path / "exp.toml"
    exp.write_text(EXPERIMENT.format(model=""))
    status, found = examined(capsys, kit, exp)[1]["model"]
    assert (status, "column x[:, 1]" in found) == ("differs", True)


def test_server_and_silo_print_the_same_fingerprint(tmp_path, capsys):
    out = provision(tmp_path)
    rows(out / "hospital-a")
    exp = tmp_path / "exp.toml"
    exp.write_text(EXPERIMENT.format(model="") + f'superlink = "{out / "server"}"\n')
    capsys.readouterr()
    assert main(["check", str(exp)]) == 0
    told = capsys.readouterr().out
    assert 'classes = ["a", "b", "c"]' in told
    print_ = told.partition('model.fingerprint = "')[2].partition('"')[0]
    assert len(print_) == 64
    assert print_ in examined(capsys, out / "hospital-a", exp)[1]["model"][1]
    exp.write_text(exp.read_text().replace("[model]", f'[model]\nfingerprint = "{print_}"'))
    code, found = examined(capsys, out / "server", exp)
    assert (code, found["model"][0]) == (0, "ok")


def test_check_names_a_server_of_another_federation(tmp_path, capsys):
    out = provision(tmp_path)
    (tmp_path / "b").mkdir()
    port = kit_manifest.load(out / "server").port
    other = provision(tmp_path / "b", server=f"127.0.0.1:{port}")
    rows(out / "hospital-a")
    with answering(kit_manifest.load(other / "server"), 0.0):
        code, found = examined(capsys, out / "hospital-a")
    assert code == 1
    assert "certificate is of another federation" in found["server"][1]


def test_the_silos_file_of_a_kit_is_valid_and_the_scripts_parse(tmp_path):
    out = provision(tmp_path, 'classes = ["benign", "malignant"]\nmodels = ["bert"]\n', server="fed.example.org")
    for name in SILOS:
        told = tomllib.loads((out / name / "silo.toml").read_text())
        assert (told["name"], told["classes"], told["models"]) == (name, ["benign", "malignant"], ["bert"])
    for script in out.glob("*/start.sh"):
        assert script.stat().st_mode & 0o111
        assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    shown = subprocess.run(
        [out / "server" / "start.sh"], env={"FEDFM": "echo", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert shown.stdout.split() == ["start", str(out / "server")]
    assert sys.executable  # the scripts need no Python of their own


def test_the_compose_files_name_the_image_that_the_dockerfile_makes(tmp_path):
    root = Path(__file__).resolve().parents[2]
    out = provision(tmp_path, "proxy = true\n", server="fed.example.org")
    image = f"fedfm:{__version__}"
    assert all(f"image: {image}\n" in p.read_text() for p in out.glob("*/compose.yaml"))
    assert f"docker build --tag {image} ." in (root / "docs/how-to/sites.md").read_text()
    made = (root / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["fedfm"]' in made  # of which the compose files give the arguments
    kept = {line.removeprefix("!") for line in (root / ".dockerignore").read_text().splitlines()}
    copied = [words[1:-1] for line in made.splitlines() if (words := line.split()) and words[0] == "COPY"]
    for name in [name for names in copied for name in names]:
        assert (root / name).exists()
        assert name in kept
    # A published port does not reach a process on the container's own loopback.
    assert "network_mode: host" in (out / "server" / "compose.yaml").read_text()


def verified(out: Path, home: Path, change: tuple[str, str] = ("", "")) -> subprocess.CompletedProcess:
    """What systemd says of the units of kits that lie where their first lines want them."""
    shutil.copytree(out, home / "fedfm")
    program = home / "fedfm/venv/bin/fedfm"
    program.parent.mkdir(parents=True)
    program.symlink_to(Path(sys.executable).parent / "fedfm")
    units = home / ".config/systemd/user"
    units.mkdir(parents=True)
    for path in out.glob("*/*.service"):
        (units / path.name).write_text(path.read_text().replace(*change))
    env = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": str(home)}
    command = ["systemd-analyze", "--user", "verify", *map(str, sorted(units.iterdir()))]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_has_nothing_to_say_about_the_units(tmp_path):
    out = provision(tmp_path, server="fed.example.org")
    assert len(list(out.glob("*/*.service"))) == 3
    done = verified(out, tmp_path / "home")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = verified(out, tmp_path / "other", ("Restart=always", "Restart=ever"))
    assert "restart specifier" in done.stderr


def compose() -> list[str] | None:
    """The command that reads compose files, if there is one."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker") is None:
        return None
    done = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if done.returncode == 0 else None


@pytest.mark.parametrize(
    ("server", "more", "network"),
    [
        ("fed.example.org", "", {"ports": 8443}),
        ("fed.example.org", "proxy = true\n", {"network_mode": "host"}),
        ("127.0.0.1:0", "", {"network_mode": "host"}),
    ],
)
def test_compose_reads_the_files_and_finds_kit_and_port(tmp_path, server, more, network):
    if (command := compose()) is None:
        pytest.skip("neither docker-compose nor docker compose is installed")
    out = provision(tmp_path, more, server=server)
    for name in ("server", *SILOS):
        env = {**os.environ, "FEDFM_USER": "1234:5678"}
        read = [*command, "config", "--format", "json"] if len(command) == 2 else [*command, "config"]
        done = subprocess.run(read, cwd=out / name, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        service = yaml.safe_load(done.stdout)["services"][name]  # JSON is YAML
        assert service["command"] == ["start", "/kit"]
        assert service["user"] == "1234:5678"
        (volume,) = service["volumes"]
        source, target = (volume["source"], volume["target"]) if isinstance(volume, dict) else volume.split(":")[:2]
        assert (source, target) == (str(out / name), "/kit")
        if "ports" in network and name == "server":
            (port,) = service["ports"]
            assert (int(port["published"]), port["target"]) == (kit_manifest.load(out / name).port, network["ports"])
        else:
            assert "ports" not in service
        if "network_mode" in network and (name == "server" or not more):
            assert service["network_mode"] == "host"


def test_the_fragment_listens_where_the_silos_connect_and_passes_on_to_loopback(tmp_path):
    for number, (server, more, listen, name, inner) in enumerate(
        (
            ("fed.example.org", "", "8443", "fed.example.org", 18443),  # it says that the kit needs proxy = true
            ("fed.example.org:18443", "proxy = true\n", "18443", "fed.example.org", 18444),
            ("[2001:db8::7]:9443", "proxy = true\n", "[::]:9443", "[2001:db8::7]", 18443),
            ("127.0.0.1:0", "proxy = true\n", "127.0.0.1:{port}", "127.0.0.1", None),
        )
    ):
        (tmp_path / str(number)).mkdir()
        kit = kit_manifest.load(provision(tmp_path / str(number), more, server=server) / "server")
        text = (kit.folder / "nginx.conf").read_text()
        assert f"listen {listen.format(port=kit.server.rpartition(':')[2])} ssl;" in text
        assert f"server_name {name};" in text
        assert f"proxy_pass https://127.0.0.1:{inner or kit.port}/v1/fleet/;" in text
        assert ("make a kit with it" in text) == (not more)


@pytest.mark.parametrize(
    ("server", "more", "listens", "local"),
    [
        ("fed.example.org", "", "0.0.0.0", "127.0.0.1:8443"),
        ("fed.example.org", "proxy = true\n", "127.0.0.1", "127.0.0.1:18443"),
        ("[2001:db8::1]", "", "::", "[::1]:8443"),
        ("[::1]:8443", "", "::1", "[::1]:8443"),
        ("localhost:8443", "", "127.0.0.1", "127.0.0.1:8443"),
        ("127.0.0.2:8443", "", "127.0.0.2", "127.0.0.2:8443"),
    ],
)
def test_the_superlink_listens_where_the_silos_connect(tmp_path, capsys, server, more, listens, local):
    kit = kit_manifest.load(provision(tmp_path, more, server=server) / "server")
    assert (kit.listens, kit.local) == (listens, local)
    rehearsal = "no other machine reaches a server there"
    assert (rehearsal in capsys.readouterr().out) == kit.loopback == (server[:3] in ("[::", "loc", "127"))


def test_a_servers_kit_without_an_operators_secret_gets_one_and_does_not_start_before(tmp_path, capsys):
    out = provision(tmp_path)
    (out / "server/operator.secret").unlink()
    before = digest(out)
    assert main(["start", str(out / "server")]) == 2
    assert "operator.secret is missing" in capsys.readouterr().err
    provision(tmp_path)
    after = digest(out)
    assert len(after.pop("server/operator.secret")) == 64
    assert {name: after[name] for name in before} == before


def test_a_server_whose_certificate_has_ended_does_not_start(tmp_path, capsys, monkeypatch):
    out = provision(tmp_path)
    until = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2)
    monkeypatch.setattr(certificate_authority, "validity", lambda path: (until, until))
    assert main(["start", str(out / "server")]) == 2
    assert f"the certificate ended on {until:%Y-%m-%d}" in capsys.readouterr().err


def test_a_silo_says_why_it_cannot_connect_and_starts_no_node_before(tmp_path):
    """A server of another federation, then one whose clock differs, then none, at which a node may try."""
    out = provision(tmp_path)
    (tmp_path / "b").mkdir()
    kit = out / "hospital-a"
    other = provision(tmp_path / "b", server=kit_manifest.load(kit).server)
    rows(kit)
    told = list[str]()
    node = kit / ".fedfm/logs/supernode.log"

    def until(ready):
        end = time.monotonic() + 60
        return lambda: ready() or time.monotonic() > end

    for server, ahead, says in (
        (
            other,
            0.0,
            "the server's certificate is of another federation; the authority in this kit's ca.crt did not sign it",
        ),
        (out, 320.0, "behind the server's (allowed: at most 305 s); set the clock"),
        (out, -20.0, "ahead of the server's (allowed: at most 5 s); set the clock"),
    ):
        with answering(kit_manifest.load(server / "server"), ahead):
            supervisor.start(kit, told.append, until(lambda says=says: any(says in line for line in told)))
        assert sum(says in line for line in told) == 1
        assert says in (kit / ".fedfm/silo.log").read_text()
        assert not node.exists()
    supervisor.start(kit, told.append, until(node.exists))
    assert sum("nothing listens" in line for line in told) == 1
    assert node.exists()
