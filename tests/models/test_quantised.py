"""Quantised bases: what bitsandbytes computes, against the weights that its bits stand for; only LoRA is trained."""

import json
import runpy
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from tiny_models import load, prose, save_tokenizer, sentences, table_for

import fedfm
from fedfm.api.predict import predict
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.models import quantised
from fedfm.models.adapter_files import save_adapter
from fedfm.models.adapter_reading import load_adapter
from fedfm.models.export import export, merge
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec
from fedfm.training import AdamW, loop
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client

bitsandbytes = pytest.mark.skipif(
    not transformers.utils.is_bitsandbytes_available(), reason="bitsandbytes is not installed: the extra [quantized]"
)
WIDER = 4  # hidden width 64, as bits need; the MLP's is 96
WIDEST = 8  # widths 128 and 192
FAMILIES = ("llama", "gpt2", "bert", "roberta", "vit")
NF4 = (  # Appendix E of the paper
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def get(family, wider=WIDER):
        if (family, wider) not in made:
            made[family, wider] = tiny_models.save(family, tmp_path_factory.mktemp(family), wider)
        return made[family, wider]

    return get


def scales_in_8_bits(scale: torch.Tensor) -> torch.Tensor:
    """Double quantisation of at most 256 scales: to the nearest of 256 numbers, above and below their mean. The numbers
    are the middles of 2^i parts of [0.1, 1], times 10^(i - 6), with both signs, and 0 and 1.
    """
    parts = [torch.linspace(0.1, 1, 2**i + 1) for i in range(7)]
    sizes = torch.cat([10.0 ** (i - 6) * (p[:-1] + p[1:]) / 2 for i, p in enumerate(parts)])
    levels = torch.cat([sizes, -sizes, torch.tensor([0.0, 1.0])]).sort().values
    offset = scale.mean()
    most = (scale - offset).abs().max()
    code = (((scale - offset) / most)[:, None] - levels).abs().argmin(1)
    return levels[code] * most + offset


def nearest(weight: torch.Tensor) -> torch.Tensor:
    """The weights that nf4 keeps: in blocks of 64 the nearest level times the largest size, which has 8 bits."""
    levels = torch.tensor(NF4)
    flat = torch.nn.functional.pad(weight.float().reshape(-1), (0, -weight.numel() % 64)).view(-1, 64)
    scale = flat.abs().amax(1)
    code = ((flat / scale[:, None])[..., None] - levels).abs().argmin(-1)
    return (levels[code] * scales_in_8_bits(scale)[:, None]).reshape(-1)[: weight.numel()].view(weight.shape)


def rows_of(model, table):
    return model.prepare(table, range(4))


def trained(model, table, **local):
    rows = rows_of(model, table)
    client = Client("a", ClientData(lambda: rows, Rows, Rows), model, {}, 5, trainer=train_client)
    (w,) = loop.train([Job(client, model.params(), AdamW(learning_rate=0.01, batch_size=4, **local))])
    return w, client.metrics["loss"]


@bitsandbytes
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_the_weights_that_the_bits_stand_for(folder, family):
    """An unquantised model whose maps get the levels of nf4, rounded in this test, computes the same."""
    table = table_for(family)
    model = load(folder(family), table, "lora", quantization="nf4")
    found = dict(quantised.maps(model.module))
    assert len(found) >= 12
    assert all(linear.in_features % 64 == 0 for linear in found.values())  # the others are as they were
    assert not any("classifier" in path or "score" in path for path in found)
    by_hand = load(folder(family), table, "lora")
    with torch.no_grad():
        for path, linear in found.items():
            plain = by_hand.module.get_submodule(path)
            plain.weight.copy_(nearest(plain.weight.T).T if type(plain).__name__ == "Conv1D" else nearest(plain.weight))
            mine = plain.weight.T if type(plain).__name__ == "Conv1D" else plain.weight
            apart = (quantised.weight_of(linear) - mine).abs() / mine.abs().max()
            assert apart.max() < 0.01  # of a scale between two numbers it may take the other one
            assert (apart < 1e-5).float().mean() > 0.9
    rows = rows_of(model, table)
    rounding = model.predict(rows) - load(folder(family), table, "lora").predict(rows)
    assert (model.predict(rows) - by_hand.predict(rows)).norm() < 0.05 * rounding.norm()


@pytest.mark.each_value
@bitsandbytes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_fingerprint_head_and_adapter_are_those_of_the_unquantised_load(folder, family, dtype, kind):
    table = table_for(family)
    plain, model = (load(folder(family), table, "lora", dtype=dtype, quantization=q) for q in (None, kind))
    assert model.fingerprint == plain.fingerprint
    if (kind, dtype) != ("int8", "bfloat16"):  # PEFT rounds A to the dtype of a base that has one
        assert model.params().sha256() == plain.params().sha256()


@pytest.mark.each_value
@bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_trains_and_is_all_that_is_sent(folder, kind, checkpointing):
    table = sentences()
    model = load(folder("llama"), table, "lora", quantization=kind, gradient_checkpointing=checkpointing)
    bits = {name: p.detach().clone() for name, p in model.module.named_parameters() if not p.requires_grad}
    first, begun = trained(model, table, epochs=1)
    last, ended = trained(model, table, epochs=30)
    assert ended < 0.9 * begun
    assert set(last) == {n for n in last if "lora_" in n or "score" in n}
    assert {t.dtype for t in last.values()} == {torch.float32}
    assert all(p.equal(bits[name]) for name, p in model.module.named_parameters() if name in bits)
    assert first.sha256() != last.sha256()


@bitsandbytes
def test_gradients_are_those_of_the_dequantised_model(folder):
    table = sentences()
    model = load(folder("llama"), table, "lora", quantization="nf4")
    w, _ = trained(model, table, epochs=2)
    model.load(w)
    plain = load(folder("llama"), table, "lora")
    with torch.no_grad():
        for path, linear in quantised.maps(model.module):
            plain.module.get_submodule(path).weight.copy_(quantised.weight_of(linear))
    plain.load(w)
    batch = rows_of(model, table).batch(range(4))
    for m in (model, plain):
        m.loss(batch).backward()
    for name, p in plain.live().items():
        torch.testing.assert_close(model.live()[name].grad, p.grad, atol=1e-5, rtol=1e-3)


@bitsandbytes
@pytest.mark.parametrize(("family", "kind"), [("llama", "nf4"), ("gpt2", "nf4"), ("bert", "int8")])
def test_an_export_is_the_dequantised_model_with_the_adapter_merged(folder, family, kind, tmp_path):
    table = table_for(family)
    model = load(folder(family), table, "lora", quantization=kind)
    w, _ = trained(model, table, epochs=3)
    model.load(w)
    export(model, w, "hf", tmp_path / "hf")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    with quiet():
        again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    batch = rows_of(model, table).batch(range(4))
    with torch.no_grad():
        logits = again(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits
    atol = 1e-5 if kind == "nf4" else 0.02  # int8 also rounds what goes into a map
    torch.testing.assert_close(logits, model.logits(batch).detach(), atol=atol, rtol=1e-3)
    assert quantised.kind_of(model.module) == kind  # the model itself is as it was
    assert not any(n.endswith("absmax") for n in merge(model, w).state_dict())


@bitsandbytes
def test_an_adapter_is_pefts_and_fits_the_quantised_base(folder, tmp_path):
    from peft import PeftModel

    table = prose()
    model = load(folder("llama", WIDEST), table, "lora", quantization="nf4")
    w, _ = trained(model, table, epochs=3)
    model.load(w)
    save_adapter(model, w, tmp_path / "adapter")
    assert load_adapter(model, tmp_path / "adapter").sha256() == w.sha256()
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    with quiet():
        base = transformers.AutoModelForCausalLM.from_pretrained(
            folder("llama", WIDEST), quantization_config=bits, device_map={"": "cpu"}, dtype=torch.float32
        )
        peft = PeftModel.from_pretrained(base, tmp_path / "adapter")
        quantised.keep_format(peft)  # else bitsandbytes rounds the scales again on some processors
    ids = rows_of(model, table).batch(range(1))["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(peft(input_ids=ids).logits, model.module(input_ids=ids).logits, atol=1e-5, rtol=1e-4)


@bitsandbytes
def test_a_quantised_folder_loads_as_it_is(folder, tmp_path):
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float16"
    )
    with quiet():
        stored = transformers.AutoModelForCausalLM.from_pretrained(
            folder("llama", WIDEST), quantization_config=bits, device_map={"": "cpu"}, dtype=torch.float32
        )
        stored.save_pretrained(tmp_path / "q")
    save_tokenizer(tmp_path / "q", "llama")
    table = sentences()
    model = load(tmp_path / "q", table, "lora")
    same = load(folder("llama", WIDEST), table, "lora", quantization="nf4")
    rows = rows_of(model, table)
    torch.testing.assert_close(model.predict(rows), same.predict(rows), atol=1e-6, rtol=1e-5)
    assert model.fingerprint == load(tmp_path / "q", table, "lora", quantization="nf4").fingerprint
    assert model.fingerprint != same.fingerprint  # other files
    assert {m.compute_dtype for _, m in quantised.maps(model.module)} == {torch.float32}
    with pytest.raises(InputError, match="is already quantised, as nf4; drop it"):
        load(tmp_path / "q", table, "lora", quantization="int8")
    with quiet():
        odd = transformers.AutoModelForCausalLM.from_pretrained(
            folder("llama"), quantization_config=bits, device_map={"": "cpu"}, dtype=torch.float32
        )
        odd.save_pretrained(tmp_path / "odd")
    save_tokenizer(tmp_path / "odd", "llama")
    for named in ({}, {"quantization": "nf4"}):  # naming it must not have the odd maps drawn anew as whole weights
        with pytest.raises(InputError, match="inputs in 4 bits, and on a CPU"):
            load(tmp_path / "odd", table, "lora", **named)
    with pytest.raises(InputError, match=r'adaptation "full" trains weights .* expected "lora"'):
        load(tmp_path / "q", table, "full")


@bitsandbytes
def test_adaptations_that_train_rounded_weights_are_refused(folder):
    for adaptation in ("full", "top_layers"):
        with pytest.raises(InputError, match=f'adaptation "{adaptation}" trains weights that are rounded'):
            load(folder("llama"), sentences(), adaptation, quantization="nf4")
    with pytest.raises(InputError, match=r'expected model\.weights = "pretrained"'):
        load(folder("llama"), sentences(), "lora", quantization="nf4", weights="random")
    head = load(folder("llama"), sentences(), "head", quantization="nf4")
    assert head.names == ("score.weight",)


@bitsandbytes
def test_a_base_in_four_bits_takes_an_eighth_of_float32(tmp_path):
    shape = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    config = transformers.LlamaConfig(**shape, vocab_size=64, pad_token_id=0, bos_token_id=4, eos_token_id=3)
    with quiet():
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, "llama")

    def base_bytes(**spec):
        model = load(tmp_path, prose(), "lora", **spec)
        layers = model.module.get_base_model().model.layers
        return quantised.nbytes(layers) - 4 * sum(p.numel() for n, p in layers.named_parameters() if "lora_" in n)

    sizes = {q: base_bytes(quantization=q) for q in (None, "int8", "nf4")}
    assert sizes["nf4"] < 0.135 * sizes[None]
    assert sizes["int8"] < 0.26 * sizes[None]


@bitsandbytes
def test_the_table_of_memory_counts_what_is_there(folder):
    """benchmarks/large_model_memory.py against bytes of a loaded model, and against what autograd keeps of a block."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "large_model_memory.py"))
    table, rows, length = prose(), 2, 24
    spec = AdaptationSpec("lora", rank=2, targets=("all-linear",))
    model = load(folder("llama", WIDEST), table, spec, quantization="nf4", dtype="bfloat16")
    base = model.module.get_base_model()
    told = script["plan"](base.config, spec, quantization="nf4", dtype="bfloat16", rows=rows, length=length)
    maps = sum(quantised.nbytes(linear) for _, linear in quantised.maps(model.module))
    assert told["linear maps of the blocks, nf4"] == maps
    assert told["LoRA, float32"] == sum(t.nbytes for t in model.params().values())
    kept = []
    x = torch.zeros(rows, length, base.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    places = torch.arange(length)[None]
    block = model.parts.blocks[0][1]
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        out = block(x, position_embeddings=base.model.rotary_emb(x, places), position_ids=places)
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    measured = sum(size for at, size in sizes.items() if at not in own)
    assert out.requires_grad
    assert told["what one block keeps while it is computed again"] == pytest.approx(measured, rel=0.05)


@pytest.mark.proof
@bitsandbytes
def test_a_run_with_a_quantised_base_resumes_predicts_and_exports(folder, tmp_path):
    lines = [json.dumps({"text": t, "label": "ab"[i % 2]}) for i, t in enumerate(sentences(24).inputs)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    tables = {
        "data": {"path": str(tmp_path / "rows.jsonl"), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(folder("llama")), "quantization": "nf4", "adaptation": {"name": "lora", "rank": 2}},
        "method": {"name": "fedavg", "rounds": 2, "local": {"name": "adamw", "learning_rate": 0.01}},
        "run": {"workers": 1},
    }
    whole = fedfm.run(tables, tmp_path / "whole")
    wired = fedfm.run(tables | {"run": {"workers": 2, "wire": True}}, tmp_path / "wired")
    assert whole["params_sha256"] == wired["params_sha256"]
    assert len(predict(tmp_path / "whole", tmp_path / "rows.jsonl")["predictions"]) == 24

    class Kill(fedfm.Progress):
        def round(self, line):
            if line["round"] == 1:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fedfm.run(tables, tmp_path / "cut", progress=Kill())
    assert len(fedfm.load_run(tmp_path / "cut").metrics()) == 2
    assert fedfm.resume(tmp_path / "cut")["params_sha256"] == whole["params_sha256"]


def test_without_bitsandbytes_one_line_names_the_extra(folder, monkeypatch):
    monkeypatch.setattr(transformers.utils, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(InputError, match=r'model\.quantization = "nf4" needs bitsandbytes .*fedfm\[quantized\]'):
        load(folder("llama"), sentences(), "lora", quantization="nf4")
