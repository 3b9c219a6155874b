"""The client's local pass in stage two of FedMS. It trains the gate by equation 3 and the expert by equation 2."""

from __future__ import annotations

from typing import Any

import torch

from fedfm.core.client import Client
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedms.activation import clock
from fedfm.methods.fedms.gate import Gating, trunk_of
from fedfm.methods.fedms.mixture import Experts, mix
from fedfm.models.decay import no_weight_decay
from fedfm.models.dual_encoder import active_layers, need
from fedfm.models.layers import layers
from fedfm.training import Local
from fedfm.training.local_job import Job
from fedfm.training.loop import Flat
from fedfm.training.update_rules import Rule


def local_pass(
    client: Client, local: Local, gating: Gating, separate: bool, W_g: Params, W_i: Params, Z_g: Params, k: int
) -> tuple[Params, Params, float]:
    """Train for E epochs on both objectives. Only the top k layers of the local expert change.

    Args:
        separate: if true, train the gate on the mixture's loss and the expert on its own loss; if false, train both on
            the mixture's loss.

    Returns:
        W_i, Z_i, and the gate's mean loss L_i.
    """
    model, rows = need(client.model), client.data.train
    labels = rows.labels
    if labels is None:
        raise InputError("data.label: fedms classifies; the rows have no labels", key="data.label")
    mixture = Experts(model, W_g, rows, k, gating.backbone)
    gate = gating.load(model, Z_g)
    trunk = {n: t.clone().requires_grad_() for n, t in trunk_of(Z_g, model.device).items()}
    model.load(W_i)
    active = set(active_layers(model, k))
    owners = {n: layer for layer, names in layers(model, "layer").items() for n in names}
    flats = [
        Flat({n: p for n, p in model.live().items() if owners[n] in active}),
        Flat({n: p for n, p in gate.named_parameters() if gating.trains(n)} | trunk),
    ]
    rules = [Rule(local, flat.p, flat.places(model.no_weight_decay | no_weight_decay(gate))) for flat in flats]
    job = Job(client, W_i, local)
    total, expert, shares, backward, seen = 0.0, 0.0, 0.0, 0.0, 0
    model.train_mode()
    gate.mode(rows=len(rows), last=gating.part == "last")
    # LoRA's dropout draws from torch's global generator, so seed it with this client's own stream.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(client.seed)
        for index, eta in zip(job.orders(), job.rates(), strict=True):
            if len(index) == 1 and gate.training:
                continue  # batch norm needs more than one row
            y = labels[index].to(model.device)
            seen_by_gate = mixture.gate_input(index, trunk)  # first, because this call installs W_g for a moment
            of_g, of_i = mixture.cosines(index, train=True)
            lam = gating.lam(gate, seen_by_gate)
            held = of_i.detach() if separate else of_i
            L_gate = model.task.objective(model.dual.scale * mix(lam, of_g, held), y)  # equation 3
            L_expert = model.task.objective(model.dual.scale * of_i, y)  # equation 2
            loss: Any = L_gate + L_expert if separate else L_gate
            began = clock(model)
            loss.backward()
            backward += clock(model) - began
            for parts in [[flat] for flat in flats] if separate else [flats]:
                local.shorten(*(flat.g for flat in parts))  # with a joint loss, shorten both gradients as one vector
            for flat, rule in zip(flats, rules, strict=True):
                rule.eta = eta
                rule.step(flat.p, flat.g)
                flat.g.zero_()
            b = len(index)
            seen, total, expert = seen + b, total + b * L_gate.item(), expert + b * L_expert.item()
            shares += float(lam.detach().sum())
    model.eval_mode()
    n = max(seen, 1)
    client.metrics |= {"loss": expert / n, "gate_loss": total / n, "global_share": shares / n}
    client.metrics["backward_seconds"] = backward
    return model.params(), Params(gate.tensors() | trunk), total / n
