"""The commands for models and finished runs. Each imports the heavy libraries that it needs."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from fedfm.api.command_registry import action
from fedfm.api.terminal import hint_for_epochs, hint_on_stop, say, tell
from fedfm.cli.imports import quick_imports
from fedfm.cli.running import tell_missing, watch
from fedfm.core.text import to_json, visible
from fedfm.errors import InputError


def pretrain(args: Namespace) -> int:
    """Run ``fedfm pretrain``; return the exit code."""
    from fedfm.api.pretrain import ABOUT, pretrain
    from fedfm.api.pretrain_spec import Pretraining
    from fedfm.core.overrides import parse_overrides
    from fedfm.runtime.step_bars import Epochs

    what = Pretraining.load(args.experiment, parse_overrides(args.set))
    with hint_on_stop(lambda: hint_for_epochs(args, ABOUT)):
        result = pretrain(what, args.out, watcher=Epochs())
    names = ("epochs", "parameters", "accuracy", "perplexity", "train_loss", "seconds")
    figures = [f"{name} {result[name]:.6g}" for name in names if result[name] is not None]
    return say(args, result, f"{result['folder']}: {', '.join(figures)}")


def audit(args: Namespace) -> int:
    """Run ``fedfm audit``; return the exit code."""
    with quick_imports():
        from fedfm.audits.audit import Audited, choose, perform_within
    from fedfm.audits.finding import lines
    from fedfm.audits.replay import open_finished
    from fedfm.audits.steps import command
    from fedfm.core.durations import duration_text
    from fedfm.reports import dossier, html
    from fedfm.runtime.run_directory import Run
    from fedfm.runtime.step_bars import Attacks

    if args.pictures is not None and "inversion" not in args.attack:
        raise InputError("--pictures: only the attack inversion uses images; add --attack inversion")
    progress = watch()
    unfit, done = "", Audited([])
    if args.dossier and not args.attack:  # every finished run can have a dossier, with attacks or without
        ended = Run.open(args.run).manifest["result"] is not None
        try:
            choose(open_finished(args.run))
        except InputError as error:
            if not ended:
                raise
            unfit = str(error).removeprefix(f"{args.run}: ")
            tell(f"fedfm: {unfit}", sys.stderr)
    if not unfit:
        how = {"progress": Attacks(), "pictures": args.pictures}
        try:
            done = perform_within(args.time_limit, args.run, args.attack, progress.notice, **how)
        except KeyboardInterrupt as stopped:
            if stopped.args:
                tell(f"fedfm: {stopped}", sys.stderr)
                html.renew(args.run)
            raise
    page, found = html.renew(args.run), done.findings
    result: dict[str, Any] = {"run": str(args.run), "findings": [f.to_dict() for f in found]}
    if done.left_out:
        result["not_run"] = list(done.left_out)
        rest = command(args.run, done.left_out)
        tell(
            f"fedfm: the time limit was reached; the rest takes about {duration_text(done.seconds)}: {rest}", sys.stderr
        )
    if args.dossier:
        result["dossier"] = str(dossier.write(args.run, unfit))
    if missing := tell_missing(args.run):
        result["missing"] = missing
    text = f"{lines(found)}\nreport: {page}" if found else f"report: {page}"
    say(args, result, text + (f"\ndossier: {result['dossier']}" if args.dossier else ""))
    return 1 if any(f.contradicts for f in found) else 0


def report(args: Namespace) -> int:
    """Run ``fedfm report``; return the exit code."""
    with quick_imports():
        from fedfm.reports import client_weights, compare, html
    from fedfm.runtime.runs_below import each_run

    runs = each_run([args.run])
    if args.rows is None:
        pages = [html.renew(run) for run in runs]
    else:
        from fedfm.api.row_pictures import draw

        pages = [html.renew(run, draw(run, args.rows)) for run in runs]
    for run in runs:
        tell_missing(run)
    tell(compare.table(runs).rstrip())
    for run in runs:
        if text := client_weights.words(run):
            tell(text if len(runs) == 1 else f"{run}: {text}")
    for page in pages:
        tell(f"report: {page}")
    return 0


def sign(args: Namespace) -> int:
    """Run ``fedfm sign``; return the exit code."""
    from fedfm.api.signature import default_key, sign

    key = args.key or default_key()
    is_new = not key.exists()
    found = sign(args.run, args.key)
    if is_new:
        tell(f"fedfm: there was no key {visible(key)}; it is made now", sys.stderr)
    lines = [f"{found['signature']}: {found['files']} files", f"key {found['fingerprint']}", found["key"]]
    return say(args, found, "\n".join(lines))


def verify(args: Namespace) -> int:
    """Run ``fedfm verify``; return the exit code."""
    from fedfm.api.signature import describe, verify

    found = verify(args.run, args.key)
    say(args, found.to_dict(), describe(found))
    return 0 if found.valid else 1


def compare(args: Namespace) -> int:
    """Run ``fedfm compare``; return the exit code."""
    with quick_imports():
        from fedfm.reports import compare
    from fedfm.reports.read import read
    from fedfm.runtime.runs_below import each_run

    runs = each_run(args.run)
    page = compare.write(runs, args.out)
    tell(compare.table(runs).rstrip())
    for notice in compare.other_data([read(path, messages=False) for path in runs]):
        tell(f"fedfm: {visible(notice)}", sys.stderr)
    for path in runs:
        tell_missing(path)
    tell(f"page: {page}")
    return 0


def predict(args: Namespace) -> int:
    """Run ``fedfm predict``; return the exit code."""
    with quick_imports():
        from fedfm.api.predict import predict
        from fedfm.api.prediction_files import by_row, check_out, write

    if args.out is not None:
        check_out(args.out)
    if args.engine == "deployment":
        given = {"--last": args.last, "--client": args.client, "--processes": args.processes}
        if idle := [option for option, value in given.items() if value not in (None, False)]:
            raise InputError(f"{idle[0]}: --engine deployment predicts with the run's one model; drop one of the two")
        result = action("predict", "deployment")(args.run, args.file, watch())
        for text in result.get("warnings", ()):
            tell(f"fedfm: {visible(text)}", sys.stderr)
    else:
        files = None if args.out is None else args.out.with_suffix("")
        result = predict(args.run, args.file, args.client, last=args.last, files=files, processes=args.processes)
    lines = [visible(answer) for answer in result.get("answers", ())]
    if "predictions" not in result:
        lines = [
            "\t".join(visible(to_json(v)) for k, v in row.items() if k not in ("row", "id", "file"))
            for row in by_row(result)
        ]
    else:
        both = zip(result["predictions"], result.get("probabilities", ()), strict=True)
        lines += [f"{visible(label)}\t{max(p):.3f}" if p else visible(label or "-") for label, p in both]
    lines += ["\t".join(f"{number:.6g}" for number in row) for row in result.get("outputs", ())]
    if "losses" in result and "answers" not in result:
        lines += ["" if loss is None else f"loss {loss:.6g}" for loss in result["losses"]]
    if "files" in result:
        lines = [f"{visible(name)}\t{line}" for name, line in zip(result["files"], lines, strict=True)]
    if args.out is not None:
        if said := write(result, args.out):
            tell(f"fedfm: {visible(said)}", sys.stderr)
        lines = [visible(args.out)]
    if result.get("perplexity") is not None:
        lines.append(f"perplexity {result['perplexity']:.6g}")
    if cut := len(result.get("cut", ())):
        tell(
            f"fedfm: {cut} of {len(result['answers'])} answers stop at {result['answer_tokens']} tokens "
            f"({result.get('limited_by', 'model.answer_tokens of the run')}), unfinished",
            sys.stderr,
        )
    return say(args, result, "\n".join(lines))


def export(args: Namespace) -> int:
    """Run ``fedfm export``; return the exit code."""
    with quick_imports():
        from fedfm.api.predict import export

    tell(export(args.run, args.to, args.out, args.client, last=args.last))
    return 0


def join(args: Namespace) -> int:
    """Run ``fedfm join``; return the exit code."""
    with quick_imports():
        from fedfm.api.join import join

    result = join(args.run, args.data, args.client)
    rows = [("its model", "accuracy"), ("before its last local pass", "start_accuracy"), ("alone", "alone_accuracy")]
    lines = [f"{what:<28}{'-' if result[key] is None else format(result[key], '.3f')}" for what, key in rows]
    shares = sorted(result["weights"].items(), key=lambda item: -item[1])[:6]
    lines += [f"made from {', '.join(f'{visible(name)} {p:.2f}' for name, p in shares)}"] if shares else []
    return say(
        args, result, "\n".join([f"{visible(result['client'])}, accuracy on its test rows:", *lines, result["adapter"]])
    )


def listing(args: Namespace) -> int:
    """Run ``fedfm list``; return the exit code."""
    from fedfm.config import catalogue

    print(catalogue.listing(args.kind))
    return 0


def show(args: Namespace) -> int:
    """Run ``fedfm show``; return the exit code."""
    from fedfm.config import catalogue

    print(catalogue.show(args.name))
    return 0


def schema(args: Namespace) -> int:
    """Run ``fedfm schema``; return the exit code."""
    from fedfm.config import catalogue

    text = to_json(catalogue.schema(args.of), indent=1)
    if args.out is None:
        print(text)
    else:
        from fedfm.core import storage

        storage.refuse_others(args.out, '"$schema": "https://json-schema.org')
        storage.write_atomic(args.out, f"{text}\n".encode(), of_run=False)
        tell(f"{args.out}: begin a TOML file in the same folder with\n#:schema ./{args.out.name}")
    return 0


def app(args: Namespace) -> int:
    """Run ``fedfm app``; return the exit code."""
    from fedfm.engines.flower.app_writer import write

    tell(write(args.folder, args.experiment))
    return 0


def doctor(args: Namespace) -> int:
    """Run ``fedfm doctor``; return the exit code."""
    from fedfm.cli.doctor import examine

    lines = []
    for line in examine():
        lines.append(line)
        if args.format == "text":
            tell(f"{line['status']:<5} {line['what']}: {line['found']}")
            sys.stdout.flush()  # a check may take seconds; what is known is shown
    bad = [line for line in lines if line["status"] == "bad"]
    if args.format == "json":
        say(args, {"ok": not bad, "checks": lines}, "")
    return 1 if bad else 0
