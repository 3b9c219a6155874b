"""Segmentation: rows of images and masks, scores against scikit-learn, transformers' loss and Trainer, predictions."""

import io
import json
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import accuracy_score, f1_score, jaccard_score

import tiny_segformer
from fedfm.api.execute import run
from fedfm.api.predict import export, predict
from fedfm.api.prediction_files import write
from fedfm.config.experiment import Experiment
from fedfm.core.attachments import Attachment
from fedfm.core.rows import Rows
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.pixel_heads import pixel_head, pixel_map
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.runtime.coarse_scores import coarse
from fedfm.tasks import _mask_files
from fedfm.tasks.segmentation import Segmentation

TASK = "segmentation"


def load(path, **keys):
    return load_table(DataSpec(path=str(path), **keys), seed=0, task=TASK)


def model_of(folder, table, adaptation="full", **keys):
    spec = ModelSpec(str(folder), adaptation=AdaptationSpec(adaptation, rank=2), **keys)
    return load_model(spec, classes=table.classes, kind=table.kind, task=TASK)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with tiny models and a folder of shapes."""
    folder = tmp_path_factory.mktemp("segmentation")
    quick = {"drop_path_rate": 0.0, "classifier_dropout_prob": 0.0}
    tiny_segformer.save(folder / "model", classes=2, **quick)
    tiny_segformer.save(folder / "three", classes=3, **quick)
    tiny_segformer.folder(folder / "shapes", {"train": 12, "val": 2, "test": 6})
    return folder


@pytest.fixture
def few(tmp_path):
    """A folder of three images with masks, to be changed."""
    return tiny_segformer.folder(tmp_path / "few", {"": 3})


def put(path, numbers, mode=None):
    image = Image.fromarray(np.asarray(numbers))
    (image if mode is None else image.convert(mode)).save(path)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_with_its_splits(place):
    table = load(place / "shapes")
    assert table.kind == "masked"
    assert table.classes == ("0", "1", "2")
    assert [len(table.rows(split)) for split in ("train", "val", "test")] == [12, 2, 6]
    assert table.labels is None
    assert Path(table.inputs[0][0].source).name == Path(table.inputs[0][1].source).name == "000.png"


def test_splits_may_be_below_images_and_folders_become_a_column(few):
    for name in ("images", "masks"):
        for i, place in enumerate(("train/north", "train/south", "test/north")):
            (few / name / place).mkdir(parents=True)
            (few / name / f"{i:03d}.png").rename(few / name / place / f"{i}{'_mask' if name == 'masks' else ''}.png")
    table = load(few)
    assert table.split.tolist() == ["test", "train", "train"]
    assert table.columns["folder"].tolist() == ["north", "north", "south"]


def test_metadata_gives_columns(few):
    lines = "".join(f"images/{i:03d}.png,{'ns'[i % 2]}\n" for i in range(3))
    (few / "metadata.csv").write_text(f"file_name,hospital\n{lines}")
    assert load(few, test_fraction=0).columns["hospital"].tolist() == ["n", "s", "n"]


def test_columns_hold_paths_or_contents(few):
    rows = [{"image": f"images/{i:03d}.png", "mask": f"masks/{i:03d}.png"} for i in range(3)]
    (few / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    table = load_table(DataSpec(path=str(few / "rows.jsonl"), test_fraction=0), seed=0)  # the columns imply the task
    assert table.kind == "masked"
    import pyarrow
    from pyarrow import parquet

    inside = {
        key: [{"bytes": (few / row[key]).read_bytes(), "path": None} for row in rows] for key in ("image", "mask")
    }
    parquet.write_table(pyarrow.table(inside), few / "rows.parquet")
    from fedfm.data.table import fingerprint

    other = load(few / "rows.parquet", test_fraction=0)
    assert isinstance(other.inputs[0][1].source, bytes)
    assert fingerprint(other) == fingerprint(table)


@pytest.mark.parametrize("text", ['["back", "box", "ball"]', '{"0": "back", "1": "box", "2": "ball", "255": "void"}'])
def test_classes_have_names(few, text):
    (few / "classes.json").write_text(text)
    assert load(few, test_fraction=0).classes == ("back", "box", "ball")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('["a", "b"]', "number 2, and classes.json names the classes 0 to 1"),
        ('{"1": "a"}', "not 0 to 0"),
        ("{", "list"),
    ],
)
def test_names_that_do_not_fit_are_refused(few, text, words):
    (few / "classes.json").write_text(text)
    with pytest.raises(InputError, match=words):
        load(few, test_fraction=0)


def wrong_size(few):
    put(few / "masks/001.png", np.zeros((32, 30), np.uint8))


def colours(few):
    put(few / "masks/001.png", np.zeros((32, 32, 3), np.uint8))


def jpeg(few):
    put(few / "masks/001.jpg", np.zeros((32, 32), np.uint8))
    (few / "masks/001.png").unlink()


def no_mask(few):
    (few / "masks/001.png").unlink()


def no_image(few):
    (few / "images/001.png").unlink()


def cut_mask(few):
    (few / "masks/001.png").write_bytes((few / "masks/001.png").read_bytes()[:60])


def cut_image(few):
    (few / "images/001.png").write_bytes(b"")


def binary(few):
    for i in range(3):
        put(few / f"masks/{i:03d}.png", np.eye(32, dtype=np.uint8) * 255)


def grey(few):
    put(few / "masks/001.png", (np.arange(1024).reshape(32, 32) // 8).astype(np.uint8))


def far(few):
    put(few / "masks/001.png", np.full((32, 32), 128, np.uint8))


def void(few):
    for i in range(3):
        put(few / f"masks/{i:03d}.png", np.full((32, 32), 255, np.uint8))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (wrong_size, r"images/001.png has 32 x 32 pixels and the mask .*/masks/001.png has 30 x 32"),
        (colours, "masks/001.png has colours; expected one class number per pixel"),
        (jpeg, "masks/001.jpg is a JPEG, which may change numbers"),
        (no_mask, r"images/001.png has no mask 001.png in .*/masks .*: add it, or remove the image"),
        (no_image, "masks/001.png has no image of this name"),
        (cut_mask, "masks/001.png"),
        (cut_image, "images/001.png"),
        (binary, "only 0 and 255, .*save the second class as 1"),
        (grey, "hold 128 numbers"),
        (far, r"hold 4 numbers, 0, 1, 2, 128, up to 128: .*name each in classes.json"),
        (void, "all masks hold only 255"),
    ],
)
def test_rows_that_cannot_be_read_are_refused_with_their_place(few, spoil, words):
    spoil(few)
    with pytest.raises(InputError, match=words) as refusal:
        load(few, test_fraction=0)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"image": "", "mask": "masks/000.png"}, "line 1.*the path of an image is expected"),
        ({"image": "images/000.png", "mask": None}, "line 1.*the path of a mask is expected"),
        ({"image": "images/000.png", "mask": "masks/0.png"}, "line 1.*there is no file"),
        ({"image": "images/000.png", "seg": "masks/000.png"}, 'no column "mask" .data.mask'),
    ],
)
def test_cells_that_are_no_files_are_refused(few, cells, words):
    (few / "rows.jsonl").write_text(f"{json.dumps(cells)}\n")
    with pytest.raises(InputError, match=words):
        load(few / "rows.jsonl", test_fraction=0)


def test_other_folders_are_refused_with_the_layout(tmp_path, few):
    (tmp_path / "other" / "cat").mkdir(parents=True)
    put(tmp_path / "other" / "cat" / "1.png", np.zeros((4, 4), np.uint8))
    with pytest.raises(InputError, match="no folders images and masks: expected train/images, train/masks"):
        load(tmp_path / "other")
    shutil.rmtree(few / "masks")
    with pytest.raises(InputError, match=r"there is no folder .*masks"):
        load(few)


# --- masks ------------------------------------------------------------------------------------------------------------


def grey_png(numbers, bits):
    """A PNG of grey with few bits; Pillow writes none, and stretches 2 and 4 bits to 0..255 when it reads them."""

    def chunk(kind, data):
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    lines = b""
    for line in numbers.tolist():
        packed = "".join(format(number, f"0{bits}b") for number in line)
        packed = packed.ljust(-(-len(packed) // 8) * 8, "0")
        lines += b"\0" + int(packed, 2).to_bytes(len(packed) // 8)
    height, width = numbers.shape
    head = width.to_bytes(4) + height.to_bytes(4) + bytes([bits, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["1", "2", "4", "8", "16", "P", "tiff", "exif"]))
def test_a_mask_is_read_to_the_number(seed, form):
    rng = np.random.default_rng(seed)
    most = {"1": 2, "2": 4, "4": 16, "16": 999}.get(form, 250)
    numbers, buffer = rng.integers(0, most, rng.integers(1, 9, 2)), io.BytesIO()
    if form in ("1", "2", "4"):
        buffer = io.BytesIO(grey_png(numbers, int(form)))
    elif form == "P":
        image = Image.fromarray(numbers.astype(np.uint8), "P")
        image.putpalette(rng.integers(0, 255, 768).tolist())
        image.save(buffer, "PNG")
    elif form == "exif":
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(np.rot90(numbers).astype(np.uint8)).save(buffer, "PNG", exif=exif)
    else:
        kind = np.uint16 if form == "16" else np.uint8
        Image.fromarray(numbers.astype(kind)).save(buffer, "TIFF" if form == "tiff" else "PNG")
    assert (_mask_files.read(Attachment(buffer.getvalue())) == numbers).all()
    assert (_mask_files.read(Attachment(_mask_files.png(numbers))) == numbers).all()


def test_image_and_mask_are_turned_by_their_exif_data(few):
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("images", "masks"):
        with Image.open(few / name / "001.png") as image:
            image.crop((0, 0, 32, 24)).save(few / name / "001.png", exif=exif)
    table = load(few, test_fraction=0)
    assert _mask_files.size_of(table.inputs[1][0]) == (24, 32)
    with Image.open(few / "masks" / "001.png") as image:
        image.save(few / "masks" / "001.png")  # without EXIF data, the mask is no longer turned
    with pytest.raises(InputError, match="turned by their EXIF orientation"):
        load(few, test_fraction=0)


def test_masks_are_resized_as_by_the_image_processor_and_ignored_pixels_do_not_count(few, place):
    from transformers import SegformerImageProcessorPil

    put(few / "images/001.png", np.zeros((50, 41, 3), np.uint8))
    put(few / "masks/001.png", np.random.default_rng(0).choice([0, 1, 2, 255], (50, 41)).astype(np.uint8))
    table = load(few, test_fraction=0)
    model = model_of(place / "model", table)
    rows = model.prepare(table, range(3))
    with quiet():
        processor = SegformerImageProcessorPil.from_pretrained(place / "model")
        items = [Image.open(few / "images" / "001.png").convert("RGB")], [Image.open(few / "masks" / "001.png")]
        found = processor(*items, return_tensors="pt")
    wanted = found["labels"][0]
    assert torch.equal(rows.tensors["targets"][1].long(), torch.where(wanted == 255, -100, wanted))
    assert torch.equal(rows.tensors["pixel_values"][1], found["pixel_values"][0])
    assert model.count_targets(rows.batch([1])) == int((wanted != 255).sum())
    counting = model_of(place / "model", table, ignore_index=2)
    with pytest.raises(
        InputError, match=r"masks/001.png holds the number 255, which is not a class: .*ignore_index = 2"
    ):
        counting.prepare(table, range(3))


def test_large_images_and_masks_are_read_batch_by_batch(place):
    table = load(place / "shapes")
    model = model_of(place / "model", table)
    now, later = model.prepare(table, range(12)), model.prepare(table, range(12), most=0)
    assert set(later.deferred) == {"pixel_values", "targets"}
    assert model.evaluate(now) == model.evaluate(later)
    batch = later.batch([3, 4])
    assert torch.equal(batch["targets"], now.tensors["targets"][3:5])


def test_clients_that_lack_a_class_or_name_others_share_the_numbers(tmp_path, place):
    tiny_segformer.folder(tmp_path / "a", {"": 4}, kinds=1)
    tiny_segformer.folder(tmp_path / "b", {"": 4}, kinds=2)
    (tmp_path / "a" / "classes.json").write_text('["back", "box"]')
    (tmp_path / "b" / "classes.json").write_text('["back", "box", "ball"]')
    table = load_table(DataSpec(clients={k: str(tmp_path / k) for k in "ab"}, test_fraction=0), seed=0, task=TASK)
    assert table.classes == ("back", "ball", "box")  # sorted, as the lists differ
    rows = model_of(place / "model", table).prepare(table, range(8)).tensors["targets"]
    assert rows[:4].unique().tolist() == [0, 2]
    assert rows[4:].unique().tolist() == [0, 1, 2]


def test_notices_name_classes_without_training_pixels_and_pixels_that_do_not_count(place, few):
    put(few / "masks/001.png", np.full((32, 32), 255, np.uint8))
    table = load(few, test_fraction=0)
    task = Segmentation()
    found = task.forewarnings({"training": table.take([1]), "test": table.take([0, 2])}, None)
    assert found[0].startswith('only test masks have pixels of "0", "1", "2"')
    assert found[1].startswith("100 % of the pixels of training masks are 255")


# --- loss and scores --------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 3), min_size=2, max_size=8))
def test_scores_over_clients_are_those_of_scikit_learn_on_all_pixels(seed, holders):
    rng, n, task = np.random.default_rng(seed), len(holders), Segmentation()
    logits = torch.tensor(rng.normal(size=(n, 4, 5, 6)), dtype=torch.float32)
    targets = torch.tensor(rng.choice([0, 1, 2, -100], (n, 5, 6)))  # class 3 may be predicted, and is never right
    task_model = type("Named", (), {"classes": tuple("abcd")})
    parts = [np.flatnonzero(np.array(holders) == client) for client in range(5)]
    found = [task.scores_of(task_model, Rows({"targets": targets[i]}), logits[i]) for i in parts]
    joined, few = task.join_scores(found), task.join_scores([coarse(part, task) for part in found])
    counts = targets != -100
    right, said = targets[counts].numpy(), logits.argmax(1)[counts].numpy()
    there = sorted({*right, *said})
    assert joined["accuracy"] == pytest.approx(accuracy_score(right, said))
    assert joined["mean_iou"] == pytest.approx(jaccard_score(right, said, labels=there, average="macro"))
    assert joined["dice"] == pytest.approx(f1_score(right, said, labels=there, average="macro"))
    assert few["mean_iou"] == pytest.approx(joined["mean_iou"], rel=1e-3, abs=1e-4)
    for name, of in (("iou_by_class", jaccard_score), ("dice_by_class", f1_score)):
        each = of(right, said, labels=there, average=None)
        assert [joined[name][i] for i in there] == pytest.approx(each.tolist())
        assert all(joined[name][i] is None for i in range(4) if i not in there)
    loss = torch.nn.functional.cross_entropy(logits.double(), targets)
    assert joined["loss"] == pytest.approx(float(loss), rel=1e-6)


def test_the_loss_is_that_of_segformer(place):
    table = load(place / "shapes")
    model = model_of(place / "three", table)
    batch = model.prepare(table, range(6)).batch(range(6))
    targets = batch["targets"].long()
    targets[0, :9], targets[5] = -100, -100
    batch["targets"] = targets
    with torch.no_grad():
        own = model.module(batch["pixel_values"], labels=torch.where(targets == -100, 255, targets)).loss
        found = model.loss(batch)
        sums, counts = model.task.row_losses(model, batch)
        none = model.loss({**batch, "targets": torch.full_like(targets, -100)})
    assert float(found) == pytest.approx(float(own), abs=1e-6)
    assert float(sums.sum() / counts.sum()) == pytest.approx(float(own), abs=1e-6)
    assert counts[5] == sums[5] == 0
    logits, flat = model.flat(model.logits(batch), batch)
    assert logits.shape[0] == flat.shape[0] == 6 * 32 * 32
    assert float(none) == 0.0


def tables(place, adaptation="full", **method):
    local = {"name": "sgd", "learning_rate": 0.1, "batch_size": 16}
    return {
        "data": {"path": str(place / "shapes"), "partition": {"name": "iid", "clients": 1}},
        "model": {"name": str(place / "model"), "task": TASK, "adaptation": {"name": adaptation, "rank": 2}},
        "method": {"name": "fedavg", "rounds": 2, "local": local} | method,
        "run": {"seed": 1, "workers": 1},
    }


def test_a_local_pass_is_that_of_the_trainer_of_transformers(place, tmp_path):
    """Plain SGD over all rows in one batch, with batch norm in training mode: both see the same batch."""
    from transformers import SegformerForSemanticSegmentation, Trainer, TrainingArguments

    table = load(place / "shapes")
    spec = ModelSpec(str(place / "model"), adaptation=AdaptationSpec("full"))
    ours = load_model(spec, classes=table.classes, kind=table.kind, task=TASK, seed=1)
    every = ours.prepare(table, table.rows("train")).batch(range(12))
    data = [{"pixel_values": every["pixel_values"][i], "labels": every["targets"][i].long()} for i in range(12)]
    theirs = SegformerForSemanticSegmentation(ours.module.config)
    theirs.load_state_dict(ours.module.state_dict())
    how = {"output_dir": str(tmp_path / "t"), "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    how |= {"per_device_train_batch_size": 16, "num_train_epochs": 3, "report_to": [], "save_strategy": "no"}
    trainer = Trainer(theirs, TrainingArguments(**how, max_grad_norm=0.0, use_cpu=True, logging_steps=1), None, data)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    run(tables(place, rounds=3), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train_loss"] for line in lines[1:]] == pytest.approx(losses, abs=1e-5)


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_trained_decoder_stays_and_its_last_map_is_new(place):
    table = load(place / "shapes")
    from transformers import SegformerForSemanticSegmentation

    with quiet():
        stored = SegformerForSemanticSegmentation.from_pretrained(place / "three").state_dict()
    model = model_of(place / "three", table)
    state = model.module.state_dict()
    changed = {name for name, tensor in stored.items() if not torch.equal(tensor, state[name])}
    assert changed == {"decode_head.classifier.weight"}  # its bias is zero in both
    head = model_of(place / "three", table, "head")
    assert {name.partition(".")[0] for name in head.names} == {"decode_head"}
    assert head.module.config.id2label == {0: "0", 1: "1", 2: "2"}


VISION = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
STAGES = {"image_size": 32, "patch_size": 8, "out_indices": [1, 2, 3, 4], "pool_scales": [1, 2]}


@pytest.mark.parametrize("classes", [5, 32])  # 32 is the width of the decoder, too
@pytest.mark.parametrize(
    ("family", "keys", "path"),
    [
        ("Beit", VISION | STAGES, "decode_head.classifier"),
        ("Data2VecVision", VISION | STAGES, "decode_head.classifier"),
        ("UperNet", {"hidden_size": 32, "pool_scales": [1, 2]}, "decode_head.classifier"),
        ("DPT", VISION | {"backbone_out_indices": [0, 1, 2, 3], "fusion_hidden_size": 32}, "head.head.4"),
    ],
)
def test_the_map_to_the_classes_is_found_wherever_a_decoder_defines_it(family, keys, path, classes):
    import transformers

    if family == "UperNet":
        widths = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "out_features": ["stage1", "stage2"]}
        keys = keys | {"backbone_config": transformers.ConvNextConfig(**widths)}
    config = getattr(transformers, f"{family}Config")(**keys, num_labels=classes, use_auxiliary_head=False)
    with torch.device("meta"):
        module = getattr(transformers, f"{family}ForSemanticSegmentation")(config)
    assert pixel_map(module, pixel_head(module)) == path
    assert module.get_submodule(path).out_channels == classes


def test_the_decoder_may_be_new(place, tmp_path):
    """The usual start is an encoder that was trained on classes of images."""
    from transformers import SegformerConfig, SegformerForImageClassification

    with quiet():
        config = SegformerConfig.from_pretrained(place / "model")
        SegformerForImageClassification(config).save_pretrained(tmp_path)
    shutil.copy(place / "model" / "preprocessor_config.json", tmp_path)
    model = model_of(tmp_path, load(place / "shapes"), "lora")
    assert any("are new here and untrained" in notice for notice in model.notices)
    assert any("decode_head.linear_fuse" in name for name in model.names)


def changed(source, folder, file, **keys):
    shutil.copytree(source, folder)
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"do_center_crop": True, "crop_size": {"height": 32, "width": 32}}, "has do_center_crop = true"),
        ({"size": {"shortest_edge": 32}}, "masks are resized to one size with their images"),
    ],
)
def test_an_image_processor_that_cuts_is_refused(place, tmp_path, keys, words):
    folder = changed(place / "model", tmp_path / "other", "preprocessor_config.json", **keys)
    with pytest.raises(InputError, match=words):
        model_of(folder, load(place / "shapes"))


def test_models_without_scores_for_pixels_are_refused(place, tmp_path):
    import transformers as t

    table = load(place / "shapes")
    for config, words in (
        (t.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2), "no decoder for pixels"),
        (t.Mask2FormerConfig(), "matches masks with queries image by image"),
    ):
        config.save_pretrained(tmp_path / config.model_type)
        shutil.copy(place / "model" / "preprocessor_config.json", tmp_path / config.model_type)
        with pytest.raises(InputError, match=words):
            model_of(tmp_path / config.model_type, table, weights="random")
    one = tiny_segformer.folder(tmp_path / "one", {"": 2}, kinds=0)
    with pytest.raises(InputError, match="the masks hold one class"):
        model_of(place / "model", load(one, test_fraction=0))


@pytest.mark.parametrize("name", ["fedpft", "fedncm", "ccvr", "average", "kd"])
def test_methods_that_need_one_class_a_row_are_refused(place, name):
    made = tables(place, "head")
    made["method"] = {"name": name}
    with pytest.raises(InputError, match='rows of task "segmentation" have no single class'):
        Experiment.from_dict(made)


def test_rows_of_a_batch_with_batch_norm_in_training_are_not_independent(place):
    table = load(place / "shapes")
    assert "batch norm" in model_of(place / "model", table).mixes_rows
    assert not model_of(place / "model", table, "lora").mixes_rows


def test_masks_of_an_attacker_are_those_of_other_rows(place):
    table = load(place / "shapes")
    shuffled = Segmentation().shuffle_targets(table, np.random.default_rng(0))
    assert [row[0] for row in shuffled.inputs] == [row[0] for row in table.inputs]
    assert sorted(row[1].source for row in shuffled.inputs) == sorted(row[1].source for row in table.inputs)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ran(place, tmp_path_factory):
    """The directory of a run with LoRA."""
    out = tmp_path_factory.mktemp("ran") / "run"
    run(tables(place, "lora"), out)
    return out


def test_predictions_are_masks_in_the_size_of_their_images(place, ran, few, tmp_path):
    put(few / "images/001.png", np.zeros((50, 41, 3), np.uint8))
    shutil.rmtree(few / "masks")
    found = predict(ran, few, files=tmp_path / "new")
    assert found["masks"] == ["new/000.png", "new/001.png", "new/002.png"]
    assert found["files"] == ["images/000.png", "images/001.png", "images/002.png"]
    assert [_mask_files.size_of(Attachment(str(tmp_path / name))) for name in found["masks"]] == [
        (32, 32),
        (41, 50),
        (32, 32),
    ]
    again = predict(ran, few / "images", files=tmp_path / "new")  # a folder of images alone; the first folder stays
    assert again["masks"][0] == "new-2/000.png"
    for first, second in zip(found["masks"], again["masks"], strict=True):
        assert (tmp_path / first).read_bytes() == (tmp_path / second).read_bytes()
    inside = predict(ran, few)["masks"]
    assert Path(inside[0]).parent == (ran / "predictions" / "files").absolute()
    for ending in ("csv", "json", "jsonl"):
        write(found, tmp_path / f"new.{ending}")
    assert (tmp_path / "new.csv").read_text().splitlines()[:2] == ["row,file,masks", "0,images/000.png,new/000.png"]
    assert json.loads((tmp_path / "new.jsonl").read_text().splitlines()[1])["masks"] == "new/001.png"


def test_an_export_gives_the_same_masks_in_the_pipeline_of_transformers(place, ran, tmp_path):
    from transformers import AutoImageProcessor, AutoModelForSemanticSegmentation, pipeline

    export(ran, "hf", tmp_path / "hf")
    with quiet():
        model = AutoModelForSemanticSegmentation.from_pretrained(tmp_path / "hf")
        segment = pipeline(
            "image-segmentation",
            str(tmp_path / "hf"),
            image_processor=AutoImageProcessor.from_pretrained(tmp_path / "hf"),
        )
    assert model.config.id2label == {0: "0", 1: "1", 2: "2"}
    assert model.config.semantic_loss_ignore_index == 255
    found = predict(ran, place / "shapes" / "test" / "images", files=tmp_path / "masks")
    for name, mask in zip(found["files"], found["masks"], strict=True):
        numbers = _mask_files.read(Attachment(str(tmp_path / mask)))
        parts = segment(str(place / "shapes" / "test" / "images" / name))
        assert {part["label"] for part in parts} == {str(number) for number in np.unique(numbers)}
        for part in parts:
            assert ((np.asarray(part["mask"]) > 0) == (numbers == int(part["label"]))).all()


def test_an_adapter_is_loaded_by_peft(place, ran, tmp_path):
    from peft import PeftModel
    from transformers import SegformerForSemanticSegmentation

    export(ran, "peft", tmp_path / "peft")
    table = load(place / "shapes")
    ours = model_of(place / "model", table, "lora")
    with quiet():
        base = SegformerForSemanticSegmentation.from_pretrained(
            place / "model", num_labels=3, ignore_mismatched_sizes=True
        )
        theirs = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
        export(ran, "hf", tmp_path / "hf")
        merged = SegformerForSemanticSegmentation.from_pretrained(tmp_path / "hf").eval()
    batch = ours.prepare(table, [0, 1]).batch([0, 1])
    with torch.no_grad():
        one, other = (m(pixel_values=batch["pixel_values"]).logits for m in (theirs, merged))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_report_has_a_table_by_class(ran):
    from fedfm.reports import html

    text = html.write(ran).read_text()
    assert re.search(r"Scores of each class.*<td[^>]*>2</td>", text, re.DOTALL)
    assert "<img" not in text


def test_a_report_shows_test_rows_if_it_is_asked(ran, tmp_path, capsys):
    from fedfm.cli import main
    from fedfm.reports import html

    run_dir = shutil.copytree(ran, tmp_path / "run")
    assert main(["report", str(run_dir), "--rows", "4"]) == 0
    text = (run_dir / "report.html").read_text()
    assert re.findall(r'alt="(\d+.png)"', text) == [f"{i:03d}.png" for i in range(4)]
    assert "img-src data:" in text
    assert main(["report", str(run_dir), "--rows", "0"]) == 2
    html.renew(run_dir)
    assert "<img" not in (run_dir / "report.html").read_text()
    capsys.readouterr()
