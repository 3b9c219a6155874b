"""Mixtures of experts and state-space models: what all-linear adapts, the products by expert, files that PEFT loads."""

import copy
import json
import re
import shutil
import weakref

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import prose

from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods import fedex_lora, flexlora
from fedfm.methods._lora_products import Term, add, as_factors, average, delta_w
from fedfm.methods.flora import fresh
from fedfm.models import multiply_accumulates, quantised
from fedfm.models.adapter_files import save_adapter
from fedfm.models.adapter_reading import load_adapter
from fedfm.models.adapters import lora
from fedfm.models.export import export
from fedfm.models.load import load_model
from fedfm.models.quantised_experts import Bits, _Again
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec

_SIZES = {
    **{"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 4},
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24}
_SHARED = {"n_shared_experts": 1, "first_k_dense_replace": 1}
_FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
_STATE = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
FAMILIES = {
    "Mixtral": _FEW,
    "DeepseekV3": {"num_key_value_heads": 4, **_LATENT, **_GROUPS, **_SHARED},
    "Glm4Moe": {**_GROUPS, **_SHARED, "n_group": 1, "head_dim": 8},
    "GptOss": {**_FEW, "head_dim": 8},  # keeps its matrices transposed
    "JetMoe": {**_FEW, "kv_channels": 8},
    "Phimoe": _FEW,  # its router returns two tensors
    "Jamba": {**_STATE, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "Mamba": {"state_size": 4, "time_step_rank": 4},
}
MIXTURES = tuple(name for name in FAMILIES if name != "Mamba")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            sizes = {} if family == "Mamba" else _SIZES
            config = getattr(transformers, f"{family}Config")(
                **{"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2} | sizes | FAMILIES[family]
            )
            with quiet(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                module = transformers.AutoModelForCausalLM.from_config(config)
                for p in module.parameters():
                    if p.dim() > 1:
                        p.data.normal_(std=0.2)
                module.save_pretrained(made[family])
            tiny_models.save_tokenizer(made[family], "llama")
        return made[family]

    return get


def load(path, targets=("all-linear",), model=None, **adaptation):
    spec = AdaptationSpec("lora", rank=2, targets=targets, **adaptation)
    return load_model(ModelSpec(str(path), max_length=16, adaptation=spec, **model or {}), classes=(), kind="passages")


def drawn(model, seed=0, rank=2):
    """Factors of which none is zero."""
    g = torch.Generator().manual_seed(seed)
    shapes = lora.layout_at(model.layout, rank).slots
    return Params({n: 0.3 * torch.randn(slot[3], generator=g) for n, slot in shapes.items()})


def outputs(module):
    x = torch.arange(4, 16)[None].repeat(2, 1)
    with torch.no_grad():
        return module.eval()(input_ids=x, attention_mask=torch.ones_like(x)).logits


def plain(path):
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(path)


def dense(module):
    """Path of each adapted parameter of a merged model -> its numbers."""
    return {n: p.detach().double().numpy() for n, p in module.named_parameters()}


def change(model, w):
    """Path of each parameter -> what an adapter adds to it, as PEFT itself merges it."""
    before = dense(plain(model.spec.name))
    model.load(w)
    with quiet():
        after = dense(copy.deepcopy(model.module).merge_and_unload())
    return {name: after[name] - before[name] for name in before}


@pytest.mark.sample("Mixtral", "Jamba", "Mamba")
@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_adapts_each_matrix_or_names_it(folder, family):
    model = load(folder(family))
    added = {name for name, delta in change(model, drawn(model)).items() if np.abs(delta).max() > 1e-4}
    names = {n for n, p in plain(folder(family)).named_parameters() if p.dim() in (2, 3) and "bias" not in n}
    aside = re.compile(r"embed|lm_head|conv1d|A_log|\.gate\.weight|router\.weight")
    left = {n for n in names - added if not aside.search(n)}
    text = " ".join(model.notices)
    assert all(re.search(rf"\b{n.removesuffix('.weight').rpartition('.')[2]} \(", text) for n in left), left
    assert "experts" not in text
    assert bool(text) == (family in ("Jamba", "Mamba", "Phimoe"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_adapted_tensor_has_a_gradient(folder, family):
    model = load(folder(family))
    model.load(drawn(model))
    rows = model.prepare(prose(), range(4))
    batch = rows.batch(range(len(rows)))
    model.loss(batch).backward()
    assert not [name for name, p in model.live().items() if p.grad is None or not p.grad.any()]


@pytest.mark.sample("DeepseekV3", "GptOss", "Mamba")
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_peft_and_transformers_load_what_is_exported(folder, tmp_path, family):
    model = load(folder(family))
    w = drawn(model)
    model.load(w)
    expected = outputs(model.module)
    export(model, w, "peft", tmp_path / "peft")
    export(model, w, "hf", tmp_path / "hf")
    assert load_adapter(model, tmp_path / "peft").sha256() == w.sha256()
    with quiet():
        again = PeftModel.from_pretrained(plain(folder(family)), tmp_path / "peft")
    assert (outputs(plain(folder(family))) - expected).abs().max() > 0.1
    torch.testing.assert_close(outputs(again), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(outputs(plain(tmp_path / "hf")), expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gate_proj", "down_proj", "gate_up_proj"])
def test_a_name_is_what_it_names(folder, tmp_path, name):
    """PEFT takes gate_proj for a part of the experts' gate_up_proj, and refuses it without up_proj."""
    model = load(folder("DeepseekV3"), (name,))
    w = drawn(model)
    found = {n for n, delta in change(model, w).items() if np.abs(delta).max() > 1e-4}
    names = [n for n, _ in plain(folder("DeepseekV3")).named_parameters()]
    assert found == {n for n in names if n.removesuffix(".weight").endswith(f".{name}")}
    expected = outputs(model.module)
    export(model, w, "peft", tmp_path)
    with quiet():
        again = PeftModel.from_pretrained(plain(folder("DeepseekV3")), tmp_path)
    torch.testing.assert_close(outputs(again), expected, atol=2e-5, rtol=1e-4)


# --- products ---------------------------------------------------------------------------------------------------------


def weighted(model, terms):
    """sum_k p_k Delta W_k, each as PEFT merges it."""
    changes = [(term.p, change(model, term.w)) for term in terms]
    return {name: sum(p * delta[name] for p, delta in changes) for name in changes[0][1]}


@pytest.mark.sample("Mixtral", "GptOss")
@pytest.mark.parametrize("family", ["Mixtral", "GptOss", "DeepseekV3"])
def test_the_products_of_experts_are_added_exactly(folder, tmp_path, family):
    model = load(folder(family))
    found = [Term(p, drawn(model, seed)) for seed, p in enumerate((0.2, 0.5, 0.3))]
    alpha = lora.alpha_of(model)
    exact = weighted(model, found)
    stack = add(Params({}), delta_w(found, alpha))
    mean = Params(average(found, list(model.names)))
    rest = add(Params({}), fedex_lora.residual(found, mean, alpha))
    for w, shift in ((fresh(model.layout, Params({}), 2, 7), stack), (mean, rest)):
        one = lora.merge(w, as_factors(shift), alpha)
        save_adapter(model, one, tmp_path / str(len(shift)))
        with quiet():
            whole = PeftModel.from_pretrained(plain(folder(family)), tmp_path / str(len(shift)))
            base, after = (dense(m) for m in (plain(folder(family)), whole.merge_and_unload()))
        for name, delta in exact.items():
            np.testing.assert_allclose(after[name] - base[name], delta, atol=2e-5)
        model.load(w)
        with lora.shift_weights(model, as_factors(shift)):
            torch.testing.assert_close(outputs(model.module), outputs(whole), atol=1e-4, rtol=1e-3)


def test_the_cut_of_experts_is_the_best_of_its_rank(folder):
    model = load(folder("Mixtral"))
    found = [Term(0.5, drawn(model, seed)) for seed in (1, 2)]
    exact = weighted(model, found)
    tensors, _ = flexlora.cut(delta_w(found, lora.alpha_of(model)), model.params(), lora.alpha_of(model))
    got = change(model, model.params().replace(tensors))
    for name in (n for n in exact if "experts" in n):
        u, s, v = np.linalg.svd(exact[name])
        np.testing.assert_allclose(got[name], (u[..., :2] * s[:, None, :2]) @ v[:, :2], atol=1e-5)


def test_ranks_of_experts_are_cut_and_grown_by_expert(folder):
    model = load(folder("GptOss"))
    wide = lora.widen(drawn(model, rank=1), model.layout)
    assert lora.rank_of(wide) == 2
    narrow = lora.first(wide, 1)
    assert narrow.layout == lora.layout_at(model.layout, 1)
    np.testing.assert_equal(lora.pad_rank(narrow, model.layout).layout.slots, model.layout.slots)
    before, after = (lora.factors(w, 4.0) for w in (narrow, wide))
    for path, (u, v) in before.items():
        torch.testing.assert_close(u @ v, after[path][0] @ after[path][1])
    small, large = (fresh(lora.layout_at(model.layout, r), Params({}), r, 3) for r in (1, 2))
    for a, _ in lora.pairs(small).values():
        assert torch.equal(small[a], large[a][..., :1, :])


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("Mixtral", {"dropout": 0.1}, "dropout: PEFT does not support dropout for experts"),
        ("Mixtral", {"dora": True}, "dora: PEFT does not support dora for experts"),
        ("Mamba", {"targets": ("out_proj",)}, "PEFT does not adapt backbone.layers.0.mixer.out_proj"),
        ("Mamba", {"targets": ("dt_proj",)}, "MambaMixer reads the weight of backbone.layers.0.mixer.dt_proj"),
        ("Phimoe", {"targets": ("router",)}, "is of type PhimoeTopKRouter"),
    ],
)
def test_modules_that_peft_cannot_adapt_are_refused(folder, family, keys, words):
    with pytest.raises(InputError, match=words):
        load(folder(family), **keys)


def test_experts_are_left_out_by_their_own_name_or_the_modules(folder):
    for name in ("experts", "gate_up_proj"):
        model = load(folder("Mixtral"), exclude_modules=(name,))
        kept = {path for path in lora.matrices(model.params()) if "experts" in path}
        assert bool(kept) == (name == "gate_up_proj")


def test_the_products_of_the_chosen_experts_count(folder):
    """Four attention maps, attention, the router, two experts of three maps for each token, and the head."""
    model = load(folder("Mixtral"), ("q_proj",))
    rows = model.prepare(prose(), range(4))
    rows = rows.take([int(rows.tokens.length.argmax())])
    tokens, d, inner = int(rows.tokens.length[0]), 32, 48
    block = tokens * (2 * d * d + 2 * d * d // 2 + 4 * d + 2 * 3 * d * inner + 2 * (d + d)) + 2 * tokens * tokens * d
    assert multiply_accumulates.per_sample(model, rows).training == 2 * block + tokens * d * 40


# --- in 4 bits --------------------------------------------------------------------------------------------------------

bitsandbytes = pytest.mark.skipif(
    not transformers.utils.is_bitsandbytes_available(), reason="bitsandbytes is not installed: the extra [quantized]"
)
NF4 = {"quantization": "nf4"}
BITS = ("Mixtral", "GptOss", "JetMoe")


def loss_of(model):
    rows = model.prepare(prose(), range(4))
    return model.loss(rows.batch(range(len(rows))))


def as_bits(plain_model, path):
    """Give an unquantised model the numbers of the quantised one."""
    twin = load(path, model=NF4)
    quantised.make_plain(twin.module, torch.float32)
    with torch.no_grad():
        for name, p in twin.module.named_parameters():
            plain_model.module.get_parameter(name).copy_(p)


@pytest.mark.each_value
@bitsandbytes
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", BITS)
def test_experts_in_bits_compute_and_learn_like_their_numbers(folder, family, checkpointing):
    keys = NF4 | {"gradient_checkpointing": checkpointing}
    model, twin = load(folder(family), model=keys), load(folder(family))
    assert model.names == twin.names
    assert model.fingerprint == twin.fingerprint
    numbers = sum(p.numel() for n, p in twin.module.named_parameters() if p.dim() == 3 and "lora" not in n)
    assert sum(m.packed.numel() for m in model.module.modules() if isinstance(m, Bits)) == numbers / 2
    assert not [n for n, p in model.module.named_parameters() if p.dim() == 3 and "lora" not in n]
    exact = {n: p.detach().clone() for n, p in twin.module.named_parameters()}
    as_bits(twin, folder(family))
    experts = [n for n in exact if exact[n].dim() == 3 and "lora" not in n]
    apart = [(twin.module.get_parameter(n) - exact[n]).abs().max() / exact[n].abs().max() for n in experts]
    assert min(apart) > 0.01
    assert max(apart) < 0.2
    w = drawn(model)
    for m in (model, twin):
        m.load(w)
        m.train_mode()
    one, two = loss_of(model), loss_of(twin)
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    one.backward()
    two.backward()
    for name, p in twin.live().items():
        torch.testing.assert_close(model.live()[name].grad, p.grad, atol=1e-5, rtol=1e-4)


@bitsandbytes
def test_between_forward_and_backward_memory_holds_the_bits_alone(folder, monkeypatch):
    made = []

    def numbers(self, whole=_Again.numbers):
        out = whole(self)
        made.append(weakref.ref(out))
        return out

    monkeypatch.setattr(_Again, "numbers", numbers)
    model = load(folder("Mixtral"), model=NF4)
    loss = loss_of(model)
    assert len(made) == 4
    assert not [ref for ref in made if ref() is not None]
    loss.backward()
    assert len(made) == 8  # once more for the gradients
    assert len([ref for ref in made if ref() is not None]) <= 1


@bitsandbytes
@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3"])
def test_a_quantised_run_exports_the_model_that_it_scored(folder, tmp_path, family):
    model = load(folder(family), model=NF4)
    w = drawn(model)
    model.load(w)
    expected = outputs(model.module)
    export(model, w, "hf", tmp_path / "hf")
    torch.testing.assert_close(outputs(plain(tmp_path / "hf")), expected, atol=1e-4, rtol=1e-3)
    save_adapter(model, w, tmp_path / "peft")
    unquantised = load(folder(family))
    unquantised.load(w)
    with quiet():
        again = PeftModel.from_pretrained(plain(folder(family)), tmp_path / "peft")
    torch.testing.assert_close(outputs(again), outputs(unquantised.module), atol=2e-5, rtol=1e-4)


@bitsandbytes
def test_a_shift_acts_on_experts_in_bits(folder):
    model, twin = load(folder("Mixtral"), model=NF4), load(folder("Mixtral"))
    as_bits(twin, folder("Mixtral"))
    shift = lora.factors(drawn(model, 5), 4.0)
    for m in (model, twin):
        m.load(drawn(m))
    with lora.shift_weights(model, shift), lora.shift_weights(twin, shift):
        torch.testing.assert_close(outputs(model.module), outputs(twin.module), atol=1e-4, rtol=1e-3)


@bitsandbytes
def test_parameters_that_stay_in_floating_point_are_reported(folder):
    (line,) = load(folder("Mixtral"), model={"quantization": "int8"}).notices
    assert re.search(
        r"gate_up_proj, down_proj, .* keep floating point: \d\d % of the parameters, 0.\d of 0.\d MiB", line
    )


@pytest.mark.sample("Mixtral", "GptOss", "Jamba")
@pytest.mark.parametrize("family", MIXTURES)
def test_keys_that_experts_do_not_support_name_modules_to_exclude(folder, family):
    """The keys that a message names work as they are: where PEFT cannot adapt experts, and where a method cannot."""

    def cured(error):
        return json.loads(re.search(r"set exclude_modules = (\[.*\])", str(error))[1])

    for keys in ({"dropout": 0.1}, {"dora": True}):
        with pytest.raises(InputError, match=r"PEFT does not support \w+ for experts") as refused:
            load(folder(family), **keys)
        assert load(folder(family), exclude_modules=tuple(cured(refused.value)), **keys).names
    with pytest.raises(InputError, match=r"is not a linear map, and the method adapts only linear maps") as refused:
        lora.need(load(folder(family)))
    lora.need(load(folder(family), exclude_modules=tuple(cured(refused.value))))


@bitsandbytes
def test_experts_in_one_matrix_are_reported_as_left_out(tmp_path):
    """DBRX holds all its experts in matrices of two axes, which neither PEFT nor bitsandbytes takes apart."""
    experts = {"ffn_hidden_size": 64, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}
    heads = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}
    config = transformers.DbrxConfig(
        **{"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 40, "pad_token_id": 0},
        **{"attn_config": heads, "ffn_config": experts, "tie_word_embeddings": False},
    )
    with quiet():
        transformers.DbrxForCausalLM(config).save_pretrained(tmp_path)
    tiny_models.save_tokenizer(tmp_path, "llama")
    model = load(tmp_path, model=NF4)
    left, floats = model.notices
    assert re.search(
        r'"all-linear" leaves out (\w\w \(2\d % of the parameters\)( and )?){3}, which are not linear maps', left
    )
    assert re.search(r"(\w\w, ){2}\w\w keep floating point: 7\d % of the parameters", floats)
    rows = model.prepare(prose(), range(4))
    model.loss(rows.batch(range(len(rows)))).backward()
    assert not [name for name, p in model.live().items() if p.grad is None]


@pytest.mark.parametrize("family", ["Mixtral", "DeepseekV3"])
def test_a_missing_or_odd_expert_is_reported_under_the_joined_parameter(folder, family, tmp_path):
    """In files each expert has maps of its own, of which transformers makes one parameter."""
    shutil.copytree(folder(family), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in sorted(tensors) if ".experts.1." in n][:3]:
        made = name.partition(".experts.")[0].replace(".block_sparse_moe", ".mlp") + ".experts."
        gone = {n: t for n, t in tensors.items() if n != name}
        for changed in (gone, tensors | {name: torch.zeros(5, 3)}):
            save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
            with pytest.raises(InputError, match=r"shape that differs|would be made") as refused:
                load(tmp_path)
            assert made in str(refused.value)
