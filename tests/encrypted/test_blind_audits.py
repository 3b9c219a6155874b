"""Audits of double-blind runs: each protocol discloses what its documentation states."""

import dataclasses
import re

import pytest

import fedfm
from ciphertext_student import folder as twin
from fedfm.audits.audit import choose, perform
from fedfm.encrypted.audits.server_view import examine
from fedfm.errors import InputError
from fedfm.runtime.run_directory import Run


def run(folder, protocol, encryption="clear", limit=160, clients=2):
    tables = {
        "data": {"name": "digits", "limit": limit, "partition": {"name": "iid", "clients": clients}},
        "method": {
            "name": "blindfed",
            "foundation": str(twin(folder)),
            "encryption": encryption,
            "protocol": protocol,
            "released": "grid",
            "rounds": 1,
        },
    }
    fedfm.run(tables, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def permuted(tmp_path_factory):
    return run(tmp_path_factory.mktemp("permuted"), "permuted")


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    return run(tmp_path_factory.mktemp("masked"), "masked")


def by_name(path, *names):
    return {f.name: f for f in perform(path, names)}


def test_the_orders_of_the_permuted_protocol_are_undone(permuted):
    findings = by_name(permuted, "block_order", "loss_labels")
    assert findings["order.sent"].estimate == 1.0
    assert findings["order.from_states"].estimate > 0.9
    assert findings["order.from_states"].verdict == "leaks"
    assert findings["labels.by_loss"].estimate == 1.0
    assert findings["labels.by_loss"].detail["queries"] == 3  # sixteen labels of ten classes, 20 bits a loss
    assert not any(f.contradicts for f in findings.values())


def test_orders_and_losses_are_no_question_of_the_masked_protocol(masked):
    for name in ("block_order", "loss_labels"):
        with pytest.raises(InputError, match="masked"):
            choose(Run.open(masked), [name])


@pytest.mark.proof
def test_blocks_are_fitted_from_pairs_and_get_better_with_rows(permuted):
    finding = by_name(permuted, "substitute_model")["substitute.blocks"]
    assert 0 < finding.estimate < 1
    assert len(finding.detail["by_block"]) == 1  # two blocks: one pair
    assert (finding.detail["fewer_rows"], finding.detail["rows"]) == (20, 64)
    (few,), (all_rows,) = (finding.detail[name] for name in ("by_block_from_fewer_rows", "by_block"))
    assert few > all_rows
    told = float(re.search(r"from 20 rows, the error on the other rows is ([0-9.]+[0-9])", finding.says)[1])
    assert told == pytest.approx(few, abs=1e-3)


@pytest.mark.proof
def test_a_student_is_measured_in_and_out_of_the_clients_rows(masked):
    finding = by_name(masked, "substitute_model")["substitute.student"]
    assert -1 <= finding.detail["cosine_outside"] <= 1
    assert finding.estimate == pytest.approx(finding.detail["cosine"], abs=1e-4)
    assert "does not promise to prevent this" in finding.says
    few = [finding.detail[f"cosine{where}_from_0.25_of_the_rows"] for where in ("", "_outside")]
    assert all(-1 <= cosine <= 1 for cosine in few)
    told = finding.says.partition("trained on 20 rows, the cosines are ")[2].rstrip(".").split(" and ")
    assert [float(cosine) for cosine in told] == pytest.approx(few, abs=1e-2)


def test_the_encryption_of_zero_hides_the_weights(masked):
    pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')
    finding = by_name(masked, "ciphertext_weights")["weights.by_ciphertext"]
    assert finding.estimate == 0.0
    assert finding.verdict == "holds"
    assert finding.detail["without_encryption_of_zero"] == 1.0


def test_a_simulation_says_that_the_server_saw_the_rows(masked):
    finding = by_name(masked, "server_view")["server.view"]
    assert finding.verdict == "leaks"
    assert "simulation" in finding.says
    assert not finding.contradicts  # nothing else was claimed


def test_rows_in_the_clear_refute_an_encrypted_run(masked):
    claimed = Run.open(masked)
    method = dataclasses.replace(claimed.experiment.method, encryption="ckks")
    object.__setattr__(claimed.experiment, "method", method)
    assert examine(claimed).contradicts


@pytest.mark.proof
def test_encryption_is_close_to_the_clear_and_bad_messages_are_refused(tmp_path):
    pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')
    done = run(tmp_path, "masked", encryption="ckks", limit=24)
    findings = by_name(done, "encrypted_error", "server_view", "other_clients")
    assert 0 < findings["encryption.error"].estimate < 1e-2
    assert len(findings["encryption.error"].detail["largest_by_block"]) == 2
    assert 0 < findings["encryption.logits"].estimate < 1e-2
    assert findings["encryption.logits"].detail["same_class"] == 1.0
    assert findings["encryption.refusals"].estimate == 1.0
    others = findings["states.other_clients"]
    assert 0 < others.estimate == Run.open(done).manifest["result"]["details"]["max_error"] < 1e-2
    assert others.verdict == "holds"
    assert not findings["server.view"].contradicts
    assert "query.BlindFed" not in findings["server.view"].says  # rows crossed as ciphertexts alone


@pytest.mark.release
def test_the_permuted_protocol_is_audited_on_ciphertexts_as_in_the_clear(tmp_path):
    pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')
    names = ("block_order", "loss_labels", "encrypted_error", "server_view")
    findings = by_name(run(tmp_path, "permuted", encryption="ckks", limit=24, clients=1), *names)
    assert findings["order.sent"].estimate == findings["labels.by_loss"].estimate == 1.0
    assert findings["order.from_states"].verdict == "leaks"
    assert 0 < findings["encryption.error"].estimate < 1e-2
    assert "query.BlindFed" not in findings["server.view"].says  # rows and labels crossed as ciphertexts alone
    assert not any(f.contradicts for f in findings.values())


def test_a_simulation_encrypts_nothing(masked):
    with pytest.raises(InputError, match="encrypts nothing"):
        choose(Run.open(masked), ["encrypted_error"])
    with pytest.raises(InputError, match="from each client's rows alone"):
        choose(Run.open(masked), ["other_clients"])
