"""A folder for ``FLWR_HOME``, with which Flower's command ``flwr`` sends the operator's secret to a kit's SuperLink.

``flwr`` sends the credential that its credentials file has for an address. In Flower this file is for account tokens.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

from fedfm.engines.flower.loopback_keys import write_private

CONNECTION = "server"  # name of the SuperLink in commands of ``flwr``
CREDENTIAL = "flower.account-auth.{address}.{part}"  # a key of the credentials file


def write(folder: Path, address: str, authority: Path, secret: Path) -> None:
    """Write the folder, replacing an earlier one.

    Args:
        address: the SuperLink's host:port for processes on its own machine.
        authority: PEM file of the certificate authority of the federation.
        secret: the file with the operator's secret.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    parts = {"authn-type": "oidc", "oidc-access-token": secret.read_text().strip(), "oidc-refresh-token": "none"}
    credentials = {
        CREDENTIAL.format(address=address, part=part): base64.b64encode(value.encode()).decode()
        for part, value in parts.items()
    }
    write_private(folder / "credentials.yaml", json.dumps(credentials).encode())
    config = f"address = {json.dumps(address)}\nroot-certificates = {json.dumps(str(authority))}\n"
    text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{config}'
    write_private(folder / "config.toml", text.encode())
