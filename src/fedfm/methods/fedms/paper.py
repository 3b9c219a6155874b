"""The settings of FedMS's paper (arXiv:2312.15926, Section 4): CLIP ViT-B/16 on Food101, UCF101 and EuroSAT."""

from __future__ import annotations

from fedfm.core.fields import Paper

_ADAPTATION = "[model.adaptation] has the same defaults for every method"
SETTINGS = {
    "method.global_rounds": Paper(25),
    "method.local_rounds": Paper(25),
    "method.fraction": Paper(1.0),
    "method.local.name": Paper(
        "adam", "Adam adds the weight decay to the gradient before it normalises, so the decay would be rescaled, too"
    ),
    "method.local.learning_rate": Paper(2e-4),
    "method.local.weight_decay": Paper(0.05),
    "method.local.decay_of": Paper("all"),
    "method.local.batch_size": Paper(512, "a client with a few hundred rows would take one step per epoch"),
    "method.local.betas": Paper((0.9, 0.98), "torch's values, as for every method"),
    "method.local.epsilon": Paper(1e-6, "torch's value, as for every method"),
    "model.adaptation.rank": Paper(1, _ADAPTATION),
    "model.adaptation.dropout": Paper(0.1, _ADAPTATION),
    "model.adaptation.init_lora_weights": Paper(
        "gaussian, for the output factor", "PEFT draws the input factor instead; the product is zero in both cases"
    ),
}
