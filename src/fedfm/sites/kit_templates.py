"""Texts of a kit's files: start script, systemd unit, compose file, silo.toml, configuration of NGINX, README."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedfm.core.toml_text import to_inline
from fedfm.version import __version__

if TYPE_CHECKING:
    from fedfm.engines.flower.kit_manifest import Kit
    from fedfm.sites.federation_config import FederationFile


def of_server(kit: Kit) -> dict[str, str]:
    """Return the texts of the server's kit by file name."""
    own = {"nginx.conf": _nginx(kit), "README.md": _READ_SERVER.format(address=kit.server, version=__version__)}
    return own | _units(kit, "server")


def of_silo(kit: Kit, federation: FederationFile) -> dict[str, str]:
    """Return the texts of a silo's kit by file name."""
    own = {"silo.toml": _silo(kit, federation), "README.md": _READ_SILO.format(kit=kit, version=__version__)}
    return own | _units(kit, "silo")


def _units(kit: Kit, role: str) -> dict[str, str]:
    who = f"fedfm {role}" + ("" if kit.serves else f" {kit.name}")
    return {
        "start.sh": _START.format(who=who),
        f"fedfm-{kit.name}.service": _SERVICE.format(who=who, name=kit.name),
        "compose.yaml": _compose(kit),
    }


def _compose(kit: Kit) -> str:
    if kit.loopback:
        network = "network_mode: host  # server and silos are on one machine"
    elif kit.serves and not kit.proxy:
        network = f'ports: ["{kit.port}:{kit.port}"]'
    elif kit.serves:
        network = "network_mode: host  # the server listens on loopback only; NGINX forwards requests to it"
    else:
        network = "# no port: the silo connects to the server, and nothing connects to the silo"
    rows = "" if kit.serves else '      # - /where/the/rows/are:/rows:ro  # and data = "/rows/..." in silo.toml\n'
    return _COMPOSE.format(service=kit.name, version=__version__, network=network, rows=rows)


def _silo(kit: Kit, federation: FederationFile) -> str:
    classes = to_inline(list(federation.classes)) if federation.classes is not None else None
    lines = [
        f'name = "{kit.name}"',
        'data = "rows.csv"                # your rows: a file or a folder, relative to this file',
        f"classes = {classes}" if classes else '# classes = ["...", "..."]      # as the federation agreed, in order',
        f"models = {to_inline(list(federation.models))}",
        f"allow = {to_inline(list(federation.allow))}",
        "",
        "# `fedfm silo check silo.toml` explains this file; the server never sees it.",
    ]
    return "\n".join(lines) + "\n"


def _nginx(kit: Kit) -> str:
    host, _, port = kit.server.rpartition(":")
    listen = f"[::]:{port}" if host.startswith("[") else port
    if kit.loopback:  # server and silos are on one machine, so other machines must not reach NGINX either
        listen = kit.server
    return _NGINX.format(
        listen=listen,
        name=host,
        port=kit.port if kit.proxy else "18443",
        hint=""
        if kit.proxy
        else "# This kit uses no proxy: set proxy = true in federation.toml, and make a kit with it.\n",
    )


_START = """#!/bin/sh
# Starts {who} with the keys in this folder; Ctrl-C or SIGTERM ends all of its processes.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
umask 077
exec ${{FEDFM:-fedfm}} start "$here"
"""

_SERVICE = """# Put this file into ~/.config/systemd/user and the kit into ~/fedfm/{name}; then run:
# systemctl --user enable --now fedfm-{name}
# `loginctl enable-linger` lets the unit run while nobody is logged in.
# A user's unit cannot wait for the network, so a silo tries to connect until the server answers.
[Unit]
Description={who}

[Service]
ExecStart=%h/fedfm/{name}/start.sh
Environment=FEDFM=%h/fedfm/venv/bin/fedfm
Restart=always
RestartSec=10
KillMode=mixed
UMask=0077
NoNewPrivileges=true

[Install]
WantedBy=default.target
"""

_COMPOSE = """# To build the image, run in the folder of fedfm's sources: docker build --tag fedfm:{version} .
# To start, run in this folder: docker compose up --detach
services:
  {service}:
    image: fedfm:{version}
    command: ["start", "/kit"]
    user: "${{FEDFM_USER:-1000:1000}}"  # the owner of this folder: id --user, id --group
    volumes:
      - .:/kit
{rows}    {network}
    restart: unless-stopped
    init: true
"""

_NGINX = """# A fragment for NGINX's http block; replace /path/to/server by the kit's folder.
# With this proxy, silos reach only the paths that they need. The port of Flower's SuperLink also accepts
# commands that start runs and register nodes, and has no accounts, so the SuperLink listens on loopback only.
# NGINX uses a new certificate after `nginx -s reload`.
{hint}server {{
    listen {listen} ssl;
    server_name {name};
    ssl_certificate     /path/to/server/server.pem;
    ssl_certificate_key /path/to/server/server.key;

    client_max_body_size 64m;      # a request of Flower has at most 5 MB; NGINX's default limit is 1 MB
    proxy_read_timeout 120s;
    proxy_request_buffering off;   # NGINX writes no update and
    proxy_max_temp_file_size 0;    # no model into temporary files

    # While the SuperLink restarts, another program may take its port. NGINX verifies the certificate, so that
    # such a program gets no request.
    proxy_ssl_verify on;
    proxy_ssl_trusted_certificate /path/to/server/ca.crt;
    proxy_ssl_name localhost;

    # The paths after the port make NGINX forward the normalised path that it has checked, not the path as it was
    # sent: NGINX reads /v1/control/list-nodes%3f/../../fleet/x as a path below /v1/fleet/, the SuperLink does not.
    location /v1/fleet/ {{ proxy_pass https://127.0.0.1:{port}/v1/fleet/; proxy_set_header Host $host; }}
    location = /health  {{ proxy_pass https://127.0.0.1:{port}/health; }}
    location /          {{ return 403; }}
}}
"""

_READ_SERVER = """# The server's kit

`./start.sh` starts the server at {address}, with fedfm {version}; so do `docker compose up --detach` and the unit for
systemd. The server admits the silos whose public keys are in `silos/`; you can add keys while it runs. It restarts
processes that end.

- `server.key` and `superexec.secret` are private. Anyone who has them can pose as the server.
- `operator.secret` is private. Anyone who has it and `ca.crt` can submit runs, which every silo then answers.
- Silos reach only what they need. `nginx.conf` configures a proxy in front of the server, if you want one.
- To start a run on this machine: `fedfm run exp.toml --engine deployment --set run.superlink=FOLDER`, with this folder.
- `fedfm silo check FOLDER exp.toml` reports whether this kit fits an experiment.
"""

_READ_SILO = """# The kit of {kit.name}

1. Write into `silo.toml` where your rows are and what requests may expose. The server never sees that file.
2. `fedfm silo check FOLDER exp.toml`, with this folder and the operator's experiment, reports what does not fit yet.
3. `./start.sh` connects to {kit.server}, with fedfm {version}; so do `docker compose up --detach` and the unit for
   systemd. The silo opens the connection, so it needs no open port. When the network fails, it connects again later.

`node.key` is private: anyone who has it can answer as {kit.name}. The operator made this key. To use a key that nobody
else ever had, make a new one (`ssh-keygen -q -t ecdsa -b 384 -N "" -f node.key`), and give the operator its public part
for `server/silos/`.
"""
