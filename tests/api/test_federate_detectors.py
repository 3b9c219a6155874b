"""Models that find objects or masks, as a user's own module: their outputs are predicted, their export is loaded."""

import re

import pytest
import torch
import transformers as t

import fedfm

SIDE = 32
READ = {"logits", "pred_boxes", "class_queries_logits", "masks_queries_logits"}
_STAGES = {"depths": [1] * 4, "num_attention_heads": [1] * 4, "hidden_sizes": [8] * 4}
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about a release to come


def boxes():
    backbone = t.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    sizes = {f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = t.DetrConfig(backbone_config=backbone, d_model=16, num_queries=3, num_labels=2, **sizes)
    return t.DetrForObjectDetection(config)


def masks():
    backbone = t.SwinConfig(
        image_size=SIDE, patch_size=2, embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, window_size=2,
        out_features=[f"stage{i}" for i in (1, 2, 3, 4)],
    )  # fmt: skip
    widths = dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim", "encoder_feedforward_dim"), 32)
    config = t.Mask2FormerConfig(
        backbone_config=backbone, encoder_layers=1, decoder_layers=2, num_attention_heads=1, dim_feedforward=16,
        num_queries=3, num_labels=2, train_num_points=16, **widths,
    )  # fmt: skip
    return t.Mask2FormerForUniversalSegmentation(config)


def places():
    return t.SegformerForSemanticSegmentation(t.SegformerConfig(**_STAGES, decoder_hidden_size=8, num_labels=2))


def rows(kind, n=4):
    draws = torch.Generator().manual_seed(0)
    halves = torch.zeros(2, SIDE, SIDE)
    halves[0, : SIDE // 2] = halves[1, SIDE // 2 :] = 1
    target = {
        "boxes": {"labels": {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.4, 0.4, 0.4]])}},
        "masks": {"mask_labels": halves, "class_labels": torch.tensor([0, 1])},
        "places": {"labels": halves[0].long()},
    }[kind]
    return [{"pixel_values": torch.rand(3, SIDE, SIDE, generator=draws), **target} for _ in range(n)]


def collate(batch):
    """Pictures as one tensor; what is found in them as lists, as transformers' examples do."""
    listed = {name: [row[name] for row in batch] for name in batch[0]}
    stack = torch.is_tensor(batch[0].get("labels"))
    return {n: torch.stack(x) if stack or n == "pixel_values" else x for n, x in listed.items()}


@pytest.mark.parametrize("make", [boxes, masks, places])
def test_a_model_of_objects_trains_predicts_and_is_loaded_by_its_readme(make, tmp_path):
    torch.manual_seed(0)
    module, data = make(), rows(make.__name__)
    given = {"model": module, "collate": collate}
    before = {name: p.clone() for name, p in module.named_parameters()}
    clients = {"a": data[:2], "b": data[2:]}
    local = {"learning_rate": 0.01}
    fedfm.federate(**given, clients=clients, rounds=1, out=tmp_path / "run", run={"workers": 1}, local=local)
    assert any(not p.equal(before[name]) for name, p in module.named_parameters())
    unlabelled = [{"pixel_values": row["pixel_values"]} for row in data]
    pixels = torch.stack([row["pixel_values"] for row in data])
    found = fedfm.predict(tmp_path / "run", unlabelled, given=given)
    with torch.no_grad():
        mine = module.eval()(pixel_values=pixels)
    for name in READ & mine.keys():
        theirs = torch.tensor([row[name] for row in found["outputs"]])
        torch.testing.assert_close(theirs, mine[name], atol=1e-5, rtol=1e-4)
    fedfm.export(tmp_path / "run", "hf", tmp_path / "out", given=given)
    code = re.search(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)[1]
    made = {}
    exec(code.replace("FOLDER", str(tmp_path / "out")), made)
    with torch.no_grad():
        loaded = made["model"].eval()(pixel_values=pixels)
    for name in READ & mine.keys():
        torch.testing.assert_close(loaded[name], mine[name], atol=1e-5, rtol=1e-4)
