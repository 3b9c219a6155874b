"""The settings of FedBaF's paper (arXiv:2410.18352, Section 5): Pre-ResNet on CIFAR-10, clients of equal size."""

from __future__ import annotations

from fedfm.core.fields import Paper

_EVERY = "every averaging method has the same defaults, so that comparisons are fair"
TRAINING = {
    "method.rounds": Paper(200, _EVERY),
    "method.fraction": Paper(0.1, _EVERY),
    "method.local.name": Paper("sgd"),
    "method.local.learning_rate": Paper(0.01, _EVERY),
    "method.local.momentum": Paper(0.9, _EVERY),
    "method.local.weight_decay": Paper(1e-4, _EVERY),
    "method.local.decay_of": Paper("all", "every method has the default of transformers' Trainer"),
    "method.local.epochs": Paper(5, _EVERY),
    "method.local.batch_size": Paper(50, _EVERY),
    "method.local.absent": Paper("zero", _EVERY),
}
PULL = {
    "method.cap": Paper(
        "none", "without a cap one client's update, or a large learning rate, turns the model into w_pre"
    ),
    "method.harden": Paper("none"),
}
