"""The server's side of a run: init, rounds, commits, evaluation, and the result. The same on every engine."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from fedfm.core import storage
from fedfm.core.checks import nonfinite
from fedfm.core.client import ClientId, each
from fedfm.core.federation import Federation
from fedfm.core.method import Method
from fedfm.core.update_metrics import BEFORE, JUDGED, LOSS_BEFORE, PASSES
from fedfm.core.wire import payload
from fedfm.errors import RunError
from fedfm.linalg.out_of_core import limit
from fedfm.linalg.params import Params, sha256_of
from fedfm.runtime import logs
from fedfm.runtime.run_directory import Run

if TYPE_CHECKING:
    from fedfm.runtime.progress import Progress

ANSWERS = ("rouge_1", "answers_cut")  # what an instruction model's scores tell beside the others'


class Server:
    """Drives one method over one federation and writes the run.

    Args:
        judge: metrics of one model on the global test rows (see ``models.metrics.evaluate``); None where the server
            has no test rows.
        progress: told of the start and of every line of metrics.
    """

    def __init__(
        self,
        run: Run,
        fed: Federation,
        *,
        judge: Callable[[Params], dict[str, Any]] | None,
        progress: Progress,
    ) -> None:
        self.run, self.fed, self._judge, self._progress = run, fed, judge, progress
        self.method: Method[Any] = run.experiment.method
        self._start = time.perf_counter()
        self._revealed: tuple[Any, dict[ClientId, Params]] | None = None

    def go(self) -> dict[str, Any]:
        """From the last commit to the result line."""
        run, fed, method = self.run, self.fed, self.method
        known = len(run.manifest["notices"])
        record = run.restore(method.state_type)
        for notice in run.manifest["notices"][known:]:
            self._progress.notice(notice)
        if record is None:
            fed.begin(0)
            for name in method.secrets:
                fed.secret(name)  # from the start: a run that goes on without it is seen
            state, t, of = self._commit(0, method.init(fed)), 0, None
        else:
            run.into(fed, record)
            state, t, of = record["state"], record["round"], record["extra"].get("model_of_round")
        self._progress.started(run, method.rounds, t)
        if t not in {line["round"] for line in run.metrics()}:
            self._evaluate(t, state, last=t == method.rounds)
        if t < method.rounds:
            self._enter(method.spent())
        while t < method.rounds and not self._patience_over():
            t += 1
            fed.begin(t)
            state = method.step(fed, state, t)
            self._tell(fed.notices)
            state = self._commit(t, state)
            self._evaluate(t, state, last=t == method.rounds)
        if of is None:
            state, of = self._best(t, state)
        return self._finish(t, state, of)

    def _tell(self, notices: Sequence[str]) -> None:
        """Show them, and keep them in the manifest; a round that is done again says nothing twice."""
        for notice in notices:
            self._progress.notice(notice)
        kept = self.run.manifest["notices"]
        if new := [notice for notice in notices if notice not in kept]:
            kept += new
            self.run.write_manifest()

    def _commit(self, t: int, state: Any) -> Any:
        """Round t is done; the state to go on with. A large one is that of the checkpoint, mapped from its file.

        Raises:
            RunError: the state holds NaN or infinity, from which no run goes on; the last commit stands.
        """
        if (where := nonfinite(state, "state")) is not None:
            kept = f"round {t - 1} stands as it was committed" if t else "nothing is committed"
            raise RunError(f"round {t}: the server's {where} has NaN or infinity; {kept}")
        self.fed.commit()
        if t:
            self.run.keep_arrays(t, self.method.arrays(state))
        self.run.commit(t, state, self.fed, self._seconds(), spared=self._best_round())
        return self.run.state(self.method.state_type) if payload.size(state)[1] > limit() else state

    def _seconds(self) -> float:
        return self.run.seconds + time.perf_counter() - self._start

    def _evaluate(self, t: int, state: Any, last: bool) -> None:
        """Write round t's line; the round itself is committed already."""
        every = self.run.experiment.run.evaluate_every
        line: dict[str, Any] = {"round": t, "seconds": round(self._seconds(), 3)}
        if last or (every and t % every == 0):
            line |= self.scores(state, thorough=last)
        if self.run.experiment.run.local_scores and t:
            line |= {key: self._before_aggregation(key) for key in (BEFORE, LOSS_BEFORE)}
        line |= {
            "train_loss": self.fed.metrics.get("loss"),
            "cohort": list(self.fed.cohort),
            "excluded": [
                {"client": e.client, "code": e.code, "reason": e.reason} for e in self.fed.excluded if e.round == t
            ],
            "bytes_up": self.fed.transcript.bytes_up,
            "bytes_down": self.fed.transcript.bytes_down,
        }
        if PASSES in self.fed.metrics:
            line[PASSES] = self.fed.metrics[PASSES]
        self.run.note_messages(self.fed)
        self.run.log(line)
        self._progress.round(line)

    def _before_aggregation(self, key: str) -> float | None:
        """Mean accuracy or loss of the round's clients after local training, weighted like their updates."""
        judged, total = self.fed.metrics.get(JUDGED), self.fed.metrics.get(key)
        return total / judged if judged and total is not None else None

    def models(self, state: Any) -> dict[ClientId, Params]:
        """What the server has of the final models: one by client name for personal methods, else one under ""."""
        if self.method.personal:
            return {client: self.method.params_for(state, client) for client in self.fed.clients}
        return {"": self.method.params_for(state, "")}

    def revealed(self, state: Any) -> dict[ClientId, Params]:
        """The final models themselves. What clients keep of theirs is asked for; who refuses is left out."""
        models = self.models(state)
        if not self.method.kept:
            return models
        if self._revealed is None or self._revealed[0] is not state:
            check = partial(self.method.check_own, model=self.fed.model)
            self._revealed = state, self._aside(self.method.reveal, check=check, w=each(models))
        return self._revealed[1]

    def scores(self, state: Any, thorough: bool) -> dict[str, Any]:
        """Metrics of the state: every client on its own test rows, the server's model (or models) on the global
        ones.
        """
        models = self.models(state)
        by_client = {client: models.get(client) or models[""] for client in self.fed.clients}
        judged_own = self._own(by_client, "test")
        own = {c: m.get("accuracy") for c, m in judged_own.items()}
        local = _mean(own.values())
        line: dict[str, Any] = {"client_accuracy": own, "local_accuracy": local}
        line["local_loss"] = _mean(m.get("loss") for m in judged_own.values())
        if local is None and line["local_loss"] is not None:  # of language models nothing else tells clients apart
            line["client_loss"] = {c: m.get("loss") for c, m in judged_own.items()}
        for key in ANSWERS:
            if any(key in m for m in judged_own.values()):
                line[f"local_{key}"] = _mean(m.get(key) for m in judged_own.values())
        if self._validates:
            judged = [m for m in self._own(by_client, "val").values() if m.get("loss") is not None]
            rows = sum(m["n"] for m in judged)
            line["val_loss"] = sum(m["n"] * m["loss"] for m in judged) / rows if rows else None
        if self._judge is not None and (thorough or not self.method.personal):
            judged = [self._judge(w) for w in self.revealed(state).values()]
            line["global_accuracy"] = _mean(m["accuracy"] for m in judged)
            for key in ("loss", "balanced_accuracy", "macro_f1", "perplexity"):
                line[key] = _mean(m.get(key) for m in judged)
            for key in ("attack_success", *ANSWERS):
                if any(key in m for m in judged):
                    line[key] = _mean(m.get(key) for m in judged)
        if thorough and (starts := self.method.starts(state)) is not None:
            found = self._own(starts, "test", self.method.evaluate_start)
            before = {c: m.get("accuracy") for c, m in found.items()}
            line |= {"server_accuracy": _mean(before.values()), "server_client_accuracy": before}
            line["server_loss"] = _mean(m.get("loss") for m in found.values())
            if "client_loss" in line:
                line["server_client_loss"] = {c: m.get("loss") for c, m in found.items()}
        line["accuracy"] = local if self.method.personal else line.get("global_accuracy", local)
        return line

    @property
    def _validates(self) -> bool:
        """Clients hold validation rows, and may be asked for scores."""
        if self.run.experiment.privacy is not None:
            return False
        split = self.run.manifest["split"]
        if split is None:  # silos with files of their own: only they know, and who has none says so
            return self.run.experiment.data.val_fraction > 0
        return any(counts["val"]["rows"] for counts in split["clients"].values())

    def _own(
        self, models: Mapping[ClientId, Params], part: str, handler: Callable[..., Any] | None = None
    ) -> dict[ClientId, dict[str, Any]]:
        """Metrics of each client's model on its own rows; {} where it did not answer, where the method hides how many
        rows a client has, and under [privacy], where exact scores and numbers of rows would leave beside what the
        ledger accounts for.
        """
        if self.run.experiment.privacy is not None or not self.method.asks_scores:
            return {client: {} for client in self.fed.clients}
        first = next(iter(models.values()))
        payload: Any = first if all(w is first for w in models.values()) else each(models)
        replies = self._aside(handler or self.method.evaluate, w=payload, part=part)
        return {client: replies.get(client, {}) for client in self.fed.clients}

    def _aside(self, handler: Callable[..., Any], **payload: Any) -> dict[ClientId, Any]:
        """Ask what is no part of the method: not counted, and nobody is left out for it."""
        excluded, cohort = list(self.fed.excluded), self.fed.cohort
        try:
            replies = self.fed.ask(handler, counted=False, **payload)
        except RunError:  # nobody answered; the training goes on
            replies = {}
        self.fed.excluded, self.fed.cohort = excluded, cohort
        return replies

    def _best_round(self) -> int | None:
        """The best round so far; None where nobody asks for it, or there is none."""
        return logs.best_round(self.run.metrics()) if self.run.experiment.run.patience else None

    def _patience_over(self) -> bool:
        """No validation loss has been lower than that of the best round for ``run.patience`` rounds."""
        patience = self.run.experiment.run.patience
        losses = logs.val_losses(self.run.metrics()) if patience else []
        return bool(losses) and losses[-1][1] - min(losses)[1] >= patience

    def _best(self, t: int, state: Any) -> tuple[Any, int]:
        """The state to end with, and the round that it is of: under ``run.patience`` the best one's, if the server has
        all of it. The last checkpoint gets it, which is where everybody looks who needs the state of a run.
        """
        best = self._best_round()
        if best is None or best == t or self.method.kept:
            return state, t
        if (found := self.run.state_of(best, self.method.state_type)) is None:
            self._progress.notice(
                f"the checkpoint of round {best}, the best one, is gone: the model is that of round {t}"
            )
            return state, t
        self.run.commit(t, found, self.fed, self._seconds(), extra={"model_of_round": best})
        return found, best

    def _finish(self, t: int, state: Any, of: int) -> dict[str, Any]:
        """The result of t rounds, whose model is that of round ``of``."""
        run, fed = self.run, self.fed
        models, spent = self.revealed(state), self.method.spent()
        last: dict[str, Any] = next((m for m in reversed(run.metrics()) if "client_accuracy" in m), {})
        early = t < self.method.rounds
        if not last or last["round"] != of or early:  # nobody knew that round ``of`` would be the last
            last = self.scores(state, thorough=True)
        result: dict[str, Any] = {
            "run": str(run.path),
            "method": run.experiment.method_name,
            "engine": run.experiment.run.engine,
            "seed": run.experiment.run.seed,
            "rounds": t,
            "seconds": round(self._seconds(), 3),
            **{
                name: last.get(name)
                for name in (
                    "accuracy",
                    "global_accuracy",
                    "local_accuracy",
                    "client_accuracy",
                    "local_loss",
                    "balanced_accuracy",
                    "macro_f1",
                    "loss",
                    "perplexity",
                )
            },
            "bytes_up": fed.transcript.bytes_up,
            "bytes_down": fed.transcript.bytes_down,
            "epsilon": max((entry["epsilon"] for entry in spent), default=None),
            "params_sha256": sha256_of(models),
            "excluded": [asdict(e) for e in fed.excluded],
            "attackers": list(run.manifest.get("attackers", [])),
            **({"attack_success": last["attack_success"]} if "attack_success" in last else {}),
            "details": self.method.details(state, self._judge),
            **({"lost": run.manifest["lost"]} if run.manifest.get("lost") else {}),
        }
        if self.method.kept:
            result["server_sha256"] = sha256_of(self.models(state))
        beside = ["server_accuracy", "server_client_accuracy", "server_loss"]
        beside += [*ANSWERS, *(f"local_{key}" for key in ANSWERS), "client_loss", "server_client_loss", "val_loss"]
        result["details"] |= {key: last[key] for key in beside if key in last}
        if cut := max(last.get(key) or 0.0 for key in ("answers_cut", "local_answers_cut")):
            self._progress.notice(
                f"{cut:.0%} of the answers to test rows stop at the limit of tokens, without an end of their own; a "
                "larger model.answer_tokens lets them go on"
            )
        if early:
            best, patience = self._best_round(), run.experiment.run.patience
            result["details"]["stopped_early"] = {"best_round": best, "planned_rounds": self.method.rounds}
            self._progress.notice(
                f"stopped after round {t} of {self.method.rounds}: no validation loss was below that of round {best} "
                f"(run.patience = {patience})"
            )
        if run.experiment.run.patience:
            result["details"]["model_of_round"] = of
            self._progress.notice(f"the model is that of round {of}")
        result["details"] |= run.join_arrays(fed.clients)
        lines = run.metrics()
        if run.experiment.run.local_scores:
            for key in (BEFORE, LOSS_BEFORE):
                result["details"][key] = next((m[key] for m in reversed(lines) if m.get(key) is not None), None)
        self._count(lines)
        self._enter(spent)
        self._write_models(models)
        run.note_messages(fed)  # of asking for the final models
        for notice in self.method.notices(state):
            if notice not in run.manifest["notices"]:  # a resumed run may have said it
                run.manifest["notices"].append(notice)
                self._progress.notice(notice)
        run.manifest["result"] = result
        run.manifest["finished"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        run.write_manifest()
        return result

    def _enter(self, spent: Sequence[dict[str, Any]]) -> None:
        """What the rounds spend of privacy, on the ledger before they are asked: a run that ends early has spent it."""
        ledger = self.run.manifest["ledger"]
        missing = [entry for entry in spent if entry not in ledger["entries"]]
        if missing:
            ledger["entries"] += missing
            ledger["epsilon"] = max(entry["epsilon"] for entry in spent)
            self.run.write_manifest()

    def _count(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Complete the ledger's multiply-accumulates: what training has cost, and until the target was reached."""
        from fedfm.models.costs import Costs, rounds_to

        found = self.run.manifest["ledger"].get("operations")
        if found is None:
            return
        if self.run.manifest["split"] is None:  # silos with files of their own: the server does not know their rows
            found |= {"samples": None, "macs_per_client_round": None}
            return
        if logs.gaps_of_metrics(self.run.path / logs.METRICS, max((line["round"] for line in lines), default=0)):
            found["macs"] = None  # of rounds without a line nobody knows who trained
            return
        costs = Costs(*(found[key] for key in ("macs_per_sample", "macs_once_per_sample", "epochs", "samples")))
        cohorts, beside = ([line.get(key, 0.0) for line in lines if line["round"]] for key in ("cohort", PASSES))
        found["macs"] = costs.tmac(cohorts, beside)
        if any(beside):
            visits = sum(map(len, cohorts))
            found["macs_per_client_round"] = (found["macs"] - costs.once(cohorts)) / visits
        target = self.run.experiment.run.target_accuracy
        if target is not None:
            rounds = rounds_to(target, [(line["round"], line.get("accuracy")) for line in lines])
            found |= {"target_accuracy": target, "rounds_to_target": rounds}
            found["tmac"] = None if rounds is None else costs.tmac(cohorts[:rounds], beside)

    def _write_models(self, models: Mapping[ClientId, Params]) -> None:
        from safetensors import SafetensorError

        from fedfm.models.export import save

        for client, w in models.items():
            try:
                save(self.fed.model, w, self.run.adapter(client), self.method.head_takes)
            except (OSError, SafetensorError) as error:
                raise storage.not_written(self.run.adapter(client), error) from error


def _mean(values: Any) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
