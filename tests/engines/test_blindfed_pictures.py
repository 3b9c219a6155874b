"""BlindFed on a folder of pictures of several sizes: clients resize as the server's model needs it."""

import numpy as np
import pytest
from PIL import Image

import ciphertext_student
import fedfm

COLOURS = {"ant": (230, 30, 30), "bee": (30, 230, 30), "cow": (30, 30, 230)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of several sizes, and an npz of the same pictures in the same order, resized beforehand."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    x, y, splits = [], [], []
    for split, count in (("test", 4), ("train", 10)):
        for label, (name, colour) in enumerate(COLOURS.items()):
            (root / "files" / split / name).mkdir(parents=True)
            for i in range(count):
                height, width = rng.integers(12, 40, 2)
                noisy = np.array(colour) + rng.normal(0, 40, (height, width, 3))
                picture = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
                picture.save(root / "files" / split / name / f"{i:02}.png")
                x.append(
                    np.asarray(
                        picture.resize((ciphertext_student.SIDE, ciphertext_student.SIDE), Image.Resampling.BILINEAR)
                    )
                )
                y.append(label)
                splits.append(split)
    np.savez(root / "arrays.npz", x=np.stack(x), y=np.array(y), split=np.array(splits), classes=np.array([*COLOURS]))
    ciphertext_student.folder(root)
    return root


def experiment(folder, data, clients=2, **method):
    local = {"learning_rate": 0.2, "epochs": 5, "batch_size": 16}
    keys = {"name": "blindfed", "foundation": str(folder / "tiny-student"), "rounds": 3, "released": "grid"}
    return {
        "data": {"path": str(folder / data), "partition": {"name": "iid", "clients": clients}},
        "method": keys | {"local": local} | method,
        "run": {"seed": 0, "workers": 1},
    }


@pytest.mark.parametrize("protocol", ["masked", "permuted"])
def test_in_the_clear_they_are_resized_as_an_array_s(protocol, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("fedfm.runtime.client_memory.entropy", lambda n: b"k" * n)  # the same orders in both runs
    more = {"encryption": "clear", "protocol": protocol}
    found = fedfm.run(experiment(folder, "files", **more), tmp_path / "files")
    other = fedfm.run(experiment(folder, "arrays.npz", **more), tmp_path / "arrays")
    assert found["params_sha256"] == other["params_sha256"]
    assert found["accuracy"] == other["accuracy"] > 0.9


@pytest.mark.proof
def test_on_ciphertexts_and_all_tokens_released(folder, tmp_path):
    pytest.importorskip("tenseal", reason="the extra [encrypted] is not installed")
    more = {"encryption": "ckks", "released": "tokens", "projection": 6}
    result = fedfm.run(experiment(folder, "files", clients=1, **more), tmp_path / "run")
    assert result["excluded"] == []
    assert 0 < result["details"]["max_error"] < 1e-2  # of the server's own preparation, in the clear
    assert abs(result["accuracy"] - result["details"]["accuracy_clear"]) <= 1 / 12
    assert result["accuracy"] > 0.8
