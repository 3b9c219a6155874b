"""Can a client compute the model's weights from ciphertexts? It could if the server did not add encryptions of zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from fedfm.audits.audit import Audit
from fedfm.audits.finding import COUNT, Finding, nothing
from fedfm.audits.replay import Replay
from fedfm.encrypted.audits.block_states import side_model
from fedfm.encrypted.audits.inference_second_polynomials import weights_of
from fedfm.encrypted.ckks.matrices import matrix_product
from fedfm.encrypted.ckks.ring import Parameters
from fedfm.encrypted.student.conversion import fold
from fedfm.errors import MissingExtra

QUESTION = "Do the server's encrypted messages disclose the weights of a linear layer to the owner of the key?"
INPUTS, OUTPUTS = 32, 8  # size of the part of the first layer that is attacked; solving for it takes a second
BITS = 20  # bits of the weights as integers
LINE = 0.5


class CiphertextWeights(Audit):
    """Finds the fraction of weights that an attacker computes from ciphertexts' second polynomials.

    It attacks the first layer on ciphertexts: the embedding of images, or the queries of the first block for texts.
    """

    methods: ClassVar[tuple[str, ...]] = ("blindfed",)
    replays: ClassVar[bool] = False

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        try:
            from fedfm.encrypted.ckks import seal

            parameters = Parameters()
            client = seal.ClientKeys(parameters)
        except MissingExtra as missing:
            return [nothing("weights.by_ciphertext", QUESTION, f"{missing}.")]
        server = seal.ServerKeys(parameters, client.public())
        backbone, _, _ = side_model(replay.population).frozen_parts
        folded = fold(backbone.module)
        embedded = "residual" in folded.blocks[0].weights  # texts come embedded
        weight = (folded.blocks[0].weights["query"] if embedded else folded.embedding)[:OUTPUTS, :INPUTS]
        integers = np.rint(weight / np.abs(weight).max() * 2**BITS)
        x = client.encrypt(np.random.default_rng(0).normal(size=(integers.shape[1], parameters.slots)))
        bare = matrix_product(integers, x, client.ring)
        hidden = server.ring.add(bare, server.zeros(len(bare), parameters.limbs))
        with_zero, without = (_share_found(out, x, integers, parameters) for out in (hidden, bare))
        layer = "first queries" if embedded else "embedding"
        says = f"{with_zero:.0%} of {integers.size} weights of the {layer} are found exactly. The server adds an "
        says += f"encryption of zero to each message; without it, {without:.0%} of the weights would be found."
        detail = {"without_encryption_of_zero": without}
        name, contradicts = "weights.by_ciphertext", with_zero > LINE
        return [Finding(name, QUESTION, with_zero, None, None, LINE, COUNT, says, contradicts, detail)]


def _share_found(out: np.ndarray, x: np.ndarray, integers: np.ndarray, parameters: Parameters) -> float:
    """Return the fraction of the weights that the attacker finds, modulo one prime.

    The polynomials may be in evaluation form: the transform to this form is linear, so the same equations hold.
    """
    guess = weights_of(x[:, 1, 0], out[:, 1, 0], parameters.primes[0])
    return float((guess == integers).mean())
