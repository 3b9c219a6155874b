"""Blocks in order of execution, through stages and both halves of an encoder-decoder; parts that no text passes."""

from dataclasses import replace

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from tiny_models import images, load, save_tokenizer, sentences

from fedfm.core import tasks
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models import encoder_decoder, first_batch
from fedfm.models.adapters import adaptation
from fedfm.models.families import default_targets, find, unwrap
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec
from fedfm.models.stages import in_parallel_lists

TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "pad_token_id": 0,
}
DECODER = {**TEXT, "num_key_value_heads": 2, "max_position_embeddings": 40, "bos_token_id": 4, "eos_token_id": 3}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 32,
    "patch_size": 8,
}
BOTH = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "eos_token_id": 3,
    "decoder_start_token_id": 3,
}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
DEPTHS = {"depths": [1, 2, 3, 1], "hidden_sizes": [8, 8, 16, 16]}
WINDOWS = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "num_heads": [1, 2, 2, 2], "window_size": 2}
PICTURES = {  # configuration -> its keys, blocks
    "Swin": ({**WINDOWS, "depths": [1, 2, 3, 1]}, 7),
    "Swinv2": ({**WINDOWS, "depths": [1, 1, 3, 1]}, 6),
    "ConvNext": (DEPTHS, 7),
    "Pvt": ({**DEPTHS, "image_size": 32, "num_attention_heads": [1, 2, 2, 2]}, 7),
    "PoolFormer": (DEPTHS, 7),
    "Segformer": ({**DEPTHS, "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 8}, 7),
    "RegNet": ({**DEPTHS, "embedding_size": 8, "groups_width": 8}, 7),
    "Cvt": ({"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3]}, 6),
    "Beit": (VISION, 2),
}
TEXTS = {
    "T5": ({**T5, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 3}, 5),
    "Bart": (BOTH, 5),
    "MBart": (BOTH, 5),
    "MobileBert": ({**TEXT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}, 2),
    "Mixtral": ({**DECODER, "num_local_experts": 4}, 2),
    "Jamba": ({**DECODER, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}, 2),
}


def built(name, auto, keys):
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return getattr(t, auto).from_config(getattr(t, f"{name}Config")(**keys)).eval()


def order_of(module, blocks, **given):
    """Paths of these modules in the order in which one forward pass calls them."""
    called = []
    for path, block in blocks:
        block.register_forward_pre_hook(lambda _, __, path=path: called.append(path))
    with torch.no_grad():
        module(**given)
    return called


@pytest.mark.parametrize("name", PICTURES)
def test_blocks_of_picture_classifiers_run_in_their_order(name):
    keys, count = PICTURES[name]
    module = built(name, "AutoModelForImageClassification", keys)
    blocks = find(module, "unknown").blocks
    assert len(blocks) == count
    assert order_of(module, blocks, pixel_values=torch.rand(2, 3, 32, 32)) == [path for path, _ in blocks]


@pytest.mark.parametrize("name", TEXTS)
def test_blocks_of_text_classifiers_run_in_their_order(name):
    keys, count = TEXTS[name]
    module = built(name, "AutoModelForSequenceClassification", keys)
    blocks = find(module, "unknown").blocks
    assert len(blocks) == count
    ids = torch.tensor([[9, 8, 7, 3], [6, 5, 11, 3]])
    assert order_of(module, blocks, input_ids=ids) == [path for path, _ in blocks]


def swin(folder):
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    with quiet():
        built("Swin", "AutoModel", {**WINDOWS, "depths": [1, 1, 3, 1]}).save_pretrained(folder)
        ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def test_top_layers_are_the_last_to_run(tmp_path):
    model = load(swin(tmp_path), images(), AdaptationSpec("top_layers", layers=2))
    trained = {name.partition(".blocks.")[0] for name in model.names if ".blocks." in name}
    assert trained == {"swin.encoder.layers.2", "swin.encoder.layers.3"}
    assert sum(".blocks.2." in n for n in model.names) == len(list(model.parts.blocks[-2][1].parameters()))


def test_checkpointing_reaches_all_stages_and_changes_no_gradient(tmp_path):
    found = []
    for twice in (False, True):
        model = load(swin(tmp_path), images(), "full", gradient_checkpointing=twice)
        model.train_mode()
        calls = []
        for path, block in model.parts.blocks:
            block.layernorm_before.register_forward_hook(lambda *_, calls=calls, path=path: calls.append(path))
        model.loss(model.prepare(images(), range(3)).batch(range(3))).backward()
        assert len(calls) == (2 if twice else 1) * 6
        found.append({n: p.grad for n, p in model.live().items()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_networks_of_pointwise_maps_are_adapted_there():
    module = built("ConvNext", "AutoModelForImageClassification", DEPTHS)
    ends = {name.rpartition(".")[2] for name in default_targets(find(module, "convnext"))}
    assert ends == {"pwconv1", "pwconv2"}


@pytest.fixture
def gemma3(tmp_path):
    keys = {"mm_tokens_per_image": 4, "image_token_index": 60, "boi_token_index": 58, "eoi_token_index": 59}
    text = {**DECODER, "head_dim": 8, "sliding_window": 16}
    with quiet():
        built(
            "Gemma3", "AutoModelForImageTextToText", {"text_config": text, "vision_config": VISION, **keys}
        ).save_pretrained(tmp_path)
        save_tokenizer(tmp_path, "llama")
    return tmp_path


@pytest.mark.parametrize(
    "spec",
    [
        AdaptationSpec("lora", rank=2),
        AdaptationSpec("lora", rank=2, targets=("all-linear",)),
        AdaptationSpec("full"),
        AdaptationSpec("top_layers"),
    ],
    ids=["lora", "all-linear", "full", "top_layers"],
)
def test_of_a_model_of_texts_and_pictures_the_language_part_alone_is_trained(gemma3, spec):
    table = sentences()
    model = load(gemma3, table, spec)
    assert model.parts.unread == ("model.vision_tower", "model.multi_modal_projector")
    assert not [name for name in model.names if "vision" in name or "multi_modal" in name]
    assert any(".language_model." in name for name in model.names)
    assert any("vision_tower" in text for text in model.notices)
    model.loss(model.prepare(table, range(3)).batch(range(3))).backward()
    assert all(p.grad is not None for p in model.live().values())


def test_targets_that_no_text_passes_are_refused(gemma3):
    spec = AdaptationSpec("lora", rank=2, targets=("fc1",))
    with pytest.raises(InputError, match=r"targets.*does not use model\.vision_tower"):
        load(gemma3, sentences(), spec)


@pytest.mark.parametrize("task", ["language_modelling", "instruction", "preference"])
@pytest.mark.parametrize("name", ["T5", "Pegasus", "Marian"])
def test_an_encoder_decoder_is_no_causal_model(name, task):
    with pytest.raises(InputError, match=r"encoder-decoder.*needs a causal model"):
        encoder_decoder.prepare(getattr(t, f"{name}Config")(), "nowhere", "m", tasks.find(task))


def test_the_decoders_first_token_is_read_or_asked_for(tmp_path):
    config = t.T5Config(**T5)
    with pytest.raises(InputError, match="put decoder_start_token_id there"):
        encoder_decoder.prepare(config, tmp_path, "m", tasks.find("classification"))
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 7}')
    encoder_decoder.prepare(config, tmp_path, "m", tasks.find("classification"))
    assert config.decoder_start_token_id == 7


def test_without_known_blocks_last_layers_are_refused():
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    parts = find(module, "plain")
    assert not parts.blocks
    spec = AdaptationSpec("top_layers", layers=1)
    with pytest.raises(InputError, match="the blocks of this architecture are unknown"):
        adaptation.apply(module, spec, parts, new=[], task=tasks.find("classification"), seed=0)


BESIDE = {
    "XLM": {"vocab_size": 64, "emb_dim": 16, "n_layers": 3, "n_heads": 2, "max_position_embeddings": 40},
    "Flaubert": {"vocab_size": 64, "emb_dim": 16, "n_layers": 3, "n_heads": 2},
}


@pytest.fixture(params=BESIDE)
def beside(request, tmp_path):
    """A folder of a model whose blocks are entries of several lists."""
    with quiet():
        module = built(request.param, "AutoModelForSequenceClassification", BESIDE[request.param] | {"pad_index": 0})
        module.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["top_layers", "lora"])
def test_a_block_may_be_one_entry_of_each_of_several_lists(beside, name):
    """What is trained of the last two blocks is what changes the states behind the first, and nothing else does."""
    table = sentences()
    model = load(beside, table, AdaptationSpec(name, rank=2, layers=2))
    rows = model.prepare(table, range(3))
    assert default_targets(model.parts) == ("q_lin", "v_lin")
    assert first_batch.look(model, rows) == []
    base = unwrap(model.module).transformer

    def states():
        with torch.no_grad():
            ids = rows.batch(range(3))["input_ids"]
            return base(ids, attention_mask=ids != 0, output_hidden_states=True).hidden_states

    before, inside = states(), [n for n in model.names if ".transformer." in f".{n}"]
    assert {n.partition(".transformer.")[2].split(".")[1] for n in (f".{name}" for name in inside)} == {"1", "2"}
    model.load(Params({n: t + 0.1 * torch.randn_like(t) for n, t in model.params().items()}))
    same = [torch.equal(a, b) for a, b in zip(before, states(), strict=True)]
    assert same == [True, True, False, False]


def test_blocks_of_several_lists_are_refused_where_they_run_in_another_order(beside):
    table = sentences()
    model = load(beside, table, AdaptationSpec("top_layers"))
    model.parts = replace(model.parts, side_by_side=model.parts.side_by_side[::-1])
    with pytest.raises(InputError, match=r"no gradient reaches block|in another order than"):
        first_batch.look(model, model.prepare(table, range(3)))


def test_lists_that_are_no_blocks_are_none():
    lists = [torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(n)) for n in (2, 2)]
    norms = [torch.nn.ModuleList(torch.nn.LayerNorm(4) for _ in range(n)) for n in (2, 3)]
    assert in_parallel_lists(torch.nn.ModuleDict({"a": lists[0], "b": lists[1]})) == ()  # nothing normalises
    assert in_parallel_lists(torch.nn.ModuleDict({"a": lists[0], "b": norms[1]})) == ()  # of another length
    assert len(in_parallel_lists(torch.nn.ModuleDict({"a": lists[0], "b": lists[1], "c": norms[0]}))) == 2
    assert in_parallel_lists(torch.nn.ModuleDict({"a": lists[0], "c": norms[0], "d": torch.nn.Linear(9, 99)})) == ()


def test_a_wrapper_is_named_where_transformers_changes_the_names(gemma3):
    tensors = load_file(gemma3 / "model.safetensors")
    save_file({f"module.{name}": t for name, t in tensors.items()}, gemma3 / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        InputError, match=r"lacks \d+ of .* more\. Its names are the model's names with the prefix 'module\.'"
    ):
        load(gemma3, sentences(), "lora")
