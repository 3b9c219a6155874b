"""Commands, their arguments and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedfm import __version__
from fedfm.cli import commands
from fedfm.cli.help import EXAMPLES
from fedfm.config.catalogue import SCHEMAS


def build() -> argparse.ArgumentParser:
    """The parser of the whole command line; each command's function is its ``command``."""
    parser = argparse.ArgumentParser(
        prog="fedfm",
        description="Adapt foundation models across organisations that cannot pool their data.",
        epilog="first steps: `fedfm demo`, then `fedfm show fedavg`, then `fedfm run exp.toml`",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fedfm {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, function: Callable[[Any], Any], text: str) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=function)
        return sub

    def with_format(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument(
            "--format", choices=("text", "json"), default="text", help="json: last line of stdout is one object"
        )
        return sub

    def with_changes(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the experiment"
        )
        sub.add_argument("--engine", choices=("local", "simulation", "deployment"), help="instead of run.engine")
        return sub

    demo = with_format(command("demo", commands.demo, "run the built-in example beside its baselines, under a minute"))
    demo.add_argument("--out", type=Path, help="folder for the runs [runs/demo-<time>]")
    demo.add_argument("--seed", type=int, default=0)

    run = with_changes(with_format(command("run", commands.run, "run an experiment")))
    run.add_argument("experiment", type=Path, help="TOML file")
    run.add_argument("--out", type=Path, help="run directory [runs/<name>-<time>]")
    run.add_argument("--seeds", help="comma-separated: run each, report mean and interval")
    run.add_argument(
        "--baselines", "--yardsticks", action="store_true", help="also run what the method is compared with"
    )
    run.add_argument("--tune", help="comma-separated learning rates; the best by validation rows is used")

    pretrain = with_format(command("pretrain", commands.pretrain, "train a foundation model centrally, as a folder"))
    pretrain.add_argument("experiment", type=Path, help="TOML file with [data], [model] and [pretrain]")
    pretrain.add_argument("--out", type=Path, required=True, help="the model's folder")
    pretrain.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the file")

    resume = with_format(command("resume", commands.resume, "go on with a run that was stopped or killed"))
    resume.add_argument("run", type=Path, help="its directory")
    resume.add_argument(
        "--accept-loss",
        action="store_true",
        help="go on without secrets, memories or checkpoints that are damaged or missing; the run says so ever after",
    )

    audit = with_format(command("audit", commands.audit, "attack a finished run: what its messages give away"))
    audit.add_argument("run", type=Path, help="its directory")
    audit.add_argument(
        "--attack",
        action="append",
        default=[],
        metavar="NAME",
        help="membership, epsilon, reconstruction, single_holder, inversion; extraction (fedbaf); "
        "task_vector (fedbip, fedamp, fedawa) [all cheap ones that fit the run]",
    )
    audit.add_argument(
        "--pictures", type=Path, metavar="FILE", help="inversion: the attacker's own pictures [the run's test rows]"
    )

    report = command("report", commands.report, "write a run's report.html again and print its table")
    report.add_argument("run", type=Path, help="its directory")

    compare = command("compare", commands.compare, "a table of several runs, and a page that compares them")
    compare.add_argument("run", type=Path, nargs="+", help="their directories")
    compare.add_argument("--out", type=Path, default=Path("compare.html"), help="the page [compare.html]")

    predict = with_format(command("predict", commands.predict, "what a run's model says of the rows of a file"))
    predict.add_argument("run", type=Path, help="its directory")
    predict.add_argument("file", type=Path, help="csv, jsonl, parquet, npz, txt or image folder; labels are not needed")
    predict.add_argument("--client", help="whose model, where every client has its own")
    predict.add_argument(
        "--out", type=Path, metavar="FILE", help="write it there: .jsonl or .csv, a line a row, or .json"
    )

    export = command("export", commands.export, "write a run's model for other libraries")
    export.add_argument("run", type=Path, help="its directory")
    export.add_argument(
        "--to", choices=("peft", "hf", "torch"), required=True, help="PEFT adapter, transformers, torch"
    )
    export.add_argument("--out", type=Path, required=True, help="a folder")
    export.add_argument("--client", help="whose model, where every client has its own")

    join = with_format(command("join", commands.join, "give a client that comes after training its model"))
    join.add_argument("run", type=Path, help="its directory")
    join.add_argument("data", type=Path, help="its rows: csv, jsonl, parquet, npz or an image folder")
    join.add_argument("--client", help='its name in the run ["newcomer"]')

    listing = command(
        "list", commands.listing, "what is there: methods, models, partitions, sources, attacks, aggregation"
    )
    kinds = ("methods", "models", "partitions", "sources", "attacks", "aggregation")
    listing.add_argument("kind", nargs="?", choices=kinds)

    show = command("show", commands.show, "paper, keys, defaults and meaning of a method, an attack or an aggregation")
    show.add_argument("method", help="its name")

    schema = command("schema", commands.schema, "the JSON Schema by which editors complete and check a TOML file")
    schema.add_argument("of", nargs="?", choices=SCHEMAS, default="experiment", help="which file [experiment]")
    schema.add_argument("--out", type=Path, metavar="FILE", help="write it there")

    check = with_changes(
        with_format(command("check", commands.check, "check an experiment and print it with every default"))
    )
    check.add_argument("experiment", type=Path, help="TOML file")
    check.add_argument(
        "--matching", action="store_true", help="also what of the foundation model mixes with what, tensor by tensor"
    )

    app = command("app", commands.app, "write a Flower app that `flwr run` takes")
    app.add_argument("folder", type=Path, help="is made")
    app.add_argument("--experiment", type=Path, help="TOML file to put into it [the demo's]")

    silo = with_format(command("silo", commands.silo, "check a silo's file: its rows, and what it lets the server see"))
    silo.add_argument("file", type=Path, help="silo.toml: name, data, what it loads and answers")

    with_format(command("doctor", commands.doctor, "check this installation"))
    return parser
