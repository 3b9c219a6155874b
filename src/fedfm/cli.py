"""The command line. Heavy libraries are imported by the commands that need them: ``--help`` and ``list`` need none."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from fedfm import __version__, compiling
from fedfm.errors import FedfmError, InputError
from fedfm.manual import EXAMPLES
from fedfm.writing import to_json, visible, visible_lines

INTERRUPTED = 130
CLEARED = "\r\x1b[K"  # the line on which the cursor stands, on a terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 failed, 2 wrong input, 130 stopped by the user."""
    parser = _parser()
    args = parser.parse_args(_whole(sys.argv[1:] if argv is None else argv))
    compiling.tell(_compiling)
    try:
        return int(args.command(args) or 0)
    except InputError as error:
        _tell(f"fedfm: {error}", sys.stderr)
        return 2
    except FedfmError as error:
        _tell(f"fedfm: {error}", sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fedfm: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise  # not about a file: a fault of ours, or the network's
        print(f"fedfm: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


def _whole(argv: Sequence[str]) -> list[str]:
    """A list that begins with a minus, which argparse takes for a flag, joined to the flag before it."""
    out: list[str] = []
    for word in argv:
        if out and out[-1] in ("--seeds", "--tune") and re.match(r"-[\d.]", word):
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


def _compiling(text: str) -> None:
    """Say so on a line of its own: a bar that stands there is drawn again."""
    print(f"{CLEARED if sys.stderr.isatty() else ''}fedfm: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedfm",
        description="Adapt foundation models across organisations that cannot pool their data.",
        epilog="first steps: `fedfm demo`, then `fedfm show fedavg`, then `fedfm run exp.toml`",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fedfm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, function: Callable[[Any], Any], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
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

    demo = with_format(command("demo", _demo, "run the built-in example beside its baselines, under a minute"))
    demo.add_argument("--out", type=Path, help="folder for the runs [runs/demo-<time>]")
    demo.add_argument("--seed", type=int, default=0)

    run = with_changes(with_format(command("run", _run, "run an experiment")))
    run.add_argument("experiment", type=Path, help="TOML file")
    run.add_argument("--out", type=Path, help="run directory [runs/<name>-<time>]")
    run.add_argument("--seeds", help="comma-separated: run each, report mean and interval")
    run.add_argument("--yardsticks", action="store_true", help="also run what the method is measured against")
    run.add_argument("--tune", help="comma-separated learning rates; the best by validation rows is used")

    pretrain = with_format(command("pretrain", _pretrain, "train a foundation model centrally, as a folder"))
    pretrain.add_argument("experiment", type=Path, help="TOML file with [data], [model] and [pretrain]")
    pretrain.add_argument("--out", type=Path, required=True, help="the model's folder")
    pretrain.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the file")

    resume = with_format(command("resume", _resume, "go on with a run that was stopped or killed"))
    resume.add_argument("run", type=Path, help="its directory")

    audit = with_format(command("audit", _audit, "attack a finished run: what its messages give away"))
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

    report = command("report", _report, "write a run's report.html again and print its table")
    report.add_argument("run", type=Path, help="its directory")

    compare = command("compare", _compare, "a table of several runs, and a page that compares them")
    compare.add_argument("run", type=Path, nargs="+", help="their directories")
    compare.add_argument("--out", type=Path, default=Path("compare.html"), help="the page [compare.html]")

    predict = with_format(command("predict", _predict, "label the rows of a file with a run's model"))
    predict.add_argument("run", type=Path, help="its directory")
    predict.add_argument("file", type=Path, help="csv, jsonl, parquet, npz, txt or image folder; labels are not needed")
    predict.add_argument("--client", help="whose model, where every client has its own")

    export = command("export", _export, "write a run's model for other libraries")
    export.add_argument("run", type=Path, help="its directory")
    export.add_argument(
        "--to", choices=("peft", "hf", "torch"), required=True, help="PEFT adapter, transformers, torch"
    )
    export.add_argument("--out", type=Path, required=True, help="a folder")
    export.add_argument("--client", help="whose model, where every client has its own")

    join = with_format(command("join", _join, "give a client that comes after training its model"))
    join.add_argument("run", type=Path, help="its directory")
    join.add_argument("data", type=Path, help="its rows: csv, jsonl, parquet, npz or an image folder")
    join.add_argument("--client", help='its name in the run ["newcomer"]')

    listing = command("list", _list, "what is there: methods, models, partitions, sources, attacks, aggregation")
    kinds = ("methods", "models", "partitions", "sources", "attacks", "aggregation")
    listing.add_argument("kind", nargs="?", choices=kinds)

    show = command("show", _show, "paper, keys, defaults and meaning of a method, an attack or an aggregation")
    show.add_argument("method", help="its name")

    check = with_changes(with_format(command("check", _check, "check an experiment and print it with every default")))
    check.add_argument("experiment", type=Path, help="TOML file")
    check.add_argument(
        "--matching", action="store_true", help="also what of the foundation model mixes with what, tensor by tensor"
    )

    app = command("app", _app, "write a Flower app that `flwr run` takes")
    app.add_argument("folder", type=Path, help="is made")
    app.add_argument("--experiment", type=Path, help="TOML file to put into it [the demo's]")

    silo = with_format(command("silo", _silo, "check a silo's file: its rows, and what it lets the server see"))
    silo.add_argument("file", type=Path, help="silo.toml: name, data, allow")

    with_format(command("doctor", _doctor, "check this installation"))
    return parser


# --- commands --------------------------------------------------------------------------------------------------------


def _experiment(args: Any) -> Any:
    from fedfm.experiment import Experiment
    from fedfm.tables import parse_override

    overrides = dict(parse_override(text) for text in args.set)
    if args.engine:
        overrides["run.engine"] = args.engine
    return Experiment.load(args.experiment, overrides)


def _run(args: Any) -> int:
    from fedfm import api, studies

    experiment = _experiment(args)
    progress = _watch()
    if args.tune:
        experiment = studies.tune(experiment, _numbers("--tune", args.tune, float), args.out, progress)
    if args.seeds and args.yardsticks:
        raise InputError("--seeds and --yardsticks: one of them at a time")
    if args.yardsticks:
        result = studies.beside(experiment, args.out, progress)
        return _say(args, result, studies.beside_text(result))
    if args.seeds:
        result = studies.seeds(experiment, _seeds(args.seeds), args.out, progress)
        return _say(args, result, studies.seeds_text(result))
    result = _guarded(lambda: api.run(experiment, args.out, progress=progress), progress)
    return _say(args, result, _summary(result))


def _seeds(text: str) -> list[int]:
    seeds: list[int] = _numbers("--seeds", text, int)
    if min(seeds) < 0:
        raise InputError(f"--seeds {text}: seeds are whole numbers of at least 0")
    return seeds


def _numbers(flag: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers of at least 0" if kind is int else "numbers"
        raise InputError(f"{flag} {text}: expected {what} separated by commas") from None


def _pretrain(args: Any) -> int:
    from fedfm.pretrain import ABOUT, Pretraining, pretrain
    from fedfm.tables import parse_override
    from fedfm.watch import Epochs

    what = Pretraining.load(args.experiment, dict(parse_override(text) for text in args.set))
    try:
        result = pretrain(what, args.out, watcher=Epochs())
    except InputError:
        raise
    except (KeyboardInterrupt, Exception):
        if (args.out / ABOUT).exists():
            print("fedfm: finished epochs are kept; the same command goes on", file=sys.stderr)
        raise
    names = ("epochs", "parameters", "accuracy", "perplexity", "train_loss", "seconds")
    figures = [f"{name} {result[name]:.6g}" for name in names if result[name] is not None]
    return _say(args, result, f"{result['folder']}: {', '.join(figures)}")


def _resume(args: Any) -> int:
    from fedfm import api

    progress = _watch()
    result = _guarded(lambda: api.resume(args.run, progress=progress), progress)
    return _say(args, result, _summary(result))


def _guarded(call: Callable[[], dict[str, Any]], progress: Any) -> dict[str, Any]:
    """Whatever stops a run, say how to go on with it."""
    try:
        return call()
    except InputError:
        raise
    except (KeyboardInterrupt, Exception):
        if progress.path is not None:
            _tell(f"fedfm: what was committed is kept; go on with: fedfm resume {progress.path}", sys.stderr)
        raise


def _watch() -> Any:
    from fedfm.watch import Bar

    return Bar()


def _tell(text: str, where: TextIO | None = None) -> None:
    """For people. Names of clients and classes are others' choice: nothing of them acts on the terminal."""
    print(visible_lines(text), file=where)


def _say(args: Any, result: dict[str, Any], text: str) -> int:
    if args.format == "json":
        print(to_json(result, ascii=True), flush=True)
    else:
        _tell(text)
    return 0


def _summary(result: dict[str, Any]) -> str:
    from fedfm.report import compare

    return f"{compare.table([Path(result['run'])]).rstrip()}\nreport: {Path(result['run']) / 'report.html'}"


def _audit(args: Any) -> int:
    from fedfm.audits.audit import perform
    from fedfm.audits.finding import lines
    from fedfm.report import html

    if args.pictures is not None and "inversion" not in args.attack:
        raise InputError("--pictures: the attacker's own are for --attack inversion; add it")
    progress = _watch()
    found = perform(args.run, args.attack, progress.notice, pictures=args.pictures)
    page = html.write(args.run)
    result = {"run": str(args.run), "findings": [f.to_dict() for f in found]}
    _say(args, result, f"{lines(found)}\nreport: {page}")
    return 1 if any(f.contradicts for f in found) else 0


def _report(args: Any) -> int:
    from fedfm.report import compare, html, weights

    path = html.write(args.run)
    _tell(compare.table([args.run]).rstrip())
    if text := weights.words(args.run):
        _tell(text)
    _tell(f"report: {path}")
    return 0


def _compare(args: Any) -> int:
    from fedfm.report import compare
    from fedfm.report.read import read

    _tell(compare.table(args.run).rstrip())
    for notice in compare.other_data([read(path, messages=False) for path in args.run]):
        _tell(f"fedfm: {visible(notice)}", sys.stderr)
    _tell(f"page: {compare.write(args.run, args.out)}")
    return 0


def _demo(args: Any) -> int:
    from fedfm import studies

    result = studies.demo(args.out, args.seed, _watch())
    return _say(args, result, studies.demo_text(result))


def _predict(args: Any) -> int:
    from fedfm.use import predict

    result = predict(args.run, args.file, args.client)
    lines = [
        f"{visible(label)}\t{max(p):.3f}" if p else visible(label)
        for label, p in zip(result["predictions"], result["probabilities"], strict=True)
    ]
    if "files" in result:
        lines = [f"{visible(name)}\t{line}" for name, line in zip(result["files"], lines, strict=True)]
    if result.get("perplexity") is not None:
        lines.append(f"perplexity {result['perplexity']:.6g}")
    return _say(args, result, "\n".join(lines))


def _export(args: Any) -> int:
    from fedfm.use import export

    _tell(export(args.run, args.to, args.out, args.client))
    return 0


def _join(args: Any) -> int:
    from fedfm.join import join

    result = join(args.run, args.data, args.client)
    rows = [("its model", "accuracy"), ("before its last local pass", "start_accuracy"), ("alone", "alone_accuracy")]
    lines = [f"{what:<28}{'' if result[key] is None else format(result[key], '.3f')}" for what, key in rows]
    shares = sorted(result["weights"].items(), key=lambda item: -item[1])[:6]
    lines += [f"made of {', '.join(f'{visible(name)} {p:.2f}' for name, p in shares)}"] if shares else []
    return _say(
        args, result, "\n".join([f"{visible(result['client'])}, accuracy on its test rows:", *lines, result["adapter"]])
    )


def _list(args: Any) -> int:
    from fedfm import catalogue

    print(catalogue.listing(args.kind))
    return 0


def _show(args: Any) -> int:
    from fedfm import catalogue

    print(catalogue.method(args.method))
    return 0


def _check(args: Any) -> int:
    from fedfm.data.load import check_files

    experiment = _experiment(args)
    check_files(experiment.data)
    _check_models(experiment)
    result: dict[str, Any] = {"valid": True, "experiment": experiment.to_dict()}
    text = experiment.to_toml().rstrip()
    if args.matching:
        from dataclasses import asdict

        from fedfm.models.foundation import match
        from fedfm.population import populate

        method = experiment.method
        if not hasattr(method, "foundation"):
            raise InputError(f"--matching: method {experiment.method_name} has no foundation model of its own")
        found = match(populate(experiment).model, method.foundation, method.identical)
        result["matching"] = [asdict(line) for line in found.table]
        text += f"\n\n# tensor, its shape, the foundation model's, what mixes, why\n{found}"
    return _say(args, result, text)


def _check_models(experiment: Any) -> None:
    """Refuse models that are not there; a SuperLink's machine has its own."""
    from fedfm.models.foundation import check_place
    from fedfm.models.load import locate

    if experiment.run.superlink:
        return
    if experiment.model.name != "features":
        locate(experiment.model.name)
    if hasattr(experiment.method, "foundation"):
        check_place(experiment.method.foundation)


def _app(args: Any) -> int:
    from fedfm.engines.app import write

    _tell(write(args.folder, args.experiment))
    return 0


def _silo(args: Any) -> int:
    from fedfm.engines.silofile import report

    found = report(args.file)
    rows, single = found["rows"], found["shows_single_replies"]
    text = (
        f"{found['name']}: {rows['train']} training, {rows['val']} validation and {rows['test']} test rows, "
        f"{len(found['classes'])} classes\nanswers {', '.join(found['allow'])}: "
        + (
            "single replies, which the server sees one by one"
            if single
            else "updates for means only, no single replies"
        )
    )
    return _say(args, found, "\n".join([text, *found["notices"]]))


def _doctor(args: Any) -> int:
    from fedfm.doctor import examine

    lines = examine()
    bad = [line for line in lines if line["status"] == "bad"]
    text = "\n".join(f"{line['status']:<5} {line['what']}: {line['found']}" for line in lines)
    _say(args, {"ok": not bad, "checks": lines}, text)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
