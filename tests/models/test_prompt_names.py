"""Names of classes that are identifiers are told before they go into prompts; names in words say nothing."""

import pytest
from tiny_models import images, load

import tiny_clip
from fedfm.models.prompt_names import notices

PHOTO = ("a photo of a {}.",)


@pytest.mark.parametrize(
    ("names", "prompt"),
    [
        (["n01440764_tench", "n01443537_goldfish", "n01484850_shark"], "a photo of a n01440764 tench."),
        (["001.Black_footed_Albatross", "002.Laysan_Albatross"], "a photo of a 001.Black footed Albatross."),
        (["1_normal", "2_benign", "3_malignant"], "a photo of a 1 normal."),
        (["AnnualCrop", "Forest", "HerbaceousVegetation", "River"], "a photo of a AnnualCrop."),
        (["dogs/poodle", "dogs/beagle", "cats/siamese"], "a photo of a dogs/poodle."),
    ],
)
def test_identifiers_are_reported_with_a_prompt(names, prompt):
    (found,) = notices(names, PHOTO)
    assert f'"{prompt}"' in found


@pytest.mark.parametrize(
    "names",
    [
        ["golden_retriever", "tabby cat", "T-shirt", "x-ray"],
        ["McDonald", "MacBook", "iPhone", "eBay"],
        ["2012 BMW X3", "2007 Audi S4", "1991 Volvo 240"],
        ["737-300", "A320", "DC-10", "747-400"],
        ["CNV", "DME", "DRUSEN", "NORMAL"],
        ["USAtoday", "cat", "dog", "bird", "cow", "fox"],
        ["Émile", "São Paulo", "日本", "Straße"],
    ],
)
def test_words_say_nothing(names):
    assert notices(names, PHOTO) == []


def test_identifiers_as_class_names_are_a_notice_of_the_model(tmp_path):
    from dataclasses import replace

    folder = tiny_clip.save("clip", tmp_path / "clip")
    table = images()
    assert not [n for n in load(folder, table, "lora", task="zero_shot").notices if "go into prompts" in n]
    coded = replace(table, classes=tuple(f"n0{i}_{name}" for i, name in enumerate(table.classes, 10)))
    assert [n for n in load(folder, coded, "lora", task="zero_shot").notices if "go into prompts" in n]
