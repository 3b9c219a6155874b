"""Limits of a student's pictures: a client finds unlike rows before it encrypts them, and names them."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import convolve2d

import ciphertext_student
import fedfm
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.encrypted.inference.serialization import pack
from fedfm.encrypted.protocol.client import ClientHalf
from fedfm.encrypted.protocol.handshake import Hello
from fedfm.encrypted.protocol.out_of_range import describe_unlike, replace_unlike, within_limits
from fedfm.encrypted.student.input_limits import ENTRY, beyond, measure_detail, widen_limits
from fedfm.encrypted.student.recalibrate import wider_limits
from fedfm.errors import ClientFault, InputError
from fedfm.training.scheduler import train_client
from small import pictures

FOURTH = np.array([1.0, -4.0, 6.0, -4.0, 1.0])


def noise(seed, n=3, side=32, size=1.0):
    return size * torch.from_numpy(np.random.default_rng(seed).normal(size=(n, 3, side, side))).float()


def test_the_statistics_are_their_definitions():
    """Compared with NumPy and SciPy, square by square."""
    x = noise(0, n=2, side=40)
    found = measure_detail(x)
    for i, picture in enumerate(x.double().numpy()):
        across, down = np.diff(picture, axis=-1)[:, :-1], np.diff(picture, axis=-2)[..., :-1]
        assert float(found["roughness"][i]) == pytest.approx(np.sqrt((across**2 + down**2).mean()), rel=1e-5)
        grey = picture.mean(0)
        assert float(found["colour"][i]) == pytest.approx(np.sqrt(((picture - grey) ** 2).mean()), rel=1e-5)
        fine = np.stack([convolve2d(c, np.outer(FOURTH, FOURTH), mode="valid") for c in picture])  # (3, 36, 36)
        power = (fine**2).mean(0)
        assert float(found["grain"][i]) == pytest.approx(np.sqrt(power.mean()), rel=1e-5)
        squares = [power[r : r + 16, c : c + 16].mean() for r in (0, 16, 32) for c in (0, 16, 32)]
        assert float(found["detail"][i]) == pytest.approx(np.sqrt(max(squares)), rel=1e-5)


def test_grain_of_white_noise_is_seventy_times_its_deviation():
    assert measure_detail(noise(1, side=128, size=0.5))["grain"].numpy() == pytest.approx(35, rel=0.05)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.01, 5), st.floats(1.01, 4))
def test_measured_rows_are_within_and_louder_ones_beyond(seed, size, factor):
    limits = {}
    for part in noise(seed, n=4, size=size).split(2):
        widen_limits(limits, part)
    assert beyond(noise(seed, n=4, size=size), limits) == [""] * 4
    assert beyond(noise(seed, n=4, size=size) / factor, limits) == [""] * 4
    reasons = beyond(noise(seed, n=4, size=size) * factor, limits)
    assert any("grain" in reason for reason in reasons)


def test_a_row_that_is_no_number_is_beyond_and_without_limits_none_is():
    limits = {}
    widen_limits(limits, noise(0))
    bad = noise(0)
    bad[1, 0, 3, 3] = np.nan
    assert [bool(reason) for reason in beyond(bad, limits)] == [False, True, False]
    assert beyond(bad, {}) == [""] * 3
    tiny = {}
    widen_limits(tiny, noise(0, side=4))
    assert tiny == {}


def test_an_unlike_row_leaves_a_copy_of_another_one():
    limits = {}
    widen_limits(limits, noise(0))
    x = noise(0)
    x[[0, 2]] *= 9
    sent, reasons = replace_unlike(x, limits)
    assert torch.equal(sent, x[[1, 1, 1]])
    text = describe_unlike(reasons, ["a.png", "b.png", "c.png"])
    assert text.startswith("2 of 3 rows are not encrypted")
    assert "a.png (roughness" in text
    assert "b.png" not in text
    assert "at most" in text
    grey, _ = replace_unlike(x[[0, 2]], limits)
    assert not grey.any()
    same, reasons = replace_unlike(x[1:2], limits)
    assert torch.equal(same, x[1:2])
    assert describe_unlike(reasons, ["b.png"]) == ""
    states = torch.ones(3, 2, 1, 4)
    assert within_limits(states, x, limits).sum((1, 2, 3)).tolist() == [0, 8, 0]


def test_many_unlike_rows_are_counted_and_some_are_named():
    text = describe_unlike(["grain 2, at most 1"] * 8, [f"train row {i}" for i in range(8)])
    assert text.startswith("8 of 8 rows")
    assert text.endswith("; and 3 more")


# --- in a run ---------------------------------------------------------------------------------------------------------
def limited(folder):
    """The tiny student with the limits of the pictures of a run, and one picture of noise among them."""
    path = pictures(folder, 60)
    rows = dict(np.load(path))
    twin = ciphertext_student.folder(folder)
    place = twin / "config.json"
    config = json.loads(place.read_text())
    limits = {}
    x = torch.from_numpy(rows["x"]).float().permute(0, 3, 1, 2) / 127.5 - 1
    widen_limits(limits, torch.nn.functional.interpolate(x, (ciphertext_student.SIDE, ciphertext_student.SIDE)))
    config["fedfm_polynomials"][ENTRY] = {name: 2 * limit for name, limit in limits.items()}
    place.write_text(json.dumps(config))
    rows["x"][3] = np.random.default_rng(0).integers(0, 2, rows["x"][3].shape) * 255
    np.savez(path, **rows)
    assert rows["split"][3] == "train"
    keys = {"name": "blindfed", "foundation": str(twin), "rounds": 3, "released": "grid"}
    local = {"learning_rate": 0.2, "epochs": 5, "batch_size": 16}
    return {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": 3}},
        "method": keys | {"encryption": "clear", "local": local},
        "run": {"seed": 0, "workers": 1},
    }


def test_in_the_clear_the_run_counts_such_a_row(tmp_path):
    result = fedfm.run(limited(tmp_path), tmp_path / "run")
    assert result["excluded"] == []
    notices = fedfm.load_run(tmp_path / "run").manifest["notices"]
    assert any(text.startswith("1 of 20 rows of client-") and "or its limits" in text for text in notices)


@pytest.mark.proof
def test_on_ciphertexts_an_unlike_row_does_not_change_its_batch(tmp_path):
    """The same picture takes its client with it where the student has no limits (test_blindfed_left_out)."""
    pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')
    asked = limited(tmp_path)
    asked["method"]["encryption"] = "ckks"
    result = fedfm.run(asked, tmp_path / "run")
    assert result["excluded"] == []
    assert result["accuracy"] > 0.9
    assert result["details"]["most_rows_left_out"] == 1


def test_in_secret_orders_the_batch_is_refused_and_only_the_silos_log_names_the_row():
    """The server reads the fault, so it has no row's name or figure; nothing is encrypted."""
    rows = Rows({"pixels": torch.zeros(4, 16, 16, 3, dtype=torch.uint8)}, labels=torch.zeros(4, dtype=torch.int64))
    rows.tensors["pixels"][2, ::2] = 255
    notes = []
    data = ClientData(lambda: rows, lambda: rows.take([]), lambda: rows.take([]))
    who = Client("c", data, None, {}, 0, log=notes.append, trainer=train_client)
    shape = {"blocks": 2, "positions": 1, "width": 3, "rank": 2, "batch": 4, "tokens": 4, "patch": [8, 8], "extra": 0}
    key, name = torch.zeros(32, dtype=torch.uint8), {"session": "00" * 16, "classes": ["a", "b"], "kernels": "exact"}
    size = {"size": {"height": 16, "width": 16}}
    who.store["hello"] = pack(Hello(**shape, **name, picture=size, digest="", key=key, limits={"roughness": 0.1}))
    with pytest.raises(ClientFault) as fault:
        ClientHalf("permuted", "ckks").rows(who, 0, torch.zeros(16, dtype=torch.uint8), False)
    assert "beyond the limits of the server's model; the silo's log names them" in str(fault.value)
    assert "roughness" not in str(fault.value)
    assert "1 of 4 rows are not encrypted" in notes[0]
    assert "train row 3 (roughness" in notes[0]


def test_measuring_again_widens_limits_and_gives_none_to_a_student_without():
    assert wider_limits({"grain": 1.0, "detail": 3.0}, {"grain": 2.0, "detail": 1.0}) == {"grain": 2.0, "detail": 3.0}
    assert wider_limits({}, {"grain": 2.0}) == {}


def test_a_damaged_limit_is_refused(tmp_path):
    asked = limited(tmp_path)
    place = tmp_path / "tiny-student" / "config.json"
    config = json.loads(place.read_text())
    config["fedfm_polynomials"][ENTRY] = {"grain": "much"}
    place.write_text(json.dumps(config))
    with pytest.raises(InputError, match="is not as `fedfm distil` writes it"):
        fedfm.run(asked, tmp_path / "run")
