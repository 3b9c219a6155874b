"""The folder engine: the server's side of a run whose messages are files.

Each silo answers with ``fedfm silo serve`` on its own machine. ``fedfm resume`` continues a stopped run. It does not
repeat requests that have a reply, since ``private/folder`` of the run has the replies of the current round.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.config.cohorts import enough
from fedfm.core.client import ClientId
from fedfm.core.method import fraction_of
from fedfm.core.wire.limits import room
from fedfm.engines.flower.app_writer import experiment_text
from fedfm.engines.flower.deployment import key_of
from fedfm.engines.folder.letters import SERVER, shared_key
from fedfm.engines.folder.link import FolderLink, Post
from fedfm.engines.folder.mailbox import mailboxes
from fedfm.engines.folder.request_record import RequestRecord
from fedfm.errors import InputError
from fedfm.linalg.threads import torch_threads
from fedfm.privacy.crypto import keys
from fedfm.runtime import logs, row_sums, waiting_file
from fedfm.runtime.disclosure import tell
from fedfm.runtime.judge import judge
from fedfm.runtime.population import populate
from fedfm.runtime.rosters import key_in, roster_in
from fedfm.runtime.run_manifest import describe
from fedfm.runtime.server import Server

if TYPE_CHECKING:
    from fedfm.config.run_spec import RunSpec
    from fedfm.runtime.progress import Progress
    from fedfm.runtime.run_directory import Run


def start(run: Run, stop: Callable[[], bool], progress: Progress) -> dict[str, Any]:
    """Run to the end with the silos that the roster names.

    Raises:
        InputError: the folder, roster, key or server's own data are invalid.
    """
    experiment, spec = run.experiment, run.experiment.run
    private = _own_key(spec)
    posts = _posts(run, private, progress.notice)
    progress.notice(f"the server's public key, for each silo.toml: {keys.identity_of(private).hex()}")

    progress.notice(f"the run is in {run.path}; if it is stopped, `fedfm resume {run.path}` continues it")

    def note(text: str) -> None:
        run.manifest["notices"].append(text)
        run.write_manifest()
        progress.notice(text)

    with torch_threads(1):
        population = populate(experiment, server=True)
        describe(run, population, progress)
        run.manifest["clients"] = sorted(posts)
        tell(run, None, [])
        run.write_manifest()
        enough(experiment, list(posts))
        link = FolderLink(
            posts,
            key_of(run),
            experiment_text(experiment),
            patience=math.inf if spec.extend_timeout else spec.timeout,
            identity=population.model.identity,
            most=room(population.model.layout),
            greeting={"classes": list(population.federated.table.classes), **row_sums.known_keys(run, experiment)},
            min_clients=spec.min_clients or 1,
            lazy=fraction_of(experiment.method) < 1,
            stop=stop,
            waits=waiting_file.Writer(run.path).tell,
            progress=progress.client,
            notice=note,
            tell=progress.notice,
        )
        scores = judge(population, experiment.method)
        server = Server(run, link, population.model, judge=scores, progress=progress)
        link.list_hellos(server.fed.transcript.add)
        if row_sums.check_silos(experiment):
            row_sums.agree(run, experiment, server.fed, link.greet, progress.notice)
        return server.go()


def _own_key(spec: RunSpec) -> bytes:
    """The server's private key. It is made if its file does not exist."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(spec.identity).expanduser() if spec.identity else Path(home) / "fedfm" / "server.key"
    try:
        if not spec.identity:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.parent.is_dir():
            raise InputError(f"identity: {path.parent} is not a folder; make it, or name another file")
        return key_in(path, create=True)
    except InputError as error:
        raise InputError(f"run.{error}") from None


def _posts(run: Run, private: bytes, notice: Callable[[str], None]) -> dict[ClientId, Post]:
    spec = run.experiment.run
    root = Path(str(spec.folder)).expanduser()
    if not root.is_dir():
        raise InputError(f'run.folder = "{spec.folder}": no such folder; make it, or plug in the disk')
    try:
        roster = roster_in(Path(str(spec.roster)).expanduser())
    except InputError as error:
        raise InputError(f"run.{error}") from None
    if SERVER in roster:
        raise InputError(f"run.roster: {spec.roster}: \"{SERVER}\" cannot be a silo's name; it is the server's")
    posts, begun = {}, bool(run.metrics())
    asked = {message["to"] for message in logs.messages(run.path / logs.MESSAGES)} if begun else set[ClientId]()
    if begun and sorted(roster) != run.manifest["clients"]:
        raise InputError(f"run.roster: {spec.roster} has other silos than this run began with; put the old roster back")
    for name, public in roster.items():
        try:
            key = shared_key(private, public)
        except InputError as error:
            raise InputError(f"run.roster: {name}: {error}") from None
        out, back = mailboxes(root.resolve(), name, key, notice)
        posts[name] = Post(out, back, RequestRecord(run.path / "private" / "folder", name, key, name in asked))
    return posts
