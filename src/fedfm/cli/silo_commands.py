"""The subcommands ``fedfm leave``, ``worth`` and ``watch``: leave a run, value its clients, and show a running run."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from fedfm.api.command_registry import Command
from fedfm.api.terminal import say, tell
from fedfm.cli.imports import quick_imports
from fedfm.core.text import visible


def leave(args: Namespace) -> int:
    """Run ``fedfm leave``; return the exit code."""
    with quick_imports():
        from fedfm.api.leave import leave

    try:
        result = leave(args.run, args.client, args.out, retrain=args.retrain, sums=args.sums)
    except KeyboardInterrupt:
        tell("fedfm: the departure is not complete; the same command continues", sys.stderr)
        raise
    lines = [f"{visible(result['client'])} has left: {result['how']}, {result['run']}"]
    before, after = result["accuracy_before"], result["accuracy"]
    if before is not None and after is not None:
        lines.append(f"accuracy {before:.3f} with it, {after:.3f} without it")
    if (found := result["membership"]) is not None:
        for key, of in (("before", "with it"), ("after", "without it")):
            x = found[key]
            lines.append(f"its rows among test rows, AUC {of}: {x['auc']:.3f} [{x['low']:.3f}, {x['high']:.3f}]")
    lines += ["not removed:", *(f"  {text}" for text in result["not_removed"])]
    return say(args, result, "\n".join(lines))


def _leave_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the finished run's directory")
    parser.add_argument("client", help="the client that leaves")
    parser.add_argument("--out", type=Path, help="directory of the new run [RUN-without-CLIENT]")
    parser.add_argument("--sums", type=Path, metavar="FILE", help="the client's own sums, which are subtracted")
    parser.add_argument("--retrain", action="store_true", help="let the others train again, if the method requires it")


def worth(args: Namespace) -> int:
    """Run ``fedfm worth``; return the exit code."""
    with quick_imports():
        from fedfm.api.worth import worth

    result = worth(args.run, evaluations=args.evaluations, sums=args.sums, rows=args.rows)
    found, alone = result["shapley"], result["leave_one_out"]
    width = max(len("client"), *(len(visible(c)) for c in found))
    lines = [f"{'client':<{width}}  {'Shapley':>8}  {'interval':<18}  leave one out"]
    for client, x in sorted(found.items(), key=lambda item: -item[1]["value"]):
        interval = "-" if x["low"] is None else f"[{x['low']:.4f}, {x['high']:.4f}]"
        lines.append(f"{visible(client):<{width}}  {x['value']:>8.4f}  {interval:<18}  {alone[client]['value']:.4f}")
    lines.append(f"{result['measure']} of all clients minus that of none: {result['total']:.4f} ({result['how']})")
    if "opened" in result:
        lines.append(f"opened by their own files: {', '.join(map(visible, result['opened']))}")
    return say(args, result, "\n".join(lines))


def _worth_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the finished run's directory")
    parser.add_argument(
        "--evaluations",
        type=int,
        default=1024,
        help="about how many sets of clients are valued, over all rounds [1024]",
    )
    parser.add_argument(
        "--sums", type=Path, nargs="+", default=(), metavar="FILE", help="own sums of clients that agree to be valued"
    )
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="with --sums: rows by which models are valued [the run's test rows]"
    )


def watch(args: Namespace) -> int:
    """Run ``fedfm watch``; return the exit code."""
    with quick_imports():
        from fedfm.api.watch import is_running, watch

    def tell_address(url: str) -> None:
        tell(f"open {url}\nthe page is for this machine alone; Ctrl-C ends it, and the run goes on", sys.stderr)

    finished = watch(args.run, args.port, tell_address)
    running = not finished and is_running(args.run)
    if finished:
        ended = f"the run has finished; `fedfm report {args.run}` writes its report"
    elif running:
        ended = f"the page has ended, and the run goes on; `fedfm report {args.run}` writes its report so far"
    else:
        ended = f"the run stopped before its end; `fedfm resume {args.run}` continues it"
    return say(args, {"run": str(args.run), "finished": finished, "running": running}, ended)


def _watch_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="the directory of a run that is running")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 [a free one]")


_WATCH_EXAMPLES = """examples:
  fedfm watch runs/mine                                print the address of a page that renews itself until the run ends
  ssh -L 8800:127.0.0.1:8800 server                    from another machine: forward a port, and on the server run
  fedfm watch runs/mine --port 8800
"""

_LEAVE_EXAMPLES = """examples:
  fedfm leave runs/mine client-03                      a new run without client-03, in runs/mine-without-client-03
  fedfm leave runs/mine client-03 --out runs/rest      the same, in another directory
  fedfm leave runs/rounds client-03 --retrain          fedavg and other methods of rounds: the others train again
  fedfm leave runs/mine north --sums north.sums        subtract what `fedfm silo sums` wrote at north
  fedfm audit runs/rest --attack departure             attack the new model by the rows of the client that left
"""

_WORTH_EXAMPLES = """examples:
  fedfm worth runs/mine                                each client's Shapley value and leave-one-out value, in accuracy
  fedfm worth runs/mine --evaluations 200              fewer sets of clients: faster, with wider intervals
  fedfm worth runs/hidden --sums north.sums south.sums --rows test.csv    hidden sums: the clients that gave their own
"""

COMMANDS = (
    Command("watch", watch, "show a run in a browser while it runs", _WATCH_EXAMPLES, _watch_arguments, json=True),
    Command("worth", worth, "show what each client contributed to a run", _WORTH_EXAMPLES, _worth_arguments, json=True),
    Command("leave", leave, "make a run without one of its clients", _LEAVE_EXAMPLES, _leave_arguments, json=True),
)
