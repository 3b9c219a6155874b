"""Rows and tiny models for ``reproduce/tasks``: one set for each task, made by formula or from the raw sets.

``digits_labels.npz``  scikit-learn's digits with three labels: even, prime, and whether the digit has a loop
``diabetes.npz``       scikit-learn's diabetes: ten measurements, and how far the disease went on in a year
``names.jsonl``        WikiText-2 in lower case; a tag marks words that the article writes with a capital letter, except
                       the first of a sentence
``answers.jsonl``      questions of banking77 with the name of their intent as the answer
``shapes``             a folder of noisy pictures with one circle or square each, next to the masks of their pixels
``mri_findings.npz``   brain MRI as vectors of a ViT with three labels: a tumour, in the brain's own tissue, outside it
``speech.jsonl``       recordings of twelve words that espeak-ng speaks with five voices, and the word as the answer
``intents.jsonl``      pairs of questions of banking77 with the same intent
``tiny-bert-<set>``, ``tiny-t5-<set>``, ``tiny-segformer``, ``tiny-whisper``  models with random weights; their words
are those of the rows
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SENTENCES, PAIRS, PICTURES, QUESTIONS, INTENTS = 2400, 1600, 400, 1600, 20
SPOKEN = ("yes", "no", "left", "right", "up", "down", "on", "off", "stop", "go", "red", "blue")
VOICES = ("en", "en-us", "en-gb-scotland", "en+f3", "en+m3")
_WORD = re.compile(r"[A-Za-z]+")


def labels(target: Path, _: Path) -> None:
    """Three labels for each digit."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    of = {"even": (0, 2, 4, 6, 8), "prime": (2, 3, 5, 7), "loop": (0, 6, 8, 9)}
    y = np.stack([np.isin(digits.target, some) for some in of.values()], axis=1)
    np.savez(target, x=(digits.data / 16).astype(np.float32), y=y, classes=np.array(list(of)))


def findings(target: Path, vectors: Path) -> None:
    """Three labels for each brain MRI: a tumour, one in the brain's tissue (glioma), one outside it."""
    given = np.load(vectors, allow_pickle=False)
    kind = given["classes"][given["y"]]
    if set(kind) != {"no_tumor", "glioma_tumor", *(outer := ("meningioma_tumor", "pituitary_tumor"))}:
        raise SystemExit(f"{vectors}: unknown classes {sorted(set(kind))}")
    y = np.stack([kind != "no_tumor", kind == "glioma_tumor", np.isin(kind, outer)], axis=1)
    names = np.array(["tumour", "in the tissue", "outside the tissue"])
    np.savez(target, x=given["x"], y=y, split=given["split"], classes=names)


def diabetes(target: Path, _: Path) -> None:
    """Ten measurements in units of their deviation, and one number."""
    from sklearn.datasets import load_diabetes

    rows = load_diabetes()
    x = (rows.data / rows.data.std(axis=0)).astype(np.float32)
    np.savez(target, x=x, y=rows.target.astype(np.float64)[:, None], classes=np.array(["progression"]))


def names(target: Path, source: Path) -> None:
    """Sentences of WikiText-2 in lower case with the tag NAME for words that had a capital letter."""
    text = gzip.decompress((source / "text" / "wikitext2.train.txt.gz").read_bytes()).decode("utf-8")
    sentences = [s.split() for line in text.splitlines() if not line.startswith(" =") for s in line.split(" . ")]
    rng = np.random.default_rng(0)
    fit = [s for s in sentences if 8 <= len(s) <= 20 and "<unk>" not in s]
    rows = []
    for i in rng.permutation(len(fit))[:SENTENCES]:
        capital = [j > 0 and word[0].isupper() for j, word in enumerate(fit[i])]
        tags = [("I-NAME" if capital[j - 1] else "B-NAME") if capital[j] else "O" for j in range(len(capital))]
        rows.append({"tokens": [word.lower() for word in fit[i]], "tags": tags})
    _write(target, rows)


def answers(target: Path, source: Path) -> None:
    """Training questions of the most frequent intents of banking77, and the intent in words."""
    by_intent = _by_intent(source)
    most = sorted(by_intent, key=lambda name: -len(by_intent[name]))[:INTENTS]
    rows = [
        {"instruction": text, "output": name.lower().replace("_", " ")} for name in most for text in by_intent[name]
    ]
    rng = np.random.default_rng(0)
    _write(target, [rows[i] for i in rng.permutation(len(rows))[:QUESTIONS]])


def speech(target: Path, _: Path) -> None:
    """Words as espeak-ng speaks them: each in all of its voices, speeds and pitches, in a random order."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("speech.jsonl: espeak-ng, which speaks the words, is not installed")
    folder = target.with_name("speech")
    folder.mkdir(exist_ok=True)
    every = [(w, v, s, p) for w in SPOKEN for v in VOICES for s in (150, 180, 210) for p in (30, 50, 70)]
    rows = []
    for word, voice, speed, pitch in every:
        file = folder / f"{len(rows)}.wav"
        said = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "-w", str(file), word]
        subprocess.run(said, check=True, capture_output=True)
        rows.append({"audio": f"speech/{file.name}", "output": word})
    rng = np.random.default_rng(0)
    _write(target, [rows[i] for i in rng.permutation(len(rows))])


def intents(target: Path, source: Path) -> None:
    """Pairs of training questions of banking77 with one intent; no question is in two pairs."""
    pairs = [
        {"anchor": texts[i], "positive": texts[i + 1]}
        for texts in _by_intent(source).values()
        for i in range(0, len(texts) - 1, 2)
    ]
    rng = np.random.default_rng(0)
    _write(target, [pairs[i] for i in rng.permutation(len(pairs))[:PAIRS]])


def _by_intent(source: Path) -> dict[str, list[str]]:
    """The training questions of banking77 by the name of their intent."""
    lines = gzip.decompress((source / "text" / "banking77.jsonl.gz").read_bytes()).decode("utf-8").splitlines()
    found: dict[str, list[str]] = {}
    for row in map(json.loads, lines):
        found.setdefault(row["label_name"], []).append(row["text"])
    return found


def shapes(target: Path, _: Path) -> None:
    """Pictures of 32 x 32 with a circle or a square of a random grey on noise; masks: 0 ground, 1 circle, 2 square."""
    from PIL import Image

    rng = np.random.default_rng(0)
    y, x = np.mgrid[:32, :32]
    for part, first, last in (("train", 0, PICTURES * 3 // 4), ("test", PICTURES * 3 // 4, PICTURES)):
        for kind in ("images", "masks"):
            (target / part / kind).mkdir(parents=True)
        for i in range(first, last):
            (a, b), size, kind = rng.integers(8, 24, 2), int(rng.integers(4, 8)), int(rng.integers(2))
            inside = np.hypot(y - a, x - b) <= size if kind == 0 else np.maximum(abs(y - a), abs(x - b)) <= size
            grey = rng.normal(90, 30, (32, 32)) + inside * rng.uniform(50, 90)
            picture = np.clip(grey, 0, 255).astype(np.uint8)
            Image.fromarray(picture).convert("RGB").save(target / part / "images" / f"{i:03d}.png")
            Image.fromarray((inside * (kind + 1)).astype(np.uint8)).save(target / part / "masks" / f"{i:03d}.png")


def tiny(target: Path, rows: Path, architecture: str) -> None:
    """A random BERT or T5 whose words are the 3,000 most frequent ones of these rows."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    texts = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    found = Counter(
        word
        for row in texts
        for value in row.values()
        for word in (value if isinstance(value, list) else _WORD.findall(value.lower()))
    )
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "</s>"]
    words = [*special, *(word for word, _ in found.most_common(3000) if word not in special)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="</s>", model_max_length=64
    ).save_pretrained(target)
    torch.manual_seed(0)
    model: Any
    if architecture == "bert":
        shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        model = hf.BertModel(hf.BertConfig(vocab_size=len(words), max_position_embeddings=64, **shape))
    else:
        shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 4}
        model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=len(words), **shape, **ids))
    model.save_pretrained(target)


def segformer(target: Path) -> None:
    """A random SegFormer for pictures of 32 x 32."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    shape = {"hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4, "num_attention_heads": [1, 1, 1, 2]}
    hf.SegformerForSemanticSegmentation(hf.SegformerConfig(**shape, decoder_hidden_size=32)).save_pretrained(target)
    hf.SegformerImageProcessor(size={"height": 32, "width": 32}).save_pretrained(target)


def whisper(target: Path) -> None:
    """A random Whisper that hears one second and knows the words of ``speech.jsonl``."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *SPOKEN]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(target)
    torch.manual_seed(0)
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "num_mel_bins": 80}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    places = {"max_source_positions": 50, "max_target_positions": 8}
    config = hf.WhisperConfig(vocab_size=len(words), **sizes, **heads, **ids, **places)
    config.begin_suppress_tokens = config.suppress_tokens = None
    hf.WhisperForConditionalGeneration(config).save_pretrained(target)
    hf.WhisperFeatureExtractor(feature_size=80, chunk_length=1).save_pretrained(target)


SETS: dict[str, Callable[[Path, Path], None]] = {
    "digits_labels.npz": labels,
    "diabetes.npz": diabetes,
    "names.jsonl": names,
    "answers.jsonl": answers,
    "intents.jsonl": intents,
    "shapes": shapes,
    "speech.jsonl": speech,
}


def make(name: str, target: Path, source: Path, also: Callable[[str], None]) -> bool:
    """Make a set or a model of this module; False if it has none of this name. ``also`` makes what it needs."""
    if name in SETS:
        SETS[name](target, source)
    elif name == "mri_findings.npz":
        also("brain_mri.vit_tiny.npz")
        findings(target, target.with_name("brain_mri.vit_tiny.npz"))
    elif name == "tiny-segformer":
        segformer(target)
    elif name == "tiny-whisper":
        whisper(target)
    elif of := re.fullmatch(r"tiny-(bert|t5)-(\w+)", name):
        also(f"{of[2]}.jsonl")
        tiny(target, target.with_name(f"{of[2]}.jsonl"), of[1])
    else:
        return False
    return True


def _write(target: Path, rows: list[dict[str, Any]]) -> None:
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
