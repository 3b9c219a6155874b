"""The arguments of the commands, and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from fedfm import __version__
from fedfm.api.command_registry import commands as wing_commands
from fedfm.api.command_registry import engine_argument, set_argument, training_arguments
from fedfm.errors import close


class _Parser(argparse.ArgumentParser):
    """A parser that loads the examples, shown below its help, only when the help is requested.

    Attributes:
        name: name of the command in :data:`fedfm.cli.help.EXAMPLES`; None if it has no examples there.
    """

    name: str | None = None

    def format_help(self) -> str:
        if self.name is not None:
            from fedfm.cli.help import EXAMPLES

            self.epilog = EXAMPLES[self.name]
        return super().format_help()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; the usage of the command itself is shown for one that it does not take."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            command: _Parser = getattr(found, "parser", self)
            near = close(rest[0], command._option_string_actions)
            command.error(f"unrecognized arguments: {' '.join(rest)}{near}")
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As in argparse, with the nearest choice, and without the name of an argument that users never write."""
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            text = f"invalid choice: {value!r}{close(str(value), names)}; choose from {', '.join(names)}"
            raise argparse.ArgumentError(action if action.option_strings else None, text)


def _late(place: str) -> Callable[[Any], Any]:
    """Return a function that calls ``module:name`` of this folder, and imports the module only then."""

    def call(args: Any) -> Any:
        module, _, name = place.partition(":")
        return vars(import_module(f"fedfm.cli.{module}"))[name](args)

    return call


def build(first: str = "") -> argparse.ArgumentParser:
    """Make the parser of the command line. In the parsed arguments, ``command`` is the function to call.

    Args:
        first: the first word of the command line. If it is a command of this module, the commands of the packages
            sites and encrypted are left out, because their import takes time.
    """
    parser = _Parser(
        prog="fedfm",
        description="Adapt foundation models across organisations that cannot pool their data.",
        epilog="first steps: `fedfm demo`, then `fedfm show fedavg`, then `fedfm run exp.toml`",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fedfm {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str,
        function: str | Callable[[Any], Any],
        text: str,
        *,
        examples: str = "",
        json: bool = False,
        overrides: bool = False,
        run: bool = False,
    ) -> _Parser:
        sub: _Parser = subparsers.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=examples or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.name = None if examples else name
        sub.set_defaults(command=_late(function) if isinstance(function, str) else function, parser=sub)
        if json:
            sub.add_argument(
                "--format", choices=("text", "json"), default="text", help="json: last line of stdout is one object"
            )
        if overrides:
            set_argument(sub)
            engine_argument(sub)
        if run:
            sub.add_argument("run", type=Path, help="the run's directory")
        return sub

    text = "run the built-in example and its baselines, in less than a minute"
    demo = command("demo", "study_commands:demo", text, json=True)
    demo.add_argument("--out", type=Path, help="folder for the runs [runs/demo-<time>]")
    demo.add_argument("--seed", type=int, default=0, help="seed of the split, the model and the training [0]")

    run = command("run", "run_commands:run", "run an experiment", json=True, overrides=True)
    run.add_argument("experiment", type=Path, help="TOML file")
    run.add_argument("--out", type=Path, help="run directory [runs/<name>-<time>]")
    run.add_argument("--seeds", help="comma-separated seeds: run each, and report mean and interval")
    run.add_argument("--baselines", action="store_true", help="also run the method's baselines")
    run.add_argument("--tune", help="comma-separated learning rates; the best one on validation rows is used")

    pretrain = command("pretrain", "commands:pretrain", "train a foundation model on one machine", json=True)
    training_arguments(pretrain, "pretrain")

    resume = command("resume", "run_commands:resume", "continue a run that was stopped or killed", json=True, run=True)
    resume.add_argument(
        "--accept-loss",
        action="store_true",
        help="continue without secrets, memories or checkpoints that are damaged or missing; the run records the loss",
    )
    resume.add_argument("--rounds", type=int, help="continue to this number of rounds, also with a finished run")
    set_argument(
        resume, "new place of a file or party, such as run.folder, run.superlink or data.path, or a new run.timeout"
    )

    audit = command(
        "audit", "commands:audit", "attack a finished run to measure what its messages disclose", json=True, run=True
    )
    audit.add_argument(
        "--attack",
        action="append",
        default=[],
        metavar="NAME",
        help="an attack of the list below [all that fit the run and take seconds]",
    )
    audit.add_argument(
        "--pictures", type=Path, metavar="FILE", help="for inversion: the attacker's own images [the run's test rows]"
    )
    audit.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="stop after these seconds; attacks that were not run are listed, and findings are kept [no limit]",
    )
    audit.add_argument(
        "--dossier", action="store_true", help="also write dossier.html: two pages for a data protection officer"
    )

    report = command("report", "commands:report", "write a run's report.html again and print its table", run=True)
    report.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="draw N test rows of this machine with their predictions (task segmentation); the report then shows them",
    )

    sign = command("sign", "commands:sign", "sign the files of a run or of an exported model", json=True, run=True)
    sign.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="Ed25519 private key, PEM; made if absent [~/.config/fedfm/signing.pem]",
    )

    verify = command(
        "verify", "commands:verify", "compare a run or an exported model with its signature", json=True, run=True
    )
    verify.add_argument("--key", type=Path, metavar="FILE", help="the public key that must have signed, PEM")

    compare = command(
        "compare", "commands:compare", "print a table of several runs, and write a page that compares them"
    )
    compare.add_argument("run", type=Path, nargs="+", help="directories of the runs")
    compare.add_argument("--out", type=Path, default=Path("compare.html"), help="the page [compare.html]")

    predict = command(
        "predict", "commands:predict", "predict the rows of a file with a run's model", json=True, run=True
    )
    predict.add_argument("file", type=Path, help="csv, jsonl, parquet, npz, txt or image folder; labels are not needed")
    predict.add_argument("--client", help="owner of the model, if every client has its own")
    predict.add_argument(
        "--engine",
        choices=("local", "deployment"),
        default="local",
        help="deployment: encrypt the rows at a SuperNode, so that the server does not see them (blindfed) [local]",
    )
    predict.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file for the result: .jsonl or .csv, one line per row; .json; or .npz, arrays",
    )
    predict.add_argument("--processes", type=int, metavar="N", help="processes that share the model [the run's]")

    export = command("export", "commands:export", "write a run's model for other libraries", run=True)
    export.add_argument(
        "--to", choices=("peft", "hf", "torch"), required=True, help="format: PEFT adapter, transformers or torch"
    )
    export.add_argument("--out", type=Path, required=True, help="folder of the export")
    export.add_argument("--client", help="owner of the model, if every client has its own")
    for one in (predict, export):
        one.add_argument(
            "--last", action="store_true", help="use the last round's model, even if run.patience chose another round"
        )

    join = command("join", "commands:join", "make a model for a client that joins after training", json=True, run=True)
    join.add_argument("data", type=Path, help="the client's rows: csv, jsonl, parquet, npz or an image folder")
    join.add_argument("--client", help='the client\'s name in the run ["newcomer"]')

    kinds = ("methods", "tasks", "models", "partitions", "sources", "attacks", "aggregation")
    listing = command("list", "commands:listing", f"list {', '.join(kinds)}")
    listing.add_argument("kind", nargs="?", choices=kinds)

    show = command(
        "show", "commands:show", "show paper, keys and defaults of a method, a task, an attack or an aggregation"
    )
    show.add_argument("name", help="the name of a method, a task, an attack or an aggregation")

    schema = command(
        "schema", "commands:schema", "print the JSON Schema with which editors complete and check a TOML file"
    )
    # These are the names in fedfm.config.catalogue.SCHEMAS, whose import would take time.
    files = ("experiment", "pretrain", "distil", "silo", "federation")
    schema.add_argument("of", nargs="?", choices=files, default=files[0], help="the kind of file [experiment]")
    schema.add_argument("--out", type=Path, metavar="FILE", help="write the schema into this file")

    check = command(
        "check", "check_command:check", "check an experiment and print it with every default", json=True, overrides=True
    )
    check.add_argument("experiment", type=Path, help="TOML file")
    check.add_argument(
        "--matching", action="store_true", help="also list which tensors are mixed with the foundation model, and how"
    )

    app = command("app", "commands:app", "write a Flower app that `flwr run` takes")
    app.add_argument("folder", type=Path, help="folder to make")
    app.add_argument("--experiment", type=Path, help="TOML file to put into the app [the demo's]")

    for found in () if first in subparsers.choices else wing_commands():
        found.add_arguments(command(found.name, found.run, found.help, examples=found.examples, json=found.json))

    completion = command("completion", "completion:completion", "print a script with which a shell completes commands")
    completion.add_argument("shell", choices=("bash", "zsh"))

    command("doctor", "commands:doctor", "check this installation", json=True)
    return parser
