"""``fedfm silo check KIT EXPERIMENT``: compare a kit and its machine with the needs of an experiment."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.engines.flower import server_seen
from fedfm.engines.flower.kit_manifest import Kit, load
from fedfm.errors import InputError, lines_of
from fedfm.runtime import own_rows
from fedfm.runtime.run_manifest import of_silo
from fedfm.runtime.site_policy import method_names
from fedfm.sites import certificate_authority, consent_rules, identity, kits, silo_config

_SOON = 30  # a certificate that ends in fewer days than this is reported
OK, DIFFERS, NOTE = "ok", "differs", "note"

Line = dict[str, str]


def examine(folder: Path, experiment: Path | None) -> dict[str, Any]:
    """Check a kit, or a silo's file, against an experiment; without an experiment check only the kit.

    Returns:
        ``name``; ``fits``, whether no check failed; and ``checks``, a list of dicts. Each dict has ``what`` (the thing
        checked), ``status`` (ok, differs, note) and ``found`` (the result in words).

    Raises:
        InputError: there is no kit, or the experiment is not valid.
    """
    needed = None if experiment is None else Experiment.load(experiment)
    if folder.is_dir():
        kit = load(folder)
        name, checks = kit.name, [*_of_kit(kit)]
        file = None if kit.serves else folder / "silo.toml"
    else:
        name, file, checks = silo_config.load(folder).name, folder, []
    if file is not None:
        checks += _of_silo(name, file, needed)
    elif needed is not None:
        checks += _of_server(needed)
    return {"name": name, "fits": all(line["status"] != DIFFERS for line in checks), "checks": checks}


def render(found: dict[str, Any]) -> str:
    """Format the result of :func:`examine` as text, one line per check."""
    lines = [f"{found['name']}: {line['status']:<7} {line['what']}: {line['found']}" for line in found["checks"]]
    count = sum(line["status"] == DIFFERS for line in found["checks"])
    verdict = "fits" if found["fits"] else f"{count} {'thing differs' if count == 1 else 'things differ'}"
    return "\n".join([*lines, f"{found['name']}: {verdict}"])


def _line(what: str, status: str, found: str) -> Line:
    return {"what": what, "status": status, "found": found}


def _try(what: str, check: Callable[[], str]) -> Line:
    try:
        return _line(what, OK, check())
    except (InputError, OSError) as error:
        return _line(what, DIFFERS, "; ".join(lines_of(error, 500)))


# --- the kit and its machine -----------------------------------------------------------------------------------------


def _of_kit(kit: Kit) -> Iterator[Line]:
    yield _try("files", lambda: _files(kit))
    now = datetime.datetime.now(datetime.UTC)
    for name in ("ca.crt", "server.pem") if kit.serves else ("ca.crt",):
        yield _try(f"certificate {name}", partial(_certificate, kit.folder / name, now))
    if kit.serves:
        yield _line("port", OK if kits.free(kit.port) else NOTE, f"{kit.port} is {_port_use(kit.port)}")
        return
    yield _line("port", OK if kits.free(kit.port) else NOTE, f"{kit.port}, on loopback, is {_port_use(kit.port)}")
    yield from _server_seen(kit)


def _port_use(port: int) -> str:
    return "free" if kits.free(port) else "in use, perhaps by this kit itself"


def _files(kit: Kit) -> str:
    for name in kit.files:
        path = kit.folder / name
        if not path.is_file():
            raise InputError(f"{name} is missing; copy the kit again")
        if path.suffix in (".key", ".secret") and path.stat().st_mode & 0o077:
            raise InputError(f"{name} is open to other users; run chmod 600 {path}")
    return "all there; only the owner can read the keys"


def _certificate(path: Path, now: datetime.datetime) -> str:
    return _valid(*certificate_authority.validity(path), now)


def _valid(begin: datetime.datetime, end: datetime.datetime, now: datetime.datetime) -> str:
    if now < begin:
        raise InputError(f"valid from {begin:%Y-%m-%d %H:%M} UTC, but this machine's clock has {now:%Y-%m-%d %H:%M}")
    if now > end:
        raise InputError(f"ended on {end:%Y-%m-%d}; `fedfm provision FILE --out KITS --renew` makes a new one")
    left = (end - now).days
    return f"valid until {end:%Y-%m-%d}" + (f", {left} days: renew it soon" if left < _SOON else "")


def _server_seen(kit: Kit) -> Iterator[Line]:
    """Check the server's address, certificate and clock from this machine."""
    found = server_seen.look(kit.server, kit.folder / "ca.crt")
    if found.problem:
        yield _line("server", DIFFERS, found.problem)
        return
    yield _line("server", OK, f"{kit.server} answers, with a certificate of this federation")
    if found.ahead is None:
        yield _line("clock", NOTE, "the server does not report its time")
        return
    way = "ahead of" if found.ahead > 0 else "behind"
    off = abs(found.ahead)
    words = f"{off:.0f} s {way} the server's" if off > 2 else "as the server's"
    problem = server_seen.clock_problem(found.ahead)
    yield _line("clock", DIFFERS if problem else OK, problem or words)


# --- the experiment --------------------------------------------------------------------------------------------------


def _of_server(needed: Experiment) -> Iterator[Line]:
    from fedfm.runtime.population import populate

    def load_model() -> str:
        model = populate(needed, server=True).model
        return f"{needed.model.name}, fingerprint {model.fingerprint[:12]}"

    yield _try("model", load_model)


def _of_silo(name: str, file: Path, needed: Experiment | None) -> Iterator[Line]:
    try:
        silo = silo_config.load(file)
        silo_config.admit_methods(silo, file)
        if silo.name != name:
            raise InputError(f'name = "{silo.name}", but the kit belongs to {name}')
        identity.of(silo)
    except InputError as error:
        for line in lines_of(error, 500):
            yield _line(file.name, DIFFERS, line)
        return
    yield _line(file.name, OK, "read")
    if needed is None:
        yield _try("rows", lambda: _rows(silo))
        return
    yield from _policy(silo, needed)
    classes = _classes(silo, needed)
    yield classes
    if classes["status"] != DIFFERS:
        notices: list[str] = []
        yield _try("model", lambda: _model(silo, needed, notices))
        yield from (_line("notice", NOTE, notice) for notice in notices)


def _rows(silo: silo_config.Silo) -> str:
    from fedfm.data.spec import DataSpec

    rows = own_rows.deal(silo.rows, DataSpec(), seed=0, task=silo.task).clients[silo.name]
    return f"{len(rows.train)} training and {len(rows.test)} test rows"


def _policy(silo: silo_config.Silo, needed: Experiment) -> Iterator[Line]:
    def terms() -> str:
        consent_rules.check(silo, needed)
        return "the experiment promises what the silo requires"

    yield _try("terms", terms)
    method, allowed = needed.method, silo.policy.of(*method_names(needed))
    for used, word in ((method.means, "mean"), (method.asks, "reply")):
        if used and word not in allowed:
            missing = f'{needed.method_name} needs "{word}" ({silo_config.EXPOSED[word]}), and allow is {list(allowed)}'
            yield _line("policy", DIFFERS, missing)
            return
    scored = "scores" in allowed
    yield _line("policy", OK, "allows what the method asks" if scored else "the server gets no scores of this silo")


def _classes(silo: silo_config.Silo, needed: Experiment) -> Line:
    """Compare the silo's class names with those of the experiment, if this machine knows the latter."""
    from fedfm.data.load import load_table

    try:
        federated = own_rows.deal(silo.rows, needed.data, seed=needed.run.seed, task=needed.model.task)
        mine = own_rows.classes_of(silo.rows, federated.table, needed.model.task)
    except InputError as error:
        return _line("rows", DIFFERS, "; ".join(lines_of(error, 500)))
    spec = needed.data
    theirs = spec.classes or None
    if theirs is None and not needed.own_code:  # never import a function that the server names
        with contextlib.suppress(InputError):
            theirs = load_table(spec, seed=needed.run.seed, task=needed.model.task).classes
    if theirs is None:
        return _line("classes", NOTE, f"{list(mine)}; the server's rows, which have its classes, are not here")
    if tuple(theirs) == tuple(mine):
        return _line("classes", OK, f"{list(mine)}")
    same = sorted(theirs) == sorted(mine)
    difference = "the same names in another order" if same else _difference(tuple(theirs), tuple(mine))
    return _line("classes", DIFFERS, f"{difference}: the experiment has {list(theirs)}, and silo.toml has {list(mine)}")


def _difference(theirs: tuple[str, ...], mine: tuple[str, ...]) -> str:
    found = [f"without {name!r}" for name in theirs if name not in mine]
    return ", ".join([*found, *(f"with {name!r} in addition" for name in mine if name not in theirs)])


def _model(silo: silo_config.Silo, needed: Experiment, notices: list[str]) -> str:
    """Compare the silo's copy of the model with the fingerprint that the experiment pins, if it pins one.

    Args:
        notices: list to which the function adds the notices that a run would write into the silo's log.
    """
    federated = own_rows.deal(silo.rows, needed.data, seed=needed.run.seed, task=needed.model.task)
    mine = own_rows.classes_of(silo.rows, federated.table, needed.model.task)
    population = own_rows.populate(silo.rows, needed, mine)
    notices += of_silo(needed.method, population)
    found = population.model_or_none
    if found is None:
        return "the clients of this method have no model"
    name, pinned = silo.data if needed.own_code else found.spec.name, needed.model.fingerprint
    if pinned is not None and found.fingerprint != pinned:
        raise InputError(f"{name} has fingerprint {found.fingerprint[:12]}, and the experiment needs {pinned[:12]}")
    description = f"{name}, fingerprint {found.fingerprint}"
    return (
        description
        if pinned is not None
        else f"{description}; compare it with the output of `fedfm check` at the server"
    )
