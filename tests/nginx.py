"""NGINX as a plain process on loopback, with the fragment of a server's kit."""

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from processes import until

PROGRAM = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
needed = pytest.mark.skipif(
    PROGRAM is None or sys.platform != "linux", reason="NGINX is not installed (Debian: apt-get install nginx)"
)
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


class Nginx:
    """A proxy in front of a kit's SuperLink; its own files are in ``folder``.

    Args:
        server: the server's kit.
        limits: further lines for the http block, e.g. shorter timeouts than NGINX's own.
    """

    def __init__(self, folder: Path, server: Path, port: int, limits: str = "") -> None:
        self._folder, self._server, self.port = folder, server, port
        self._running: subprocess.Popen | None = None
        folder.mkdir()
        fragment = (server / "nginx.conf").read_text().replace("/path/to/server", str(server))
        (folder / "fragment.conf").write_text(fragment)
        places = "\n".join(f"    {name}_temp_path {folder / name};" for name in _TEMPORARY)
        user = "user root;\n" if os.geteuid() == 0 else ""  # its workers, which reach the folders of this test
        (folder / "main.conf").write_text(
            f"{user}daemon off;\nworker_processes 1;\npid {folder / 'pid'};\n"
            f"error_log {folder / 'error.log'} info;\nevents {{}}\nhttp {{\n{places}\n"
            f"    access_log {folder / 'access.log'};\n{limits}\n    include {folder / 'fragment.conf'};\n}}\n"
        )

    def _command(self, *args: str) -> list[str]:
        log = str(self._folder / "error.log")
        return [str(PROGRAM), "-p", str(self._folder), "-c", str(self._folder / "main.conf"), "-e", log, *args]

    def start(self) -> None:
        """Start it, and wait until it listens."""
        done = subprocess.run(self._command("-t"), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "warn" not in done.stderr, done.stderr
        self._running = subprocess.Popen(self._command(), stderr=subprocess.DEVNULL, start_new_session=True)
        until(self._listens, 20, "NGINX does not listen")

    def _listens(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        return False

    def reload(self) -> None:
        """Reload the configuration as an operator does, e.g. for a new certificate."""
        subprocess.run(self._command("-s", "reload"), capture_output=True, check=True)

    def kill(self) -> None:
        """Kill it with its workers: all connections end without a goodbye."""
        assert self._running is not None
        os.killpg(self._running.pid, signal.SIGKILL)
        self._running.wait(20)
        self._running = None

    def answer(self, request: str) -> int:
        """The status with which it answers a request line, sent as it is: no client tidies up its path."""
        context = ssl.create_default_context(cafile=str(self._server / "ca.crt"))
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as link,
        ):
            link.sendall(
                f"{request} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
            )
            return int(link.recv(4096).split()[1])

    def certificate(self) -> bytes:
        """The certificate that it shows."""
        return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", self.port)))

    def statuses(self) -> list[int]:
        """The status codes of all answered requests."""
        lines = (self._folder / "access.log").read_text().splitlines()
        return [int(line.split('" ')[1].split()[0]) for line in lines]

    def log(self) -> str:
        return (self._folder / "error.log").read_text()


@contextlib.contextmanager
def nginx(folder: Path, server: Path, port: int, limits: str = ""):
    """A proxy that listens; it ends with the block."""
    found = Nginx(folder, server, port, limits)
    found.start()
    try:
        yield found
    finally:
        if found._running is not None:
            found.kill()
