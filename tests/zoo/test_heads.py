"""How much of a model is new: of each family the head is said where it is large, and more than a head is refused."""

import numpy as np
import pytest
import torch
import transformers

from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models import families, first_batch, heads, new_parts, weights
from fedfm.models.load import load_model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec
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


NO_FEATURES = ("convbert", "fnet", "mobilebert", "swiftformer", "xlnet")  # their logits read more than one vector


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in ("swiftformer", "fnet") else pytest.mark.models) for f in NO_FEATURES]
)
def test_a_head_that_reads_more_than_features_is_refused_and_the_cure_trains(family, tmp_path):
    about = FAMILIES[family]
    making.write(about, tmp_path)
    pictures = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
    kind, inputs = ("image", pictures) if about.kind == PICTURES else ("text", ["good dog bird", "cat"])
    table = Table(kind, inputs, np.arange(2), ("a", "b"), np.full(2, "train"), source="rows")

    def model_by(name):
        spec = ModelSpec(str(tmp_path), adaptation=AdaptationSpec(name), max_length=32)
        model = load_model(spec, classes=("a", "b"), kind=kind)
        return model, model.prepare(table, [0, 1])

    with pytest.raises(InputError, match="such as fedavg with lora or full"):
        first_batch.look(*model_by("head"))
    model, rows = model_by("full")
    first_batch.look(model, rows)
    model.loss(rows.batch([0, 1])).backward()
    own = [
        model.live()[f"{path}.{n}"]
        for path in model.new
        for n, _ in model.module.get_submodule(path).named_parameters()
    ]
    assert own
    assert all(p.grad is not None and p.grad.any() for p in own)
