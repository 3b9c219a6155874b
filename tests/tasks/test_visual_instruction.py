"""The task ``visual_instruction``: conversations with images, for four families of models."""

import base64
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.utils import is_torchvision_available

import tiny_vision
from fedfm.api.execute import run
from fedfm.api.predict import export as export_run
from fedfm.api.predict import predict
from fedfm.core import attachments, tasks
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError, MissingExtra
from fedfm.models.export import export
from fedfm.models.load import load_model
from fedfm.models.preprocessing import IGNORE
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.tasks import _image_answers, _image_arguments
from fedfm.training import row_gradients

FAMILIES = tuple(tiny_vision.FAMILIES)
TASK = "visual_instruction"
LORA = AdaptationSpec("lora", rank=2)
BOTH = AdaptationSpec("lora", rank=2, targets=("language", "vision"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(scope="module")
def path(folder):
    return tiny_vision.save_rows(folder / "rows")


@pytest.fixture(scope="module")
def saved(folder):
    """A function that saves the tiny model of a family once."""

    def of(family):
        place = folder / family
        return place if place.exists() else tiny_vision.FAMILIES[family](place)

    return of


def read(path, **keys):
    return load_table(DataSpec(path=str(path), **keys), seed=0, task=TASK)


def load(saved, family, spec=LORA, **keys):
    return load_model(ModelSpec(str(saved(family)), max_length=96, adaptation=spec, **keys), classes=(), kind=TASK)


def write(folder, rows, name="some.jsonl"):
    file = folder / name
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def picture(folder, name="a.png", size=(20, 20), colour="red"):
    Image.new("RGB", size, colour).save(folder / name)
    return name


def ask(content, answer="it is red"):
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def opened(path):
    with Image.open(path) as image:
        return image.convert("RGB")


def texts_of(path):
    """The conversations of a file as a processor takes them, and their images."""
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        user, answer = (m["content"] for m in row["messages"])
        parts = user if isinstance(user, list) else None
        if parts is None:
            text = user.replace("<image>", "")
            parts = [*[{"type": "image"}] * user.count("<image>"), {"type": "text", "text": text}]
        images = [opened(path.parent / name) for name in row["images"]]
        turns = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        found.append((turns, images))
    return found


def processed(model, path, index):
    """A batch as transformers makes it: one call of the processor, and labels -100 before the answer."""
    processor = model.tools.processor
    rows = [texts_of(path)[i] for i in index]
    tokenizer = processor.tokenizer  # SmolVLM's processor asks its part for videos, which needs torchvision
    texts = [tokenizer.apply_chat_template(turns, tokenize=False) for turns, _ in rows]
    images = [of for _, of in rows]
    batch = dict(processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE)
    for row, (turns, of) in enumerate(rows):
        prompt = processor.tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        labels[row, : processor(text=[prompt], images=[of], return_tensors="pt")["input_ids"].shape[1]] = IGNORE
    return batch, labels


# --- rows -------------------------------------------------------------------------------------------------------------
def test_both_spellings_of_a_place_give_the_same_rows(tmp_path):
    name = picture(tmp_path)
    text = {"type": "text", "text": "what colour"}
    spellings = ([{"type": "image"}, text], "<image>what colour", [{"type": "image", "image": name}, text])
    tables = [
        read(write(tmp_path, [{"messages": ask(said), **({} if i == 2 else {"images": [name]})}]))
        for i, said in enumerate(spellings)
    ]
    data = base64.b64encode((tmp_path / name).read_bytes()).decode()
    inline = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    tables.append(read(write(tmp_path, [{"messages": ask([inline, text])}])))
    shared = {
        "conversations": [{"from": "human", "value": "<image>what colour"}, {"from": "gpt", "value": "it is red"}]
    }
    tables.append(read(write(tmp_path, [{**shared, "image": name}])))  # as LLaVA's files
    first = tables[0].inputs[0]
    for table in tables[1:]:
        assert table.inputs[0][:2] == first[:2] == ((("user", f"{attachments.IMAGE}what colour"),), "it is red")
        assert [file.sha256 for file in table.inputs[0][2]] == [file.sha256 for file in first[2]]


def test_sets_of_the_hub_have_contents_in_place_of_paths(tmp_path, path):
    import datasets

    images = [[str(path.parent / "0-0.png")], [str(path.parent / name) for name in ("3-0.png", "3-1.png")]]
    rows = [json.loads(path.read_text().splitlines()[i]) for i in (0, 3)]
    text = [{"type": "text", "text": "what colour"}]
    said = [ask([{"type": "image", "text": None}] * len(of) + text, text) for of in images]
    made = datasets.Dataset.from_dict({"messages": said, "images": images})
    made = made.cast_column("images", datasets.List(datasets.Image()))
    made.save_to_disk(str(tmp_path / "set"))
    made.map(lambda row: row).to_parquet(str(tmp_path / "rows.parquet"))
    of_hub = load_table(DataSpec(hub=str(tmp_path / "set"), test_fraction=0.0), seed=0, task=TASK)
    for table in (of_hub, read(tmp_path / "rows.parquet")):
        found = [[file.content() for file in row[2]] for row in table.inputs]
        assert found == [[(path.parent / name).read_bytes() for name in row["images"]] for row in rows]
        assert [row[0][0][1].count(attachments.IMAGE) for row in table.inputs] == [1, 2]


def test_images_without_places_stand_first_as_in_trl(tmp_path):
    a, b = picture(tmp_path), picture(tmp_path, "b.png", colour="blue")
    table = read(write(tmp_path, [{"messages": ask("what colour"), "images": [a, b]}]))
    assert table.inputs[0][0] == (("user", f"{attachments.IMAGE * 2}what colour"),)
    assert any("no message of column" in text for text in table.notices)


def test_messages_with_a_column_of_images_imply_the_task(path):
    assert load_table(DataSpec(path=str(path)), seed=0).kind == TASK
    assert tasks.implied_task(TASK).name == TASK


PLACED = ask("<image>what colour")
WRONG = {
    "more images than places": ({"messages": PLACED, "images": ["a.png", "a.png"]}, "1 place for images.*2 images"),
    "fewer": ({"messages": ask("<image><image>what"), "images": ["a.png"]}, "2 places for images.*1 image"),
    "none": ({"messages": PLACED, "images": []}, "1 place for images.*0 images"),
    "no place": ({"messages": ask("what colour"), "images": ["a.png"]}, "0 places for images.*1 image"),
    "missing": ({"messages": PLACED, "images": ["b.png"]}, "there is no file"),
    "damaged": ({"messages": PLACED, "images": ["damaged.png"]}, "damaged.png"),
    "no picture": ({"messages": PLACED, "images": ["text.png"]}, "not an image"),
    "in an answer": ({"messages": ask("what", "<image>"), "images": ["a.png"]}, "an image in an answer"),
    "in an earlier answer": (
        {"messages": [*ask("what", "<image>red"), *ask("which")], "images": ["a.png"]},
        "an image in an answer",
    ),
    "a number": ({"messages": PLACED, "images": [3]}, "the path of an image is expected"),
    "a web address": ({"messages": PLACED, "images": ["https://example.org/a.png"]}, "address on the web"),
    "a video": ({"messages": ask([{"type": "video"}]), "images": ["a.png"]}, 'a part of type "video"'),
    "the sign itself": ({"messages": ask("\ufffc what"), "images": ["a.png"]}, r"U\+FFFC"),
    "twice": ({"messages": ask([{"type": "image", "image": "a.png"}]), "images": ["a.png"]}, "one of the two"),
    "no messages": ({"messages": "what", "images": ["a.png"]}, "messages are expected"),
    "unanswered": ({"messages": PLACED[:1], "images": ["a.png"]}, "unanswered"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_refused_with_its_place(name, tmp_path):
    picture(tmp_path)
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "damaged.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no picture")
    row, words = WRONG[name]
    good = {"messages": PLACED, "images": ["a.png"]}
    with pytest.raises(InputError, match=words) as refusal:
        read(write(tmp_path, [good, row]))
    assert "line 2" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_without_images_names_the_task_that_fits(tmp_path):
    with pytest.raises(InputError, match=r'no column "images".*model.task = "instruction"'):
        read(write(tmp_path, [{"messages": ask("what colour")}]))


# --- tokens and images ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_the_processor_s_and_its_loss_that_of_transformers(family, saved, path):
    model, table, index = load(saved, family), read(path), [0, 3, 5, 7]
    made = _image_arguments.for_model(model.prepare(table, index).batch(range(4)))
    batch, labels = processed(model, path, index)
    for name, x in batch.items():
        assert torch.equal(made[name], x), name
    with model.evaluating():
        whole = model.module(**batch, labels=labels)
        torch.testing.assert_close(model.loss(model.prepare(table, index).batch(range(4))), whole.loss)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_same_alone_and_in_a_batch(family, saved, tmp_path):
    rows = tiny_vision.conversations(tmp_path, 4)
    rows.insert(1, {"messages": ask("what colour is red", "red"), "images": []})
    rows.append({"messages": [*rows[3]["messages"], *ask("<image>which colour", "blue")], "images": ["3-0.png"] * 2})
    rows[-1]["messages"][0] = {"role": "user", "content": "<image>what colour"}
    model, table = load(saved, family), read(write(tmp_path, rows))
    made = model.prepare(table, range(len(table)))
    with model.evaluating():
        sums, counts = model.task.row_losses(model, made.batch(range(len(made))))
        for i in range(len(made)):
            alone, count = model.task.row_losses(model, made.batch([i]))
            torch.testing.assert_close(alone[0], sums[i], rtol=1e-4, atol=1e-4)
            assert count[0] == counts[i]
    assert counts.tolist() == [4, 2, 4, 4, 4, 6]  # words and end token; of two answers both


@pytest.mark.parametrize("family", FAMILIES)
def test_images_that_exceed_the_memory_are_computed_for_each_batch(family, saved, path, monkeypatch):
    model, table = load(saved, family), read(path)
    kept = model.prepare(table, range(8))
    monkeypatch.setattr("fedfm.models.images.AT_ONCE", 0)
    later = model.prepare(table, range(8))
    assert next(iter(later.deferred.values())).source.values is None
    orders = [np.array([5, 3]), np.array([3, 0])]
    for a, b in zip(kept.each(orders), later.each(orders), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    before = later.sha256()
    assert kept.sha256() == before
    file = Path(next(iter(later.deferred.values())).source.files[3][0].source)
    content = file.read_bytes()
    file.write_bytes(content + b"\0")  # noise must not stay the same for rows that changed
    assert later.sha256() != before
    file.write_bytes(content)


def test_a_prompt_is_never_cut_and_a_cut_answer_is_announced(saved, path):
    table = read(path)
    spec = ModelSpec(str(saved("llava")), max_length=16, adaptation=LORA)
    model = load_model(spec, classes=(), kind=TASK)
    with pytest.raises(InputError, match=r"line 4: the prompt with 2 images has 17 tokens.*max_length = 21") as refusal:
        model.prepare(table, range(len(table)))
    assert "\n" not in str(refusal.value)
    made = model.prepare(table, [0])  # prompt 13, answer 4
    assert made.longest == 16
    ids = made.tokens[0].tolist()
    assert model.tools.tokenizer.eos_token_id not in ids  # the answer does not end where it is cut
    assert ids.count(4) == 4
    found = model.task.forewarnings({"training": table.take([0])}, model.tools)
    assert any("1 of 1 training rows have more than 16 tokens" in text for text in found)


def test_a_text_with_an_image_token_is_refused(saved, tmp_path):
    name = picture(tmp_path)
    table = read(write(tmp_path, [{"messages": ask("<image>what <|image_pad|>"), "images": [name]}]))
    with pytest.raises(InputError, match=r"line 1.*'<\|image_pad\|>', which the model reads as an image"):
        load(saved, "qwen").prepare(table, [0])


def test_a_processor_that_mixes_the_images_of_a_batch_is_refused(saved):
    processor = load(saved, "llava").tools.processor
    kind = type(processor)

    class Mixing(kind):
        def __call__(self, **settings):
            found = super().__call__(**settings)
            found["pixel_values"] = found["pixel_values"] * len(found["pixel_values"])
            return found

    mixing = Mixing(processor.image_processor, processor.tokenizer, patch_size=8)
    with pytest.raises(InputError, match="row by row"):
        _image_arguments.check(mixing, "some")


def test_an_export_keeps_the_settings_for_videos_that_are_not_used(saved, tmp_path):
    """The part of a processor for videos needs torchvision; other machines may have it."""
    folder = tmp_path / "qwen"
    shutil.copytree(saved("qwen"), folder)
    file = folder / "processor_config.json"
    settings = {"fps": 2.0, "video_processor_type": "Qwen2VLVideoProcessor"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"video_processor": settings}))
    if is_torchvision_available():
        pytest.skip("torchvision is installed, and transformers reads the settings")
    model = load_model(ModelSpec(str(folder), adaptation=LORA), classes=(), kind=TASK)
    model.tools.processor.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "processor_config.json").read_text())["video_processor"] == settings
    assert model.identity == load_model(ModelSpec(str(saved("qwen")), adaptation=LORA), classes=(), kind=TASK).identity


@pytest.mark.sample(
    "None-trained0-llava", "targets1-trained1-idefics3", "targets2-trained2-gemma3", "targets3-trained3-qwen"
)
# --- model ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("targets", "trained"),
    [
        (None, {False}),
        (("vision",), {True}),
        (("language", "vision"), {False, True}),
        (("vision", "all-linear"), {True}),
    ],
)
def test_lora_adapts_the_part_that_targets_name(family, targets, trained, saved, path):
    model = load(saved, family, AdaptationSpec("lora", rank=2, targets=targets))
    vision = {name: any(f".{part}." in name for part in model.parts.vision) for name in model.names}
    assert set(vision.values()) == trained
    assert any("trains" in text and "vision part" in text for text in model.notices)
    rows = model.prepare(read(path), range(4))
    model.loss(rows.batch(range(4))).backward()
    with_gradient = {vision[name] for name, p in model.live().items() if p.grad is not None and p.grad.any()}
    assert with_gradient == trained
    frozen = [p for name, p in model.module.named_parameters() if name not in vision]
    assert all(p.grad is None for p in frozen)


def test_a_target_of_the_other_part_is_refused(saved):
    with pytest.raises(InputError, match=r"no module 'gate_proj' in the vision part"):
        load(saved, "llava", AdaptationSpec("lora", rank=2, targets=("vision", "gate_proj")))


def test_a_model_without_images_is_refused(tmp_path):
    import tiny_text

    spec = ModelSpec(str(tiny_text.save_llama(tmp_path)), adaptation=LORA)
    with pytest.raises(InputError, match="'llama', which does not read texts with images"):
        load_model(spec, classes=(), kind=TASK)


def test_a_template_without_images_is_refused(saved):
    with pytest.raises(InputError, match="a text has no place for images"):
        load(saved, "llava", template="alpaca")


@pytest.mark.parametrize("spec", [LORA, BOTH], ids=["language", "both"])
def test_gradients_of_single_rows_are_those_of_rows_alone(spec, saved, tmp_path):
    """Also if a batch has as many images as rows, of which some have two and some none."""
    rows = tiny_vision.conversations(tmp_path, 4)
    rows[1] = {"messages": ask("what colour is red", "red"), "images": []}
    model, table = load(saved, "llava", spec), read(write(tmp_path, rows))
    made, live, index = model.prepare(table, range(4)), model.live(), np.array([3, 1, 0, 2])
    assert int(made.tensors["pixel_values.shape"][:, 0].sum()) == 4
    whole = row_gradients.clipped_sum(model, made, index, 0.01, live)
    alone = torch.zeros_like(whole)
    for i in index:
        model.module.zero_grad()
        model.loss(made.batch([i])).backward()
        g = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in live.values()])
        alone += g * min(1.0, 0.01 / float(g.norm()))
    torch.testing.assert_close(whole, alone, rtol=1e-3, atol=1e-6)


@pytest.mark.sample("llava", "smolvlm", "qwen")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_the_same_alone_in_a_batch_and_by_transformers(family, saved, path):
    model, table = load(saved, family, answer_tokens=4), read(path)
    made = model.prepare(table, range(6))
    together = _image_answers.answers(model, made)
    for i, (turns, images) in enumerate(texts_of(path)[:6]):
        alone = _image_answers.answers(model, made.take([i]))[0]
        assert alone == together[i]
        processor = model.tools.processor
        prompt = processor.tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[prompt], images=[images], return_tensors="pt")
        with torch.no_grad():
            said = model.module.generate(**inputs, max_new_tokens=4, do_sample=False)
        tokens = said[0, inputs["input_ids"].shape[1] :].tolist()
        assert list(alone.tokens) == tokens


# --- runs -------------------------------------------------------------------------------------------------------------
def experiment(path, model, **adaptation):
    return {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(model), "task": TASK, "answer_tokens": 4, "adaptation": adaptation},
        "method": {"name": "fedavg", "rounds": 1, "local": {"name": "adamw", "learning_rate": 0.01, "batch_size": 4}},
        "run": {"seed": 1, "workers": 1},
    }


def code_of(folder):
    """All code of a README, for its folder."""
    text = (folder / "README.md").read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.S)).replace("FOLDER", str(folder))


@pytest.mark.sample("hf-llava")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT on transformers 5
@pytest.mark.parametrize("family", ["llava", "idefics3"])
@pytest.mark.parametrize("to", ["hf", "peft"])
def test_an_export_answers_as_predict(family, to, saved, path, tmp_path, capsys):
    run(experiment(path, saved(family), name="lora", rank=2, targets=["language", "vision"]), tmp_path / "run")
    export_run(tmp_path / "run", to, tmp_path / "out")
    image = opened(path.parent / "0-0.png")
    code = code_of(tmp_path / "out").replace("What is this?", "what colour is the picture")
    space = {"picture": image}
    exec(code.replace("do_sample=False", "do_sample=False, max_new_tokens=4"), space)
    said = capsys.readouterr().out.splitlines()[-1]
    found = predict(tmp_path / "run", path)
    assert found["answers"][0] == said
    table = read(path)
    model = load(saved, family, BOTH)
    from safetensors.torch import load_file

    if to == "peft":
        weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert any("vision" in name for name in weights)
    batch, labels = processed(model, path, [0, 3])
    with torch.no_grad():
        loss = space["model"](**batch, labels=labels).loss
    one = predict(tmp_path / "run", write(path.parent, [json.loads(path.read_text().splitlines()[i]) for i in (0, 3)]))
    assert one["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert len(table) == len(found["answers"])


@pytest.mark.sample("llava")
@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_a_local_pass_is_that_of_the_trainer_of_transformers(family, saved, path, tmp_path):
    """Plain SGD over all rows in one batch: both see the same batch, so that the losses agree."""
    from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

    made = experiment(path, saved(family), name="full")
    made["data"] = {"path": str(path), "test_fraction": 0.0, "partition": {"name": "iid", "clients": 1}}
    made["method"] = {"name": "fedavg", "rounds": 3, "local": {"name": "sgd", "learning_rate": 0.1, "batch_size": 64}}
    run(made, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    model = load(saved, family, AdaptationSpec("full"))

    def collate(index):
        batch, labels = processed(model, path, index)
        return batch | {"labels": labels}

    how = {"output_dir": str(tmp_path / "t"), "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    how |= {"per_device_train_batch_size": 64, "num_train_epochs": 3, "report_to": [], "save_strategy": "no"}
    how |= {"max_grad_norm": 0.0, "use_cpu": True, "logging_steps": 1, "remove_unused_columns": False}
    theirs = AutoModelForImageTextToText.from_pretrained(saved(family))
    trainer = Trainer(theirs, TrainingArguments(**how), collate, list(range(20)))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert [line["train_loss"] for line in lines[1:]] == pytest.approx(losses, abs=1e-5)


@pytest.mark.proof  # trl takes seconds to import
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_has_the_loss_of_trl(family, saved, path):
    trl = pytest.importorskip("trl.trainer.sft_trainer", reason="trl is not installed")
    if family == "smolvlm" and not is_torchvision_available():
        pytest.skip("a processor of videos needs torchvision, and TRL calls it")
    model, table, index = load(saved, family), read(path), [0, 2, 5]
    collate = trl.DataCollatorForVisionLanguageModeling(model.tools.processor, completion_only_loss=True)
    found = collate(
        [
            {"prompt": turns[:1], "completion": turns[1:], "images": images}
            for turns, images in (texts_of(path)[i] for i in index)
        ]
    )
    with torch.no_grad():
        theirs = model.module(**found).loss
        torch.testing.assert_close(model.loss(model.prepare(table, index).batch(range(3))), theirs, rtol=1e-5, atol=0)


def test_the_package_that_the_processor_of_smolvlm_needs_is_named(saved, monkeypatch):
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    with pytest.raises(MissingExtra, match=r'needs num2words: pip install "fedfm\[vision\]"'):
        load(saved, "smolvlm")


def test_an_export_says_what_a_processor_of_videos_needs(saved, path, tmp_path):
    for family, needs in (("smolvlm", True), ("llava", False)):
        model = load(saved, family)
        export(model, model.params(), "peft", tmp_path / family)
        text = model.task.about_export("peft", tmp_path / family)
        assert ("needs torchvision" in text) == needs


def test_shuffled_answers_belong_to_other_images(path):
    table = read(path)
    other = tasks.find(TASK).shuffle_targets(table, np.random.default_rng(0))
    assert [row[0] for row in other.inputs] == [row[0] for row in table.inputs]
    assert [row[2] for row in other.inputs] == [row[2] for row in table.inputs]
    assert sorted(row[1] for row in other.inputs) == sorted(row[1] for row in table.inputs)
    assert [row[1] for row in other.inputs] != [row[1] for row in table.inputs]
