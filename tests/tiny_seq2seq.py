"""Tiny encoder-decoders with random weights: T5, BART, mBART, mBART-50, M2M100 and Whisper; and rows to learn from."""

from __future__ import annotations

import wave
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = ("red", "fish", "blue", "bird", "big", "small", "say", "colour", "animal")
RATE = 16_000
SECONDS = 1  # of a recording that the Whisper hears
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_CODES = ("en_XX", "ro_RO", "de_DE")
_BART: dict[str, Any] = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "init_std": 0.3},
}


def save_t5(folder: Path, *, ends: bool = True) -> Path:
    """A random T5. ``ends``: its tokenizer writes the end token after each text, as T5's own does."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(7)
    size = _save_tokenizer(folder, "$A </s>" if ends else "$A")
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "initializer_factor": 2.0}
    config = T5Config(vocab_size=size, **shape, decoder_start_token_id=1, pad_token_id=1, eos_token_id=2)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def save_bart(folder: Path) -> Path:
    """A random BART."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(7)
    size = _save_tokenizer(folder, "<s> $A </s>")
    config = BartConfig(vocab_size=size, max_position_embeddings=40, **_BART, **_IDS, decoder_start_token_id=2)
    BartForConditionalGeneration(config).save_pretrained(folder)
    return folder


_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}


def save_mbart(folder: Path, kind: str = "MBart50") -> Path:
    """A random mBART; ``kind``: MBart50 (codes before texts) or MBart (codes after texts, which the decoder gets)."""
    import transformers

    torch.manual_seed(7)
    words = [*(f"▁{word}" for word in WORDS), "▁"]
    vocabulary = [*((token, 0.0) for token in _SPECIAL), *((word, -1.0) for word in words)]
    tokenizer = getattr(transformers, f"{kind}Tokenizer")(vocab=vocabulary)
    tokenizer.save_pretrained(folder)
    start = {} if kind == "MBart" else {"decoder_start_token_id": 2}
    config = transformers.MBartConfig(
        vocab_size=len(tokenizer), max_position_embeddings=40, **_BART, **_IDS, **start, forced_eos_token_id=None
    )
    transformers.MBartForConditionalGeneration(config).save_pretrained(folder)
    return folder


def save_whisper(folder: Path, *, languages: bool = False) -> Path:
    """A random Whisper that hears one second; ``languages``: with the tokens of a Whisper of several languages."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    torch.manual_seed(7)
    if languages:
        size, first, end = _save_whisper_tokenizer(folder)
    else:
        size, first, end = _save_tokenizer(folder, "$A </s>"), 0, 2
    shape = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 80}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    ids = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": first}
    places = {"max_source_positions": 50 * SECONDS, "max_target_positions": 40}
    config = WhisperConfig(vocab_size=size, **shape, **heads, **ids, **places, init_std=0.3)
    config.begin_suppress_tokens = config.suppress_tokens = None
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS).save_pretrained(folder)
    return folder


SAVE: Mapping[str, Callable[[Path], Path]] = {
    "t5": save_t5,
    "bart": save_bart,
    "mbart": lambda folder: save_mbart(folder, "MBart"),
    "mbart50": save_mbart,
    "whisper": save_whisper,
    "whisper_of_languages": lambda folder: save_whisper(folder, languages=True),
}


def _save_tokenizer(folder: Path, form: str) -> int:
    """A tokenizer of words that writes texts in this form; returns its number of tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *WORDS]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=[("<s>", 0), ("</s>", 2)])
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return len(words)


def _save_whisper_tokenizer(folder: Path) -> tuple[int, int, int]:
    """A Whisper's own tokenizer on bytes; returns its number of tokens, the first token and the end token."""
    from tokenizers import pre_tokenizers
    from transformers import WhisperTokenizer
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    codes = [f"<|{code}|>" for code in LANGUAGES]
    more = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokens = [*letters, "<|endoftext|>", "<|startoftranscript|>", *codes, *more]
    tokenizer = WhisperTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": tokens[len(letters) :]})
    tokenizer.save_pretrained(folder)
    return len(tokenizer), tokens.index("<|startoftranscript|>"), tokens.index("<|endoftext|>")


# --- rows -------------------------------------------------------------------------------------------------------------


def texts(n: int = 32) -> list[dict[str, str]]:
    """Instructions with the word that they ask for, of several lengths."""
    words = ("red", "fish", "blue", "bird")
    asked = ("say {}", "big animal say {}", "say small {} colour colour")
    return [
        {"instruction": asked[i % 3].format(w), "output": w if i % 2 else f"{w} {w}"}
        for i, w in ((i, words[i % 4]) for i in range(n))
    ]


def tone(path: Path, hertz: Sequence[float], *, rate: int = RATE, channels: int = 1, seconds: float = 0.6) -> Path:
    """A wav file of tones, one after the other."""
    each = int(rate * seconds / len(hertz))
    sound = np.concatenate([np.sin(2 * np.pi * h * np.arange(each) / rate) for h in hertz])
    frames = np.repeat((sound * 0.5 * 32767).astype("<i2")[:, None], channels, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, len(frames), "NONE", ""))
        file.writeframes(frames.tobytes())
    return path


PITCHES = {"red": (300.0,), "fish": (700.0,), "blue": (1500.0,), "big fish": (3000.0, 500.0)}


def recordings(folder: Path, n: int = 24, **form: Any) -> list[dict[str, str]]:
    """Recordings of tones, each with the words that stand for them."""
    rows = []
    for i in range(n):
        words = list(PITCHES)[i % len(PITCHES)]
        pitch = tuple(h * (1 + 0.01 * (i % 5)) for h in PITCHES[words])
        rows.append({"audio": f"wav/{i}.wav", "output": words})
        tone(folder / rows[-1]["audio"], pitch, **form)
    return rows
