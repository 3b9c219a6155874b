"""Recordings with a class: three plants listen to their pumps. It needs no download; sounds and model are made here.

python examples/audio_classification.py
python examples/audio_classification.py --model facebook/wav2vec2-base
"""

import argparse
import tempfile
import wave
from pathlib import Path

import numpy as np
import torch
from transformers import (
    ASTConfig,
    ASTFeatureExtractor,
    ASTForAudioClassification,
    AutoFeatureExtractor,
    AutoModelForAudioClassification,
)

import fedfm

RATE, CLASSES = 16_000, ("even", "worn", "blocked")  # samples a second; the state of a pump
PLANTS = {"north": (0.8, 0.1, 0.1), "south": (0.1, 0.8, 0.1), "west": (0.1, 0.1, 0.8)}  # shares of the classes


def record(path: Path, label: int, rng: np.random.Generator) -> Path:
    """Half a second of a pump as a wav file: it hums; a worn one rattles, and a blocked one whistles."""
    t = np.arange(RATE // 2) / RATE
    hum = np.sin(2 * np.pi * rng.uniform(80, 160) * t + rng.uniform(0, 6))
    rattle = (np.sin(2 * np.pi * rng.uniform(9, 15) * t) > 0.9) * rng.normal(0, 1, len(t))
    whistle = 0.3 * np.sin(2 * np.pi * rng.uniform(1500, 4000) * t)
    sound = hum + (0, rattle, whistle)[label] + rng.normal(0, 0.3, len(t))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound / abs(sound).max() * 32_000).astype("<i2").tobytes())
    return path


def read(path: Path) -> np.ndarray:
    """The samples of a wav file, from -1 to 1."""
    with wave.open(str(path), "rb") as file:
        if (file.getframerate(), file.getnchannels()) != (RATE, 1):
            raise ValueError(f"{path}: expected one channel of {RATE} samples a second")
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32_768


class Recordings(torch.utils.data.Dataset):
    """Wav files and their classes; a file is read when a batch needs it."""

    def __init__(self, files: list[tuple[Path, int]], extractor) -> None:
        self.files, self.extractor = files, extractor

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict:
        path, label = self.files[i]
        inputs = self.extractor(read(path), sampling_rate=RATE, return_tensors="np")
        return {name: x[0].astype(np.float32) for name, x in inputs.items()} | {"labels": label}


def tiny():
    """An Audio Spectrogram Transformer with random weights, so that the example needs no download."""
    extractor = ASTFeatureExtractor(num_mel_bins=32, max_length=48, mean=1.6, std=1.3)  # of these sounds' spectrograms
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    cut = {"num_mel_bins": 32, "max_length": 48, "patch_size": 8, "time_stride": 8, "frequency_stride": 8}
    return extractor, ASTForAudioClassification(
        ASTConfig(**shape, **cut, num_labels=len(CLASSES), initializer_range=0.2)
    )


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train together and each plant alone; return the accuracy of each model on the test rows of all plants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or an id of the hub instead of the tiny model")
    parser.add_argument("--rows", type=int, default=40, help="training recordings of each plant")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(words)

    def build():
        torch.manual_seed(0)
        if args.model is None:
            return tiny()
        model = AutoModelForAudioClassification.from_pretrained(args.model, num_labels=len(CLASSES))
        return AutoFeatureExtractor.from_pretrained(args.model), model

    extractor, model = build()
    folder, rng = Path(tempfile.mkdtemp()), np.random.default_rng(0)

    def recordings(name: str, n: int, shares) -> Recordings:
        labels = rng.choice(len(CLASSES), n, p=shares).tolist()
        files = [(record(folder / f"{name}-{i}.wav", label, rng), label) for i, label in enumerate(labels)]
        return Recordings(files, extractor)

    clients = {name: recordings(name, args.rows, shares) for name, shares in PLANTS.items()}
    test = recordings("test", 3 * args.rows, None)
    settings = {"test": test, "classes": CLASSES, "rounds": args.rounds, "local": {"name": "adamw"}}
    settings["local"] |= {"learning_rate": 0.002, "epochs": 2, "batch_size": 8}

    result = fedfm.federate(model, clients=clients, out=folder / "together", **settings)
    found = {"together": result["accuracy"]}
    for name, rows in clients.items():
        alone = fedfm.federate(build()[1], clients={name: rows}, out=folder / name, **settings)
        found[f"{name} alone"] = alone["accuracy"]
    for name, accuracy in found.items():
        print(f"{name:12} {accuracy:.3f} of {len(test)} test recordings")
    print(f"run: {result['run']}")
    return found


if __name__ == "__main__":
    main()
