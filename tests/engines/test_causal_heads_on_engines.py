"""A head that gets a bias, at sites of their own: the local engine's bits."""

import pytest

import tiny_text
from processes import fedfm, here, same

TOML = """
[data]
path = "{place}/rows.jsonl"
partition = {{ name = "iid", clients = 3 }}

[model]
name = "{place}/llama"
adaptation = {{ name = "head" }}

[method]
name = "fedpft"
components = 2

[run]
seed = 3
"""


@pytest.mark.release
@pytest.mark.parametrize("engine", ["simulation", "deployment"])
def test_fedpft_on_a_llama_has_the_same_bits_and_bytes_as_local(tmp_path, engine):
    tiny_text.save_llama(tmp_path / "llama")
    tiny_text.texts(tmp_path / "rows.jsonl")
    exp = tmp_path / "exp.toml"
    exp.write_text(TOML.format(place=tmp_path))
    same(fedfm("run", exp, "--out", tmp_path / "there", "--engine", engine), here("run", exp, "--out", tmp_path / "l"))
