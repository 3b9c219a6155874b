"""Subcommands of sites: kits for machines, a silo's file, a folder that carries messages."""

from __future__ import annotations

import contextlib
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

from fedfm.cli.commands import say, tell
from fedfm.core.text import visible
from fedfm.errors import InputError


def provision(args: Any) -> int:
    """``fedfm provision``."""
    from fedfm.engines.flower import federation_file, kits

    found = kits.provision(federation_file.load(args.federation), args.out, renew=args.renew)
    return say(args, found, kits.described(found))


def start(args: Any) -> int:
    """``fedfm start``."""
    from fedfm.engines.flower import supervisor

    supervisor.start(args.kit, lambda text: tell(f"fedfm: {visible(text)}", sys.stderr))
    return 0


def silo(args: Any) -> int:
    """``fedfm silo``."""
    if args.what == "serve":
        return _serve(args)
    if args.folder is not None or args.once:
        raise InputError(f"--folder and --once are for `fedfm silo serve`; `fedfm silo {args.what}` takes neither")
    from fedfm.runtime import silo_file, silo_predictions, silo_show

    if args.what == "check" and (args.experiment is not None or (args.file / "kit.json").exists()):
        from fedfm.engines.flower import kit_check

        checked = kit_check.examine(args.file, args.experiment)
        say(args, checked, kit_check.described(checked))
        return 0 if checked["fits"] else 1
    if args.experiment is not None:
        raise InputError(f"{args.experiment}: only `fedfm silo check KIT EXPERIMENT` takes an experiment")
    of: Any = {"check": silo_file, "show": silo_show, "predictions": silo_predictions}[args.what]
    found = of.report(args.file)
    return say(args, found, of.described(found))


def _serve(args: Any) -> int:
    """``fedfm silo serve``."""
    if args.folder is None:
        raise InputError("silo serve: give the folder that carries the messages: --folder DIR")
    _offline(args.file)
    from fedfm.engines.folder.serve import serve

    found = serve(args.file, args.folder, once=args.once, tell=lambda text: tell(f"fedfm: {text}", sys.stderr))
    return say(args, found, f"{found['name']}: answered {found['answered']}")


def _offline(path: Path) -> None:
    """Keep libraries off the network unless the silo's file says otherwise; they read this when they are imported."""
    with contextlib.suppress(OSError, ValueError, RecursionError):  # who reads the file says what is wrong
        if tomllib.loads(path.read_text(encoding="utf-8")).get("downloads") is not True:
            os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
