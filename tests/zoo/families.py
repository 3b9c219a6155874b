"""The families of the zoo: of each a configuration of transformers with tiny sizes, and what its rows are made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCABULARY = 66
SIDE = 32  # pixels

ENCODER, DECODER, BOTH, PICTURES, PAIR, WITH_PICTURES = (
    "encoder",
    "decoder",
    "encoder-decoder",
    "vision",
    "two encoders",
    "language model that sees",
)


@dataclass(frozen=True)
class Family:
    """A tiny model of one family.

    Attributes:
        kind: what it reads and writes.
        config: the name of its class of configuration in transformers.
        sizes: what the configuration is given.
        auto: the auto class of transformers that makes the model whose weights are the checkpoint.
        text, picture: the sizes of the parts of a configuration that is made of parts.
        whole: whether texts are padded to the full length and read without a mask, as SigLIP was trained.
    """

    kind: str
    config: str
    sizes: dict[str, Any]
    auto: str
    text: dict[str, Any] | None = None
    picture: dict[str, Any] | None = None
    whole: bool = False


_ENDS = {"bos_token_id": 4, "eos_token_id": 5}


def _text(**sizes: Any) -> dict[str, Any]:
    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "pad_token_id": 0,
    }
    return usual | sizes


def _causal(**sizes: Any) -> dict[str, Any]:
    return (
        _text(bos_token_id=4, eos_token_id=5, max_position_embeddings=128, num_key_value_heads=2, head_dim=16) | sizes
    )


def _vision(**sizes: Any) -> dict[str, Any]:
    usual = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return usual | {"image_size": SIDE, "patch_size": 8} | sizes


def _halves(**sizes: Any) -> dict[str, Any]:
    """The sizes of an encoder-decoder in BART's names."""
    layers = {f"{half}_{name}": n for half in ("encoder", "decoder") for name, n in _HALF.items()}
    special = {"pad_token_id": 0, "bos_token_id": 4, "eos_token_id": 5, "decoder_start_token_id": 5}
    return {"vocab_size": VOCABULARY, "d_model": 64, "max_position_embeddings": 64} | layers | special | sizes


_HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"head_dim": 4, "num_key_value_heads": 4},
}
_T5 = {"d_model": 64, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
_T5 |= {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 5, "decoder_start_token_id": 0}
_PLACES = {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
_XLM = {**_PLACES, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "pad_index": 0}
_MAMBA = {"mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_PYRAMID = {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
_HEADS = {"num_attention_heads": [1, 2, 2, 4]}
_SWIN = {"image_size": SIDE, "patch_size": 2, "embed_dim": 8, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 2]}
_SWIN |= {"window_size": 2}
_QWEN = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64, "patch_size": 8}
_PLACEHOLDERS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def _encoder(config: str, auto: str = "MaskedLM", **sizes: Any) -> Family:
    return Family(ENCODER, config, _text(max_position_embeddings=64) | sizes, auto)


def _decoder(config: str, **sizes: Any) -> Family:
    return Family(DECODER, config, _causal() | sizes, "CausalLM")


def _gpt(config: str, **sizes: Any) -> Family:
    """A decoder in GPT-2's names."""
    usual = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return Family(DECODER, config, usual | sizes, "CausalLM")


def _pictures(config: str, auto: str = "ImageClassification", /, **sizes: Any) -> Family:
    return Family(PICTURES, config, sizes, auto)


def _pair(config: str, text: dict[str, Any], picture: dict[str, Any], *, whole: bool = False, **sizes: Any) -> Family:
    return Family(PAIR, config, sizes, "", text, picture, whole)


def _sees(config: str, text: dict[str, Any], picture: dict[str, Any], **sizes: Any) -> Family:
    return Family(WITH_PICTURES, config, sizes, "ImageTextToText", text, picture)


FAMILIES: dict[str, Family] = {
    # encoders of text
    "albert": _encoder("AlbertConfig", embedding_size=16),
    "bert": _encoder("BertConfig"),
    "big_bird": _encoder("BigBirdConfig"),
    "camembert": _encoder("CamembertConfig"),
    "convbert": _encoder("ConvBertConfig", embedding_size=64, head_ratio=2, conv_kernel_size=3),
    "data2vec-text": _encoder("Data2VecTextConfig"),
    "deberta": _encoder(
        "DebertaConfig", relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8
    ),
    "deberta-v2": _encoder(
        "DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, share_att_key=True
    ),
    "distilbert": Family(
        ENCODER,
        "DistilBertConfig",
        {**_PLACES, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
        "MaskedLM",
    ),
    "electra": _encoder("ElectraConfig", embedding_size=16),
    "ernie": _encoder("ErnieConfig"),
    "esm": _encoder("EsmConfig", mask_token_id=1, position_embedding_type="rotary"),
    "eurobert": Family(ENCODER, "EuroBertConfig", _causal(mask_token_id=1), "MaskedLM"),
    "flaubert": Family(ENCODER, "FlaubertConfig", _XLM, "MaskedLM"),
    "fnet": _encoder("FNetConfig"),
    "funnel": Family(
        ENCODER,
        "FunnelConfig",
        {
            **{"vocab_size": VOCABULARY, "block_sizes": [1, 1], "num_decoder_layers": 1},
            **{"d_model": 64, "n_head": 4, "d_head": 8, "d_inner": 64},
        },
        "MaskedLM",
    ),
    "ibert": _encoder("IBertConfig"),
    "jina_embeddings_v3": _encoder("JinaEmbeddingsV3Config", num_key_value_heads=4),
    "longformer": _encoder("LongformerConfig", attention_window=8),
    "luke": _encoder("LukeConfig", entity_vocab_size=8, entity_emb_size=8),
    "megatron-bert": _encoder("MegatronBertConfig"),
    "mobilebert": _encoder("MobileBertConfig", embedding_size=16, intra_bottleneck_size=16),
    "modernbert": Family(
        ENCODER,
        "ModernBertConfig",
        _text(max_position_embeddings=64, bos_token_id=4, eos_token_id=5, cls_token_id=2, sep_token_id=3),
        "MaskedLM",
    ),
    "mpnet": _encoder("MPNetConfig"),
    "nomic_bert": _encoder("NomicBertConfig"),
    "rembert": _encoder("RemBertConfig", input_embedding_size=16, output_embedding_size=64),
    "roberta": _encoder("RobertaConfig"),
    "roberta-prelayernorm": _encoder("RobertaPreLayerNormConfig"),
    "roformer": _encoder("RoFormerConfig", embedding_size=64),
    "squeezebert": _encoder("SqueezeBertConfig", embedding_size=64),
    "xlm": Family(ENCODER, "XLMConfig", _XLM, "MaskedLM"),
    "xlm-roberta": _encoder("XLMRobertaConfig"),
    "xlm-roberta-xl": _encoder("XLMRobertaXLConfig"),
    "xlnet": Family(
        ENCODER,
        "XLNetConfig",
        {"vocab_size": VOCABULARY, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 64, "pad_token_id": 0, **_ENDS},
        "CausalLM",
    ),
    "xmod": _encoder("XmodConfig", languages=["en_XX"], default_language="en_XX"),
    # language models
    "apertus": _decoder("ApertusConfig"),
    "arcee": _decoder("ArceeConfig"),
    "biogpt": _decoder("BioGptConfig"),
    "bitnet": _decoder("BitNetConfig"),
    "bloom": Family(
        DECODER,
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4, "pad_token_id": 0, **_ENDS},
        "CausalLM",
    ),
    "codegen": _gpt("CodeGenConfig", rotary_dim=4, **_ENDS),
    "cohere": _decoder("CohereConfig"),
    "cohere2": _decoder("Cohere2Config", sliding_window=16),
    "ctrl": _gpt("CTRLConfig", dff=64, pad_token_id=0),
    "deepseek_v2": _decoder("DeepseekV2Config", **_DEEPSEEK, topk_method="greedy"),
    "deepseek_v3": _decoder("DeepseekV3Config", **_DEEPSEEK),
    "diffllama": _decoder("DiffLlamaConfig"),
    "doge": _decoder("DogeConfig"),
    "dots1": _decoder("Dots1Config", **_DEEPSEEK | {"head_dim": 16}),
    "ernie4_5": _decoder("Ernie4_5Config"),
    "ernie4_5_moe": _decoder(
        "Ernie4_5_MoeConfig",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=64,
        moe_layer_start_index=0,
        moe_num_shared_experts=1,
    ),
    "exaone4": _decoder("Exaone4Config", sliding_window=16),
    "falcon": Family(
        DECODER, "FalconConfig", _text(new_decoder_architecture=True, num_kv_heads=2, **_ENDS), "CausalLM"
    ),
    "falcon_h1": _decoder("FalconH1Config", **_MAMBA, mamba_d_ssm=64, mamba_n_heads=4),
    "falcon_mamba": Family(DECODER, "FalconMambaConfig", _text(state_size=8, **_ENDS), "CausalLM"),
    "flex_olmo": _decoder("FlexOlmoConfig", num_experts=4, num_experts_per_tok=2),
    "gemma": _decoder("GemmaConfig"),
    "gemma2": _decoder("Gemma2Config", query_pre_attn_scalar=16, sliding_window=16),
    "gemma3_text": _decoder("Gemma3TextConfig", query_pre_attn_scalar=16, sliding_window=16),
    "glm": _decoder("GlmConfig"),
    "glm4": _decoder("Glm4Config"),
    "glm4_moe": _decoder("Glm4MoeConfig", **_DEEPSEEK | {"head_dim": 16}),
    "gpt2": _gpt("GPT2Config", **_ENDS),
    "gpt_bigcode": _gpt("GPTBigCodeConfig", **_ENDS),
    "gpt_neo": Family(
        DECODER,
        "GPTNeoConfig",
        {
            **{**_PLACES, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 64},
            **{"attention_types": [[["global", "local"], 1]], "window_size": 16, **_ENDS},
        },
        "CausalLM",
    ),
    "gpt_neox": _decoder("GPTNeoXConfig"),
    "gpt_oss": _decoder("GptOssConfig", **_LOCAL_EXPERTS, sliding_window=16),
    "gptj": _gpt("GPTJConfig", rotary_dim=4, **_ENDS),
    "granite": _decoder("GraniteConfig"),
    "granitemoe": _decoder("GraniteMoeConfig", **_LOCAL_EXPERTS),
    "granitemoehybrid": _decoder(
        "GraniteMoeHybridConfig",
        **_LOCAL_EXPERTS,
        **_MAMBA,
        layer_types=["mamba", "attention"],
        shared_intermediate_size=64,
        mamba_n_heads=8,
    ),
    "helium": _decoder("HeliumConfig"),
    "hunyuan_v1_dense": _decoder("HunYuanDenseV1Config"),
    "hunyuan_v1_moe": _decoder("HunYuanMoEV1Config", num_experts=4, moe_topk=2),
    "jamba": _decoder(
        "JambaConfig",
        num_experts=2,
        num_experts_per_tok=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "jetmoe": _decoder("JetMoeConfig", **_LOCAL_EXPERTS, kv_channels=16, num_key_value_heads=2),
    "lfm2": _decoder("Lfm2Config", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "llama": _decoder("LlamaConfig"),
    "llama4_text": _decoder(
        "Llama4TextConfig",
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=64,
        attention_chunk_size=64,
    ),
    "mamba": Family(DECODER, "MambaConfig", _text(state_size=8, **_ENDS), "CausalLM"),
    "mamba2": Family(
        DECODER,
        "Mamba2Config",
        _text(state_size=8, num_heads=8, head_dim=16, n_groups=1, chunk_size=8, **_ENDS),
        "CausalLM",
    ),
    "minimax": _decoder(
        "MiniMaxConfig", **_LOCAL_EXPERTS, layer_types=["linear_attention", "full_attention"], block_size=8
    ),
    "ministral": _decoder("MinistralConfig", sliding_window=16),
    "mistral": _decoder("MistralConfig", sliding_window=16),
    "mixtral": _decoder("MixtralConfig", **_LOCAL_EXPERTS),
    "modernbert-decoder": _decoder("ModernBertDecoderConfig", cls_token_id=2, sep_token_id=3),
    "mpt": Family(
        DECODER,
        "MptConfig",
        {
            **{"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 2, "n_heads": 4},
            **{"expansion_ratio": 2, "max_seq_len": 64, "pad_token_id": 0},
        },
        "CausalLM",
    ),
    "nemotron": _decoder("NemotronConfig"),
    "olmo": _decoder("OlmoConfig"),
    "olmo2": _decoder("Olmo2Config"),
    "olmo3": _decoder("Olmo3Config", sliding_window=16),
    "olmoe": _decoder("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    "openai-gpt": _gpt("OpenAIGPTConfig"),
    "opt": _decoder("OPTConfig", ffn_dim=64, word_embed_proj_dim=64),
    "persimmon": _decoder("PersimmonConfig"),
    "phi": _decoder("PhiConfig"),
    "phi3": _decoder("Phi3Config"),
    "phimoe": _decoder("PhimoeConfig", **_LOCAL_EXPERTS),
    "qwen2": _decoder("Qwen2Config"),
    "qwen2_moe": _decoder("Qwen2MoeConfig", **_EXPERTS, shared_expert_intermediate_size=64),
    "qwen3": _decoder("Qwen3Config"),
    "qwen3_moe": _decoder("Qwen3MoeConfig", **_EXPERTS),
    "qwen3_next": _decoder("Qwen3NextConfig", **_EXPERTS, **_LINEAR, shared_expert_intermediate_size=64),
    "qwen3_5_text": _decoder("Qwen3_5TextConfig", **_LINEAR),
    "recurrent_gemma": _decoder("RecurrentGemmaConfig", lru_width=64, attention_window_size=16, num_hidden_layers=3),
    "rwkv": Family(
        DECODER,
        "RwkvConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 64},
        "CausalLM",
    ),
    "seed_oss": _decoder("SeedOssConfig"),
    "smollm3": _decoder("SmolLM3Config"),
    "stablelm": _decoder("StableLmConfig"),
    "starcoder2": _decoder("Starcoder2Config"),
    "vaultgemma": _decoder("VaultGemmaConfig", query_pre_attn_scalar=16, sliding_window=16),
    "xglm": Family(
        DECODER,
        "XGLMConfig",
        {**_PLACES, "d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "pad_token_id": 0, **_ENDS},
        "CausalLM",
    ),
    "zamba2": _decoder(
        "Zamba2Config",
        num_hidden_layers=3,
        layers_block_type=["mamba", "mamba", "hybrid"],
        num_mem_blocks=1,
        mamba_d_state=8,
        mamba_ngroups=1,
        n_mamba_heads=4,
        mamba_headdim=32,
        chunk_size=8,
        attention_head_dim=32,
    ),
    # encoder-decoders
    "bart": Family(BOTH, "BartConfig", _halves(), "Seq2SeqLM"),
    "bigbird_pegasus": Family(BOTH, "BigBirdPegasusConfig", _halves(attention_type="original_full"), "Seq2SeqLM"),
    "blenderbot": Family(BOTH, "BlenderbotConfig", _halves(), "Seq2SeqLM"),
    "led": Family(
        BOTH,
        "LEDConfig",
        _halves(max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=8),
        "Seq2SeqLM",
    ),
    "longt5": Family(BOTH, "LongT5Config", _T5 | {"local_radius": 8}, "Seq2SeqLM"),
    "m2m_100": Family(BOTH, "M2M100Config", _halves(), "Seq2SeqLM"),
    "marian": Family(BOTH, "MarianConfig", _halves(), "Seq2SeqLM"),
    "mbart": Family(BOTH, "MBartConfig", _halves(), "Seq2SeqLM"),
    "mt5": Family(BOTH, "MT5Config", _T5, "Seq2SeqLM"),
    "mvp": Family(BOTH, "MvpConfig", _halves(), "Seq2SeqLM"),
    "pegasus": Family(BOTH, "PegasusConfig", _halves(), "Seq2SeqLM"),
    "plbart": Family(BOTH, "PLBartConfig", _halves(), "Seq2SeqLM"),
    "switch_transformers": Family(
        BOTH,
        "SwitchTransformersConfig",
        _T5 | {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        "Seq2SeqLM",
    ),
    "t5": Family(BOTH, "T5Config", _T5, "Seq2SeqLM"),
    "t5gemma": Family(
        BOTH,
        "T5GemmaConfig",
        {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 4, "eos_token_id": 5},
        "Seq2SeqLM",
        _causal(query_pre_attn_scalar=16, sliding_window=16),
    ),
    "umt5": Family(BOTH, "UMT5Config", _T5, "Seq2SeqLM"),
    # models of pictures
    "beit": _pictures("BeitConfig", **_vision()),
    "bit": _pictures("BitConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], num_groups=4),
    "clip (pictures)": _pictures("CLIPVisionConfig", "", **_vision()),
    "convnext": _pictures("ConvNextConfig", **_PYRAMID | {"image_size": SIDE}),
    "convnextv2": _pictures("ConvNextV2Config", **_PYRAMID | {"image_size": SIDE}),
    "data2vec-vision": _pictures("Data2VecVisionConfig", **_vision()),
    "deit": _pictures("DeiTConfig", **_vision()),
    "dinov2": _pictures("Dinov2Config", **_vision(mlp_ratio=2)),
    "dinov2_with_registers": _pictures("Dinov2WithRegistersConfig", **_vision(mlp_ratio=2)),
    "dinov3_vit": _pictures("DINOv3ViTConfig", "", **_vision()),
    "focalnet": _pictures(
        "FocalNetConfig", image_size=SIDE, patch_size=4, embed_dim=8, depths=[1, 1, 2, 1], hidden_sizes=[8, 16, 32, 64]
    ),
    "hiera": _pictures("HieraConfig", image_size=[64, 64], embed_dim=8, depths=[1, 1, 2, 1], num_heads=[1, 1, 2, 2]),
    "ijepa": _pictures("IJepaConfig", **_vision()),
    "imagegpt": _pictures("ImageGPTConfig", vocab_size=17, n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "levit": _pictures(
        "LevitConfig",
        image_size=128,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        drop_path_rate=0,
    ),
    "mobilenet_v1": _pictures("MobileNetV1Config", image_size=SIDE, depth_multiplier=0.25, min_depth=8),
    "mobilenet_v2": _pictures("MobileNetV2Config", image_size=SIDE, depth_multiplier=0.25, min_depth=8),
    "mobilevitv2": _pictures("MobileViTV2Config", image_size=64, width_multiplier=0.25),
    "poolformer": _pictures("PoolFormerConfig", **_PYRAMID),
    "pvt": _pictures("PvtConfig", **_PYRAMID, **_HEADS, sequence_reduction_ratios=[4, 2, 1, 1]),
    "pvt_v2": _pictures("PvtV2Config", **_PYRAMID, **_HEADS, sr_ratios=[4, 2, 1, 1]),
    "regnet": _pictures(
        "RegNetConfig", embedding_size=8, hidden_sizes=[32, 48, 64, 96], depths=[1, 1, 2, 1], groups_width=16
    ),
    "resnet": _pictures("ResNetConfig", embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]),
    "segformer": _pictures("SegformerConfig", **_PYRAMID, **_HEADS, sr_ratios=[4, 2, 1, 1]),
    "siglip (pictures)": _pictures("SiglipVisionConfig", "", **_vision()),
    "swiftformer": _pictures("SwiftFormerConfig", image_size=64, embed_dims=[8, 16, 24, 32], depths=[1, 1, 2, 1]),
    "swin": _pictures("SwinConfig", **_SWIN),
    "swinv2": _pictures("Swinv2Config", **_SWIN),
    "textnet": _pictures("TextNetConfig", image_size=[64, 64], hidden_sizes=[8, 8, 16, 24, 32], stem_out_channels=8),
    "vit": _pictures("ViTConfig", **_vision()),
    "vit_mae": _pictures("ViTMAEConfig", "", **_vision()),
    "vit_msn": _pictures("ViTMSNConfig", **_vision()),
    # pairs of encoders
    "altclip": _pair("AltCLIPConfig", _text(max_position_embeddings=66, project_dim=64), _vision(), projection_dim=64),
    "chinese_clip": _pair("ChineseCLIPConfig", _text(max_position_embeddings=64), _vision(), projection_dim=64),
    "clip": _pair("CLIPConfig", _text(max_position_embeddings=64, **_ENDS), _vision(), projection_dim=64),
    "metaclip_2": _pair("MetaClip2Config", _text(max_position_embeddings=64, **_ENDS), _vision(), projection_dim=64),
    "siglip": _pair("SiglipConfig", _text(max_position_embeddings=64, **_ENDS), _vision(), whole=True),
    # language models that see, asked in text
    "gemma3": _sees(
        "Gemma3Config",
        _causal(query_pre_attn_scalar=16, sliding_window=16),
        _vision(),
        mm_tokens_per_image=4,
        image_token_id=60,
    ),
    "idefics3": _sees("Idefics3Config", _causal(), _vision(), image_token_id=60, scale_factor=2),
    "internvl": _sees(
        "InternVLConfig", _causal(), _vision(image_size=[SIDE, SIDE], patch_size=[8, 8]), image_token_id=60
    ),
    "llava": _sees(
        "LlavaConfig", _causal(model_type="llama"), _vision(model_type="clip_vision_model"), image_token_id=60
    ),
    "mistral3": _sees(
        "Mistral3Config",
        _causal(model_type="mistral"),
        _vision(model_type="pixtral", head_dim=16),
        image_token_index=60,
    ),
    "paligemma": _sees(
        "PaliGemmaConfig",
        _causal(model_type="gemma"),
        _vision(model_type="siglip_vision_model", projection_dim=64),
        image_token_index=60,
        projection_dim=64,
    ),
    "qwen2_5_vl": _sees(
        "Qwen2_5_VLConfig",
        _causal(rope_scaling={"type": "default", "mrope_section": [2, 2, 4]}),
        _QWEN | {"fullatt_block_indexes": [1]},
        **_PLACEHOLDERS,
    ),
    "qwen2_vl": _sees(
        "Qwen2VLConfig",
        _causal(rope_scaling={"type": "default", "mrope_section": [2, 2, 4]}),
        {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8},
        **_PLACEHOLDERS,
    ),
    "qwen3_5": _sees("Qwen3_5Config", _causal(**_LINEAR), _QWEN | {"num_position_embeddings": 16}, **_PLACEHOLDERS),
    "qwen3_vl": _sees(
        "Qwen3VLConfig",
        _causal(rope_scaling={"rope_type": "default", "mrope_section": [2, 2, 4]}),
        _QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **_PLACEHOLDERS,
    ),
    "smolvlm": _sees("SmolVLMConfig", _causal(), _vision(), image_token_id=60, scale_factor=2),
}
