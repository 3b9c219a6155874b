"""Python code that computes FedMS's mixture, for users of an export who have neither fedfm nor the run."""

from __future__ import annotations

from collections.abc import Mapping

_CLASS = '''\
import copy
import torch
from safetensors.torch import load_file


class Mixture(torch.nn.Module):
    """Logits (images, classes): the mean of both experts, weighted for each image."""

    def __init__(self, experts, gate):
        super().__init__()
        self.experts, self.gate = experts, gate

    def forward(self, {more}**inputs):
        self.experts.set_adapter("local")
        of_local = self.experts(**inputs).logits_per_image
        self.experts.set_adapter("global")
        of_global = self.experts(**inputs)
        share = {share}
        return share * of_global.logits_per_image + (1 - share) * of_local
'''
_GATE = '''
    def share(self, features):
        """The share of the global expert, (images, 1)."""
        hidden = self.layer("hidden", features).relu()
        return self.layer("output", hidden).softmax(-1)[:, :1]

    def layer(self, name, x):
        x = torch.nn.functional.linear(x, self.gate[f"{name}.weight"], self.gate[f"{name}.bias"])
        names = ("running_mean", "running_var", "weight", "bias")
        return torch.nn.functional.batch_norm(x, *(self.gate[f"{name}_norm.{n}"] for n in names))
'''
_TRUNK = '''
    def features(self, inputs):
        """Features (images, width) by the gate's own weights in the last image block and in the norm behind it."""
        own = copy.deepcopy(self.experts)
        for part, path in {places}.items():
            prefix = f"trunk.{{part}}."
            weights = {{n.removeprefix(prefix): t for n, t in self.gate.items() if n.startswith(prefix)}}
            own.get_base_model().get_submodule(path).load_state_dict(weights, strict=False)
        return own(**inputs).image_embeds
'''
_MODEL = """

model = Mixture(experts, load_file("FOLDER/gate.safetensors"))
model.eval()"""


def mixture_code(share: float | None, places: Mapping[str, str], backbone: str) -> list[str]:
    """Lines of Python that build ``model`` from ``experts``, a PeftModel with the adapters ``global`` and ``local``.

    They also read ``FOLDER/gate.safetensors``. The model takes the base model's inputs and returns logits (b, C).

    Args:
        share: lambda of every row; if None, the gate computes lambda.
        places: paths in the base model, by name, of the parts for which the gate has its own weights.
        backbone: name of the classifier whose features the gate reads; the user passes these features with the rows.
            If empty, the gate reads the features of the global expert.
    """
    if share is not None:
        return (_CLASS.format(more="", share=repr(share)) + _MODEL).splitlines()
    if backbone:
        said = f"# `features` (images, width): the inputs of the head of {backbone!r} for the images\n"
        return (said + _CLASS.format(more="features, ", share="self.share(features)") + _GATE + _MODEL).splitlines()
    if places:
        body = _CLASS.format(more="", share="self.share(self.features(inputs))")
        return (body + _GATE + _TRUNK.format(places=repr(dict(places))) + _MODEL).splitlines()
    return (_CLASS.format(more="", share="self.share(of_global.image_embeds)") + _GATE + _MODEL).splitlines()
