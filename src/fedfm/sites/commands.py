"""The subcommands ``fedfm provision``, ``fedfm start`` and ``fedfm silo``."""

from __future__ import annotations

import contextlib
import os
import sys
import tomllib
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from fedfm.api.command_registry import Command
from fedfm.api.terminal import say, tell
from fedfm.core.text import visible
from fedfm.errors import InputError


def provision(args: Namespace) -> int:
    """Run ``fedfm provision``; return the exit code."""
    from fedfm.sites import federation_config, kits

    found = kits.provision(federation_config.load(args.federation), args.out, renew=args.renew)
    return say(args, found, kits.render(found))


def start(args: Namespace) -> int:
    """Run ``fedfm start``; return the exit code."""
    from fedfm.sites import supervisor

    supervisor.start(args.kit, lambda text: tell(f"fedfm: {visible(text)}", sys.stderr))
    return 0


def silo(args: Namespace) -> int:
    """Run ``fedfm silo``; return the exit code."""
    if args.what == "serve":
        return _serve(args)
    if args.folder is not None or args.once:
        raise InputError(f"--folder and --once are for `fedfm silo serve`; `fedfm silo {args.what}` takes neither")
    if (args.out is not None) != (args.what == "sums") or (args.what == "sums" and args.experiment is None):
        raise InputError("silo: `fedfm silo sums silo.toml RUN --out FILE` takes --out, and nothing else does")
    if args.what == "sums":
        return _sums(args)
    from fedfm.sites import ledger_summary, predictions, silo_config

    if args.what == "check" and (args.experiment is not None or (args.file / "kit.json").exists()):
        from fedfm.sites import kit_check

        checked = kit_check.examine(args.file, args.experiment)
        say(args, checked, kit_check.render(checked))
        return 0 if checked["fits"] else 1
    if args.experiment is not None:
        raise InputError(f"{args.experiment}: only `fedfm silo check KIT EXPERIMENT` takes an experiment")
    of: Any = {"check": silo_config, "show": ledger_summary, "predictions": predictions}[args.what]
    found = of.report(args.file)
    return say(args, found, of.render(found))


def _serve(args: Namespace) -> int:
    """Run ``fedfm silo serve``; return the exit code."""
    if args.folder is None:
        raise InputError("silo serve: give the folder for the messages: --folder DIR")
    _offline(args.file)
    from fedfm.sites.folder_server import serve

    found = serve(args.file, args.folder, once=args.once, tell=lambda text: tell(f"fedfm: {text}", sys.stderr))
    return say(args, found, f"{found['name']}: answered {found['answered']}")


def _sums(args: Namespace) -> int:
    """Run ``fedfm silo sums``; return the exit code."""
    _offline(args.file)
    from fedfm.sites import own_sums

    found = own_sums.report(args.file, args.experiment, args.out)
    return say(args, found, own_sums.render(found))


def _offline(path: Path) -> None:
    """Set the environment variables that keep libraries offline, unless the silo's file allows downloads.

    The libraries read these variables when they are imported.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):  # silo_config.load reports the fault later
        if tomllib.loads(path.read_text(encoding="utf-8-sig")).get("downloads") is not True:
            os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def _provision_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("federation", type=Path, help='TOML file: server = "host:port", silos = ["a", "b"]')
    parser.add_argument("--out", type=Path, required=True, help="folder of the kits; its existing keys are kept")
    parser.add_argument("--renew", action="store_true", help="also make a new certificate for the server")


def _start_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("kit", type=Path, help="the kit's folder, made by `fedfm provision`")


def _silo_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=("check", "show", "predictions", "serve", "sums"),
        default="check",
        help="check: test the silo's file and rows; show: print its ledger; predictions: print the predictions of its "
        "runs; serve: answer the requests in a folder; sums: write its own sums of a finished run into a file [check]",
    )
    parser.add_argument("file", type=Path, help="the silo's file, silo.toml; or a kit's folder")
    parser.add_argument(
        "experiment",
        type=Path,
        nargs="?",
        metavar="experiment or run",
        help="check: compare the kit with the needs of this experiment; sums: the folder with the run's manifest.json",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="sums: the file for the silo's own sums")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="serve: the folder for the messages")
    parser.add_argument("--once", action="store_true", help="serve: answer the requests that are there, and end")


_PROVISION_EXAMPLES = """examples:
  fedfm provision federation.toml --out kits           makes kits/server, kits/hospital-a, ...; keep kits/authority here
  fedfm provision federation.toml --out kits           again, with more silos: adds their kits, keeps all keys
  fedfm provision federation.toml --out kits --renew   a new certificate for the server, before the old one ends

a federation's file:
  server = "fed.example.org:8443"                      where silos reach it; "127.0.0.1:0" if all run on this machine
  silos = ["hospital-a", "hospital-b"]
  classes = ["benign", "malignant"]                    as the federation agreed, in order
  models = ["/srv/models/bert-small"]                  models that the silos load, in addition to the built-in ones
  days = 365                                           validity of the server's certificate
  proxy = false                                        true: the server is behind NGINX, see server/nginx.conf
"""
_START_EXAMPLES = """examples:
  fedfm start kits/server                              starts Flower's SuperLink, and admits the silos; Ctrl-C ends it
  fedfm start kits/hospital-a                          starts a silo; it connects again when the network is back
  kits/hospital-a/start.sh                             the same
"""
_SILO_EXAMPLES = """examples:
  fedfm silo check kits/hospital-a exp.toml            tests policy, classes, model, certificates, clock and ports
  fedfm silo check silo.toml                           tests the file and its rows; also: fedfm silo silo.toml
  fedfm silo show silo.toml                            lists by run what the silo sent, and the rest of each budget
  fedfm silo serve silo.toml --folder /mnt/shared      answers requests that come as files, until Ctrl-C
  fedfm silo serve silo.toml --folder /media/stick/fedfm --once    answers the requests that are there, and ends
  fedfm silo sums silo.toml RUN --out FILE             writes its sums of a finished run: to leave it, or to be valued

a silo's file, in the folder of its rows:
  name = "north"
  data = "rows.csv"
  label = "diagnosis"                                  columns: text, image, label, label_name, split, ...
  classes = ["benign", "malignant"]                    as the federation agreed [the classes of the rows]
  models = ["/srv/models/bert-small"]                  that experiments may name, in addition to the built-in ones
  methods = ["my_methods:Cautious"]                    code from outside fedfm that experiments may name
  downloads = false                                    true: hub ids in models are downloaded
  allow = ["mean", "scores"]                           what requests may expose: mean, reply, scores, reveal, or []
  allow_methods = ["fedavg"]                           the only methods that experiments may name [all]
  allow_tasks = ["classification"]                     the only tasks that experiments may train [all]
  require = { aggregator = "secagg", smallest_cohort = 5 }   properties that every experiment must have
  budget = { epsilon = 8.0, bytes = 1000000000, rounds = 100 }   limits on the silo's answers, over all its runs
  identity = "silo.key"                                key that signs under secagg; fedfm silo check creates it
  roster = "roster.toml"                               the other silos' public keys, agreed without the server
  server = "64 hexadecimal digits"                     the server's public key, for fedfm silo serve
"""

COMMANDS = (
    Command(
        "provision",
        provision,
        "make a kit for a server and one for each silo",
        _PROVISION_EXAMPLES,
        _provision_arguments,
        json=True,
    ),
    Command(
        "start",
        start,
        "run a kit (the server or a silo) until it is stopped",
        _START_EXAMPLES,
        _start_arguments,
    ),
    Command(
        "silo",
        silo,
        "check a silo, show its ledger, or answer requests in a folder",
        _SILO_EXAMPLES,
        _silo_arguments,
        json=True,
    ),
)
