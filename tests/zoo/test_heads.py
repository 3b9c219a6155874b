"""How much of a model is new: of each family the head is said where it is large, and more than a head is refused."""

import pytest
import torch
import transformers

from fedfm.errors import InputError
from fedfm.models import families, heads, new_parts, weights
from fedfm.models.quiet import quiet
from zoo import making
from zoo.families import FAMILIES, PAIR, PICTURES

UNTRIED = ("deit", "levit")  # of their two heads fedfm takes one away, or refuses both
HEADS = ("bert", "roberta", "xlnet", "xlm", "funnel", "deberta-v2", "electra", "bart", "t5", "llama")
OFTEN = (*HEADS, "mixtral", "swin", "resnet", "mobilenet_v2", "beit", "swiftformer", "siglip")  # in `make test`, too


def classifier(family, classes):
    """The family's classifier without numbers, or None where transformers has none."""
    about = FAMILIES[family]
    auto = "ImageClassification" if about.kind in (PICTURES, PAIR) else "SequenceClassification"
    config = making.configuration(about)
    config.num_labels = classes
    auto_class = getattr(transformers, f"AutoModelFor{auto}")
    if type(config) not in auto_class._model_mapping or family in UNTRIED:
        return None
    with quiet(), torch.device("meta"):
        return auto_class.from_config(config)


def outside(module):
    """Names of the parameters that no pretrained model inside has: the most that a checkpoint of it may lack."""
    inside = [b for b in heads.bases(module) if b]
    return {n for n, _ in module.named_parameters() if not any(heads.within(n, b) for b in inside)}


def has(module, path=""):
    return sum(p.numel() for p in module.get_submodule(path).parameters())


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in OFTEN else pytest.mark.models) for f in FAMILIES])
def test_of_each_family_the_head_is_accounted_for_and_nothing_else(family):
    """64 is also the width of these models, and of their matrices."""
    for classes in (2, 64, 1000):
        if (module := classifier(family, classes)) is None:
            return
        head = families.find(module, module.config.model_type).head
        new = weights.new_modules(module, module.config.model_type, outside(module))
        made = sum(has(module, path) for path in new)
        said = new_parts.notice(module, new, head, family)
        assert bool(said) == (made > 0.05 * has(module))
        assert not said or f"{made:,} of {has(module):,}, are new here and untrained" in said[0]
        for name, _ in [place for b in heads.bases(module) for place in children(module, b)]:
            if name not in new and has(module, name) > 0.3 * has(module) and layered(module, name):
                with pytest.raises(InputError, match=f"would be new and untrained, .* than a head: .*{name}"):
                    new_parts.notice(module, [*new, name], head, family)


def children(module, base):
    return [(f"{base}.{name}", child) for name, child in module.get_submodule(base).named_children()]


def layered(module, path):
    """Whether it holds more than an embedding or one map."""
    return sum(p.dim() > 1 for p in module.get_submodule(path).parameters()) > 3
