"""A silo's ledger against sums of its own file, whatever the order of messages, crashes, processes and full disks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedfm.errors import ClientFault, InputError
from fedfm.privacy.policy import Budget
from fedfm.sites.ledger import NOTHING, UNBOUNDED, Cost, Entry, Ledger, entries
from fedfm.sites.unanswered import Unanswered

DELTA = 1e-5


def entry(
    answer: str = "a", *, run: str = "run", round: int = 1, handler: str = "train.FedAvg_train", **change: Any
) -> Entry:
    """An answer; two with the same text are the same answer."""
    known = {
        "time": "2026-01-01T00:00:00+0000",
        "run": run,
        "experiment": "0" * 64,
        "round": round,
        "call": 1,
        "method": "fedavg",
        "handler": handler,
        "exposes": "mean",
        "form": "plain",
        "bytes": 10,
        "sha256": hashlib.sha256(answer.encode()).hexdigest(),
        "epsilon": None,
        "cost": UNBOUNDED,
    }
    return Entry(**known | change)


def refusal(ledger: Ledger, one: Entry) -> str:
    """Why the entry may not leave; "" if it may."""
    try:
        ledger.enter(one)
    except ClientFault as fault:
        return str(fault)
    return ""


def entered(ledger: Ledger, one: Entry) -> bool:
    why = refusal(ledger, one)
    assert not why or why.startswith("E_REFUSED: ")
    return not why


# --- an oracle: the file's own lines, summed by the definitions ------------------------------------------------------


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rounds_of(lines: list[dict[str, Any]]) -> int:
    """For each round of each run, the largest number of different answers of one handler about one part of the rows.

    Two answers are the same if question and answer are. The start model's scores belong to the first round.
    """
    answers: dict[Any, set[Any]] = defaultdict(set)
    seen: set[Any] = set()
    for line in lines:
        answer = line["run"], line["asked"], line["sha256"]
        if answer not in seen and line["exposes"] != "hello":
            answers[line["run"], line["round"], line["handler"], line["part"]].add(answer)
        seen.add(answer)
    most: dict[Any, int] = defaultdict(int)
    for (run, round, handler, _), different in answers.items():
        of = run, (round or 1) if handler.startswith("scores.") else round
        most[of] = max(most[of], len(different))
    return sum(most.values())


def within(lines: list[dict[str, Any]], epsilon: float) -> bool:
    """Whether Gaussian releases of these lines are (epsilon, DELTA)-private, by the closed form of one Gaussian."""
    once = {(line["run"], line["asked"], line["sha256"]): line["cost"] for line in reversed(lines)}
    spent = [cost for cost in once.values() if cost["times"]]
    if any(cost["noise_multiplier"] == 0 for cost in spent):
        return False
    mu = math.sqrt(sum(1 / cost["noise_multiplier"] ** 2 for cost in spent))
    if mu == 0:
        return True
    tail = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
    return bool(tail <= DELTA)


GAUSSIAN = [Cost("client", "add_remove", z, by="server") for z in (1.0, 2.0, 5.0)]
MESSAGES = st.tuples(
    st.sampled_from("abcd"),  # the answer
    st.sampled_from(["run-1", "run-2"]),
    st.integers(0, 3),
    st.sampled_from(["train.A_train", "train.A_other", "query.A_ask", "scores.Evaluation_evaluate", "query.hello"]),
    st.integers(0, 40),
    st.sampled_from([*GAUSSIAN, NOTHING, UNBOUNDED]),
    st.sampled_from(["alive", "alive", "restarted", "killed inside a line", "beside another process"]),
    st.sampled_from(["", "this", "that"]),  # the question; of an old line there is none
    st.sampled_from(["test", "val"]),
)
WORDS = {"train": "mean", "query": "reply", "scores": "scores"}


@pytest.mark.proof
@settings(max_examples=60, deadline=None)
@given(
    st.lists(MESSAGES, max_size=25),
    st.builds(
        Budget,
        epsilon=st.none() | st.sampled_from([0.5, 2.0, 6.0]),
        bytes=st.none() | st.integers(0, 300),
        rounds=st.none() | st.integers(0, 5),
    ),
)
def test_no_sum_is_above_its_budget_whatever_the_order_of_requests_and_crashes(messages, budget):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "silo.ledger.jsonl"
        ledgers = [Ledger(path, budget), Ledger(path, budget)]  # two workers
        for answer, run, round, handler, size, cost, what, asked, part in messages:
            exposes = "hello" if handler == "query.hello" else WORDS[handler.partition(".")[0]]
            change = {"exposes": exposes, "bytes": size, "cost": cost, "asked": asked and asked + handler}
            change["part"] = part if exposes == "scores" else ""
            one = entry(f"{answer}{cost}", run=run, round=round, handler=handler, **change)
            before = lines_of(path)
            if what == "restarted":
                ledgers[0] = Ledger(path, budget)
            if what == "killed inside a line":
                with open(path, "ab") as file:
                    file.write(json.dumps(dataclasses.asdict(one)).encode()[: 7 + size])
                ledgers[0] = Ledger(path, budget)
            left = entered(ledgers[what == "beside another process"], one)
            would = [*before, dataclasses.asdict(one)]
            fits = (
                (budget.bytes is None or sum(line["bytes"] for line in would) <= budget.bytes)
                and (budget.rounds is None or rounds_of(would) <= max(budget.rounds, rounds_of(before)))
                and (budget.epsilon is None or within(would, budget.epsilon * (1 + 2e-6)) or _no_new_cost(before, one))
            )
            if left:
                assert fits
                assert lines_of(path) == would
            else:
                assert not fits or (budget.epsilon is not None and not within(would, budget.epsilon))
                assert lines_of(path) == before
        assert budget.bytes is None or sum(line["bytes"] for line in lines_of(path)) <= budget.bytes
        assert budget.rounds is None or rounds_of(lines_of(path)) <= budget.rounds
        assert budget.epsilon is None or within(lines_of(path), budget.epsilon * (1 + 2e-6))


def _no_new_cost(before: list[dict[str, Any]], one: Entry) -> bool:
    known = {(line["run"], line["asked"], line["sha256"]) for line in before}
    return not one.cost.times or (one.run, one.asked, one.sha256) in known


# --- single cases -----------------------------------------------------------------------------------------------------


def test_a_refusal_names_the_key_what_is_spent_and_the_limit(tmp_path):
    ledger = Ledger(tmp_path / "l", Budget(bytes=25, rounds=3))
    ledger.enter(entry("a"))
    ledger.enter(entry("b", round=2))
    with pytest.raises(ClientFault, match=r"budget\.bytes: 20 of 25 is spent, and this answer would spend 10"):
        ledger.enter(entry("c", round=3))
    ledger = Ledger(tmp_path / "l", Budget(rounds=2))
    with pytest.raises(ClientFault, match=r"budget\.rounds: 2 of 2 is spent, and this answer would spend 1"):
        ledger.enter(entry("c", round=3))
    noisy = Cost("client", "add_remove", 1.0, by="silo")
    ledger = Ledger(tmp_path / "m", Budget(epsilon=6.0))
    ledger.enter(entry("a", cost=noisy))  # (4.38, 1e-5), by the closed form
    with pytest.raises(
        ClientFault, match=r"budget\.epsilon: 4\.37718 of 6 is spent, and this answer would spend 2\.1957"
    ):
        ledger.enter(entry("b", cost=noisy))
    with pytest.raises(ClientFault, match="would spend inf"):
        ledger.enter(entry("b"))


def test_an_earlier_answer_without_noise_uses_up_any_epsilon(tmp_path):
    Ledger(tmp_path / "l", Budget()).enter(entry("a"))
    noisy = Cost("client", "add_remove", 100.0, by="silo")
    assert not entered(Ledger(tmp_path / "l", Budget(epsilon=8.0)), entry("b", cost=noisy))


def test_a_repeated_answer_is_free_and_another_one_in_the_same_round_is_not(tmp_path):
    ledger = Ledger(tmp_path / "l", Budget(rounds=2))
    for _ in range(5):
        ledger.enter(entry("a"))
    ledger.enter(entry("a for the other model"))  # round 1 again
    assert not entered(ledger, entry("a for a third model"))
    ledger.enter(entry("a second half", handler="train.FedAvg_other"))  # a round has several handlers
    assert len(entries(tmp_path / "l")) == 7


def test_the_same_bits_for_another_request_count_as_another_answer(tmp_path):
    """A refusal, or an accuracy of 0.5, is the same each time, and tells something new each time."""
    ledger = Ledger(tmp_path / "l", Budget(rounds=3))
    for number in range(3):
        ledger.enter(entry("E_NORM", asked=f"threshold {number}", fault="E_NORM"))
    assert not entered(ledger, entry("E_NORM", asked="threshold 3", fault="E_NORM"))
    assert entered(ledger, entry("E_NORM", asked="threshold 1", fault="E_NORM"))  # a message that was lost


SCORES = {"handler": "scores.Evaluation_evaluate", "exposes": "scores"}


def test_a_round_with_scores_of_each_part_is_one_round_and_scores_alone_are_one_too(tmp_path):
    ledger = Ledger(tmp_path / "l", Budget(rounds=2))
    for part in ("test", "val"):
        ledger.enter(entry("start", round=0, asked="w0", part=part, **SCORES))
        ledger.enter(entry("first", round=1, asked="w1", part=part, **SCORES))
    ledger.enter(entry("update", round=1, asked="w0"))
    ledger.enter(entry("second", round=2, asked="w2", part="test", **SCORES))
    assert not entered(ledger, entry("third", round=3, asked="w3", part="test", **SCORES))
    assert not entered(ledger, entry("update", round=3, asked="w2"))


def test_one_request_for_scores_is_admitted_for_each_run_round_and_part(tmp_path):
    ledger = Ledger(tmp_path / "l", Budget())
    first = entry("0.5", asked="w", part="test", **SCORES)
    ledger.admit(first)
    ledger.enter(first)
    ledger.admit(first)  # the answer was lost
    for other in ({"asked": "v", "part": "test"}, {"asked": "v", "part": "test", "call": 9}):
        with pytest.raises(ClientFault, match=r"round 1 has already had its question for scores on test rows"):
            ledger.admit(entry(**other, **SCORES))
    for free in ({"part": "val"}, {"part": "test", "round": 2}, {"part": "test", "run": "other"}):
        ledger.admit(entry(asked="v", **free, **SCORES))
    known = entry("0.7", asked="v", part="val", **SCORES)
    ledger.enter(known)
    ledger.admit(entry(asked="v", part="test", **SCORES))  # of the best round: the server has this answer


def test_a_budget_is_compared_before_rows_are_read(tmp_path):
    ledger = Ledger(tmp_path / "l", Budget(rounds=1, bytes=2_000))
    ledger.enter(entry("a", asked="w"))
    ledger.admit(entry(asked="w", bytes=1_024))
    with pytest.raises(ClientFault, match=r"budget\.rounds: 1 of 1"):
        ledger.admit(entry(asked="v", bytes=1_024))
    with pytest.raises(ClientFault, match=r"budget\.bytes"):
        Ledger(tmp_path / "l", Budget(bytes=1_000)).admit(entry(asked="v", bytes=1_024))
    assert len(entries(tmp_path / "l")) == 1  # asking enters nothing


def test_epsilons_of_different_units_are_added(tmp_path):
    ledger = Ledger(tmp_path / "l", Budget(epsilon=9.0))
    ledger.enter(entry("a", cost=Cost("client", "add_remove", 1.0, by="server")))
    record = Cost("record", "add_remove", 1.0, by="silo")
    assert not entered(ledger, entry("b", cost=record))  # 4.57 + 4.57, each at half of delta
    assert entered(Ledger(tmp_path / "l", Budget(epsilon=9.2)), entry("b", cost=record))


def test_a_line_that_a_crash_cut_is_removed_at_every_length(tmp_path):
    path = tmp_path / "l"
    ledger = Ledger(path, Budget())
    ledger.enter(entry("a"))
    ledger.enter(entry("b"))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        assert len(entries(path)) == 1
        Ledger(path, Budget()).enter(entry("b"))
        assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", [b"{}\n", b"\0" * 40 + b"\n", b'{"time": 1}\n', b"[" * 5_000 + b"\n", b"\xff\n"])
def test_a_damaged_line_stops_the_silo_and_is_named(tmp_path, damage):
    path = tmp_path / "l"
    Ledger(path, Budget()).enter(entry("a"))
    good = path.read_bytes()
    path.write_bytes(good + damage + good)
    with pytest.raises(ClientFault, match="ledger is damaged, or a later version of fedfm wrote it: nothing leaves"):
        Ledger(path, Budget()).enter(entry("b"))
    with pytest.raises(InputError, match="line 2 is damaged"):
        entries(path)
    assert path.read_bytes() == good + damage + good


def test_a_ledger_that_was_put_back_is_read_again(tmp_path):
    path = tmp_path / "l"
    ledger = Ledger(path, Budget(rounds=2))
    ledger.enter(entry("a"))
    kept = path.read_bytes()
    ledger.enter(entry("b", round=2))
    path.rename(tmp_path / "old")
    ledger.enter(entry("c", round=3))
    path.unlink()
    path.write_bytes(kept)
    ledger.enter(entry("d", round=4))
    assert not entered(ledger, entry("e", round=5))


def test_an_older_copy_is_refused_and_an_absent_file_begins_at_zero(tmp_path):
    """An older copy lacks what left since: budgets would be larger than the owner set them."""
    path, mark = tmp_path / "l", tmp_path / "own" / "mark"
    ledger = Ledger(path, Budget(rounds=3), mark)
    ledger.enter(entry("a"))
    older = path.read_bytes()
    ledger.enter(entry("b", round=2))
    newest = path.read_bytes()
    half, zeros = older[: len(older) // 2], bytes(len(newest))  # a file that was cut, or not written before a crash
    for copy in (older, newest.replace(b'"round": 2', b'"round": 1'), b"", half, newest.replace(b"\n", b" "), zeros):
        for process in (ledger, Ledger(path, Budget(rounds=3), mark)):
            path.write_bytes(copy)  # in place, or as another file
            with pytest.raises(ClientFault, match="lacks lines that it had, as an older copy does: nothing leaves"):
                process.enter(entry("c", round=3))
            with pytest.raises(ClientFault, match="lacks lines"):
                process.admit(entry("c", round=3))
            assert path.read_bytes() == copy
            path.write_bytes(newest)
    Ledger(path, Budget(rounds=3)).enter(entry("c", round=3))  # a process that was killed before it set the mark
    assert not entered(ledger, entry("d", round=4))
    path.rename(tmp_path / "moved")
    assert entered(ledger, entry("d", round=4))
    assert entered(Ledger(path, Budget(rounds=3), mark), entry("e", round=5))


def test_a_request_to_a_dead_process_stays_until_the_ledger_has_it(tmp_path):
    path, folder = tmp_path / "l", tmp_path / "unanswered"
    died = Unanswered(folder)
    died.begin(entry(asked="w"))
    file, died._held = died._held, None
    file.close()  # as when its process ends
    path.mkdir()  # the disk takes no line
    with pytest.raises(ClientFault, match="cannot be written"):
        Unanswered(folder).settle(Ledger(path, Budget()), entry(asked="v"))
    path.rmdir()
    Unanswered(folder).settle(Ledger(path, Budget()), entry(asked="v"))
    assert [line["fault"] for line in lines_of(path)] == ["E_DIED"]
    assert not [*folder.iterdir()]


def test_only_the_owner_reads_it_and_a_folder_in_its_place_is_no_answer(tmp_path):
    Ledger(tmp_path / "l", Budget()).enter(entry("a"))
    assert stat.S_IMODE((tmp_path / "l").stat().st_mode) == 0o600
    (tmp_path / "m").mkdir()
    with pytest.raises(ClientFault, match="cannot be written \\(Is a directory\\): nothing leaves"):
        Ledger(tmp_path / "m", Budget()).enter(entry("a"))
    with pytest.raises(ClientFault, match="cannot be written \\(No such file or directory\\): nothing leaves"):
        Ledger(tmp_path / "none" / "l", Budget()).enter(entry("a"))


# --- processes --------------------------------------------------------------------------------------------------------


def _until_full(path: Path, limit: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    ledger, number = Ledger(path, Budget()), 0
    while entered(ledger, entry(str(number))):
        number += 1
    assert "the disk is full" in refusal(ledger, entry("again"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ledger.enter(entry("there is space again"))


@pytest.mark.parametrize("limit", [0, 1_000, 5_000])
def test_a_full_disk_lets_nothing_leave_and_loses_nothing(tmp_path, limit):
    worker = multiprocessing.get_context("fork").Process(target=_until_full, args=(tmp_path / "l", limit))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    found = entries(tmp_path / "l")
    line = len((tmp_path / "l").read_bytes().splitlines(keepends=True)[0])
    assert len(found) == limit // line + 1
    assert (tmp_path / "l").read_bytes().endswith(b"\n")


def _fill(path: Path, name: str) -> None:
    ledger = Ledger(path, Budget(rounds=60))
    for number in range(40):
        entered(ledger, entry(f"{name}{number}", round=number, run=name))


def test_processes_that_enter_at_the_same_time_share_one_budget(tmp_path):
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_fill, args=(tmp_path / "l", f"run-{i}")) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(lines_of(tmp_path / "l")) == rounds_of(lines_of(tmp_path / "l")) == 60


ENDLESS = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_silo_ledger import Budget, Ledger, entry
ledger, number = Ledger(Path(sys.argv[1]), Budget()), 0
while True:
    ledger.enter(entry(f"{sys.argv[3]} {number}"))
    sys.stdout.write(f"{number}\\n")  # the answer leaves
    sys.stdout.flush()
    number += 1
"""


@pytest.mark.proof
def test_an_answer_that_left_a_killed_process_is_on_the_disk(tmp_path):
    path, left = tmp_path / "l", 0
    for attempt in range(3):
        command = [sys.executable, "-c", ENDLESS, str(path), str(Path(__file__).parent), str(attempt)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            time.sleep(0.05 * (attempt + 1))
            worker.kill()
            left += 1 + len(worker.stdout.read().splitlines())
        assert left <= len(entries(path)) <= left + attempt + 1
