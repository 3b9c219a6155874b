"""README.md of an exported model: description, loading, data, method, privacy and scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedfm.config.user_code import is_function
from fedfm.core.fields import key_of
from fedfm.core.metric_names import METRICS, SCORES
from fedfm.core.task_facts import TaskFacts
from fedfm.core.text import visible
from fedfm.data.spec import IN_MEMORY
from fedfm.models import derived_modules, export_base, quantised
from fedfm.models.adapter_files import ABOUT, WEIGHTS, is_lora
from fedfm.models.adapters.pair_names import GLOBAL, LOCAL
from fedfm.models.adapters.side_adapter import SideModel
from fedfm.models.architectures import pooled_encoder
from fedfm.models.architectures.dual_encoder import DualEncoder, words_of
from fedfm.models.architectures.pooled_encoder import PooledEncoder
from fedfm.models.export import Target
from fedfm.models.families import unwrap
from fedfm.models.head_inputs import UNIT_NORM
from fedfm.models.language.chat_form import about_date
from fedfm.models.language.generation import left_out
from fedfm.models.locate import BUILT_IN
from fedfm.models.model import Model
from fedfm.reports.account import privacy_claim
from fedfm.reports.html import data_of
from fedfm.reports.own_models import newcomers_of
from fedfm.reports.plain_words import reading
from fedfm.reports.read import RunFiles, mapping, numeric, read
from fedfm.reports.text import NBSP, number
from fedfm.version import __version__

_LIBRARIES = {"peft": "peft", "hf": "transformers", "torch": "pytorch"}
_PROCESSOR = [  # "pil" as in the run; "torchvision" gives slightly different pixels
    "",
    "from transformers import AutoImageProcessor",
    "",
    'processor = AutoImageProcessor.from_pretrained("FOLDER", backend="pil")',
]
_EXTRACTOR = ["", "from transformers import AutoFeatureExtractor", ""]
_EXTRACTOR += ['processor = AutoFeatureExtractor.from_pretrained("FOLDER")']
_DECODED = (
    "In the run, images were turned by their EXIF orientation, transparent pixels were laid over white, and grey of "
    "more than 8 bits was scaled to 0..255. Other pixels, such as those of Pillow's `convert`, give other outputs."
)
_MOST = 50  # largest number of classes that are named
_EXPERTS = (
    "The run stored the base and its experts in 4 bits, but bitsandbytes cannot load experts in 4 bits. So `base/` has "
    "the values that the bits represent; load it without quantisation."
)


def write(
    run_dir: Path, model: Model, to: Target, out: Path, client: str | None = None, mixture: Sequence[str] = ()
) -> Path:
    """Write the model card into the folder of an export.

    Args:
        run_dir: the run.
        to: form of the export.
        client: owner of the model; None: all clients share one model.
        mixture: as for :func:`how_to_load`.
    """
    path = out / "README.md"
    path.write_text(card(read(run_dir, messages=False), model, to, out, client, mixture), encoding="utf-8")
    return path


def card(
    run: RunFiles, model: Model, to: Target, out: Path, client: str | None = None, mixture: Sequence[str] = ()
) -> str:
    """The text of the card for this folder, in Markdown. It begins with the hub's metadata."""
    whose = f"; this is the model of client {_code(client)}" if client else ""
    parts = [_head(run, model, to), f"# {_plain(run.name)}", ""]
    parts += [f"{_plain(_base_name(model))}, adapted by fedfm {__version__} over several organisations{whose}.", ""]
    parts += ["## Load", "", *how_to_load(model, to, out, mixture), ""]
    if model.classes and not model.is_language_model:
        named = ", ".join(map(_code, model.classes[:_MOST]))
        more = f" and {len(model.classes) - _MOST} more (`fedfm.json`)" if len(model.classes) > _MOST else ""
        parts += [
            "## Targets" if model.task.own_targets else "## Classes",
            "",
            f"In the order of the outputs: {named}{more}.",
            "",
        ]
    parts += [
        "## Data and training",
        "",
        *_training(run, model.task),
        "",
        "## Scores",
        "",
        *_scores(run, client, model.task.figures),
        "",
    ]
    text, assumed = privacy_claim(run)
    meant = ["", _plain(plain)] if (plain := reading(run)) else []
    if client is not None and client in newcomers_of(run):
        text = f"This model was fitted to rows of {client} after training; no privacy is claimed for these. For the "
        text += f"federation's model, from which it started: {privacy_claim(run)[0]}"
    parts += ["## Privacy", "", _plain(text), *meant, *(["", "It assumes:", ""] if assumed else [])]
    parts += [f"- {_plain(line)}" for line in assumed]
    return "\n".join(parts).rstrip() + "\n"


def _base_name(model: Model) -> str:
    """The name of the base model; for a folder only the last part of its path."""
    name = model.spec.name
    if is_own(model):
        return type(unwrap(model.module)).__name__
    return Path(name).resolve().name if Path(name).exists() else name


def _head(run: RunFiles, model: Model, to: Target) -> str:
    lines = [f"library_name: {_LIBRARIES[to]}"]
    name = model.spec.name
    if name not in BUILT_IN and "/" in name and not is_own(model) and not Path(name).exists():
        lines.append(f"base_model: {json.dumps(name)}")
    kind = str(mapping(run.manifest.get("model")).get("kind"))
    tag = model.task.pipeline_of(model, kind)
    lines += [f"pipeline_tag: {tag}"] if tag else []
    lines += ["tags:", *(f"- {json.dumps(tag)}" for tag in ("federated-learning", "fedfm", run.method))]
    return "\n".join(["---", *lines, "---", ""])


def how_to_load(model: Model, to: Target, out: Path, mixture: Sequence[str] = ()) -> list[str]:
    """Code that loads the folder (in the code: ``FOLDER``), and the facts that a reader has to know.

    Args:
        mixture: lines that build the model from two adapters, which are weighted row by row.
    """
    own, module = is_own(model), unwrap(model.module)
    takes, scale = _of_features_in(out)
    if isinstance(model, SideModel):
        lines = _side_adapter(model)
    elif isinstance(module, PooledEncoder):
        lines = pooled_encoder.as_code(module.pooling, unit=takes == UNIT_NORM)
        lines += _PROCESSOR
    elif to == "torch" or (own and to == "peft"):
        file = "model.safetensors" if to == "torch" else "adapter_model.safetensors"
        lines = ["from safetensors.torch import load_file", "", f'weights = load_file("FOLDER/{file}")']
        if not own and {name.rpartition(".")[0] for name in module.state_dict()} == {model.parts.head}:
            lines += _of_features(model.parts.head, scale, unit=takes == UNIT_NORM)
    else:
        lines = _loading(model, to, out)
        if hasattr(model.tools.processor, "tokenizer"):
            lines += ["", "from transformers import AutoProcessor", ""]
            lines += ['processor = AutoProcessor.from_pretrained("FOLDER", backend="pil")']
        elif model.tools.tokenizer is not None:
            auto = model.tools.tokenizer_class
            lines += ["", f"from transformers import {auto}", "", f'tokenizer = {auto}.from_pretrained("FOLDER")']
        if model.tools.processor is not None and not hasattr(model.tools.processor, "tokenizer"):
            lines += _EXTRACTOR if model.tools.image is None else _PROCESSOR
        if isinstance(module, DualEncoder):
            lines += _prompts(model, module, mixed=bool(mixture))
        lines += ["", *mixture] if mixture else []
    words = ["```python", *lines, "```"]
    if own and to != "hf":
        call = "module.load_state_dict(weights)" if to == "torch" else 'PeftModel.from_pretrained(module, "FOLDER")'
        words += ["", f"The run's own program makes the module; then `{call}` loads the weights."]
    elif to == "peft":
        words += ["", f"The adapter is for {_plain(_base_name(model))}. {_of_base(model, out)}"]
    if takes:
        words += ["", f"The head takes {takes}."]
    if isinstance(model, SideModel):
        words += ["", "`states` are the disclosed activations of the transformer; only its owner can compute them."]
    if isinstance(module, DualEncoder) and to != "torch":
        words += ["", _of_prompts(model, mixed=bool(mixture))]
    if to == "peft" and model.spec.quantization == "nf4" and not quantised.has_experts(model.module):
        words += ["", "On a CPU with instructions for bfloat16, bitsandbytes rounds the inputs of 4-bit layers."]
    if to != "peft" and model.spec.quantization == "int8":
        words += ["", "The run also rounded inputs of its 8-bit layers, row by row; these weights take exact inputs."]
    if to != "peft" and is_lora(model) and model.spec.dtype != "float32":
        words += [
            "",
            f"Weights with the adapter merged into them are float32: rounded to {model.spec.dtype}, they would lose "
            "most of what the adapter learned. To compute in 16 bits, take an export by `--to peft`.",
        ]
    if to == "torch" and model.added_bias:
        words += [
            "",
            f"The head has a bias, `{model.parts.head}.bias`, and {type(model.module).__name__} has none: "
            "add one before you load the weights, or the outputs differ.",
        ]
    if model.tools.tokenizer is not None and not hasattr(model.tools.processor, "tokenizer"):
        words += ["", f"Texts were cut to {model.tools.max_length} tokens (`model_max_length` of the tokenizer)."]
    if model.task.answers and (text := about_date(model.tools.tokenizer)):
        words += ["", text]
    if model.tools.image is not None:
        words += ["", _DECODED]
    if text := model.task.for_export(model, model.params())[0].about_export(to, out):
        words += ["", text]
    if text := left_out(model):
        words += ["", f"{text[0].upper()}{text[1:]}."]
    return words


def _of_features_in(out: Path) -> tuple[str, str]:
    """(transform of the features before the head, ``data.scale``), as the folder's file names them; "" for none."""
    about = out / ABOUT
    said = json.loads(about.read_text(encoding="utf-8")) if about.exists() else {}
    return str(said.get("head_takes", "")), str(said.get("scale", ""))


def is_own(model: Model) -> bool:
    """Whether the user's own program made the module."""
    return model.spec.name == IN_MEMORY or is_function(model.spec.name)


def _loading(model: Model, to: Target, out: Path) -> list[str]:
    """Lines of Python that load the model with transformers, and put an adapter onto it."""
    whole: Any = unwrap(model.module)
    module = whole.clip if isinstance(whole, DualEncoder) else whole
    kind = type(module)
    home = "transformers" if kind.__module__.startswith("transformers.") else kind.__module__
    imports, lines = [f"from {home} import {kind.__name__}"], []
    name, settings = "model" if to == "hf" else "base", ""
    if to == "hf":
        source = '"FOLDER"'
    else:
        imports.insert(0, "from peft import PeftModel")
        linked = (out / export_base.BASE).is_dir()
        source = f'"FOLDER/{export_base.BASE}"' if linked else json.dumps(model.spec.name)
        if (out / export_base.BASE / export_base.BITS).exists():
            imports += ["from transformers import BitsAndBytesConfig"]
            imports = ["import json", "from pathlib import Path", "", *imports]
            lines += [f'bits = json.loads(Path("FOLDER/{export_base.BASE}/{export_base.BITS}").read_text())']
            settings = ", quantization_config=BitsAndBytesConfig(**bits)"
    lines += [f"{name} = {kind.__name__}.from_pretrained({source}{settings})"]
    if derived_modules.is_derived(module):
        imports += ["from fedfm.models.derived_modules import install"]
        lines += [f"install({name})"]
    if to == "peft":
        if (out / export_base.CONFIG).exists():
            lines += ['model = PeftModel.from_pretrained(base, "FOLDER")']
        else:  # two experts, weighted by a gate
            lines += [f'experts = PeftModel.from_pretrained(base, "FOLDER/{GLOBAL}", adapter_name="{GLOBAL}")']
            lines += [f'experts.load_adapter("FOLDER/{LOCAL}", adapter_name="{LOCAL}")']
    return [*imports, "", *lines]


_SCALES = {  # the computation of data.scale
    "row": (
        "features = features.double() - features.double().mean(1, keepdim=True)",
        "deviation = features.std(1, keepdim=True, correction=0)",
        "features = (features / deviation.where(deviation > 0, 1)).float()",
    ),
    "unit": (
        "norm = features.double().norm(dim=1, keepdim=True)",
        "features = (features / norm.where(norm > 0, 1)).float()",
    ),
}


def _of_features(head: str, scale: str, *, unit: bool) -> list[str]:
    """Lines of code for a model that is only a head."""
    x = "torch.nn.functional.normalize(features)" if unit else "features"
    scaled = " as in the run's files" if scale else ""
    return [
        *("", "import torch", "", ""),
        "def logits(features):",
        f'    """Logits (rows, classes) of features (rows, numbers){scaled}."""',
        *(f"    {line}" for line in _SCALES.get(scale, ())),
        f'    return torch.nn.functional.linear({x}, weights["{head}.weight"], weights.get("{head}.bias"))',
    ]


def _side_adapter(model: SideModel) -> list[str]:
    blocks, positions, width = model.net.shape
    sizes = f"{blocks}, {positions}, {width}, {model.adaptation_spec.rank}, {len(model.classes)}"
    return [
        "from safetensors.torch import load_file",
        "from fedfm.models.adapters.side_adapter import SideAdapter",
        "",
        f"model = SideAdapter({sizes})  # blocks, positions, width, rank, classes",
        f'model.load_state_dict(load_file("FOLDER/{WEIGHTS}"))',
        "model.eval()",
        f"# logits = model(states), states float32 (rows, {blocks}, {positions}, {width})",
    ]


def _prompts(model: Model, module: DualEncoder, *, mixed: bool) -> list[str]:
    """Lines that make the texts with which images are compared, and the logits if each class has several texts."""
    templates, words = model.task.class_templates, words_of(model.classes)
    whole = module.config.model_type == "siglip"
    length = f'"max_length", max_length={module.input_ids.shape[-1]}' if whole else "True"
    asked = f'padding={length}, return_token_type_ids=False, return_tensors="pt"'
    if len(templates) == 1 or mixed:
        prompts = [templates[0].format(word) for word in words]
        return ["", f"prompts = {prompts!r}", f"texts = tokenizer(prompts, {asked})"]
    return [
        "",
        *("import torch", ""),
        f"words = {words!r}",
        f"templates = {list(templates)!r}",
        f"several = [tokenizer([t.format(word) for word in words], {asked}) for t in templates]",
        *_LOGITS.splitlines(),
    ]


_LOGITS = '''

def logits(pixel_values):
    """Logits of images, by class; a class is the mean direction of its texts."""
    normal = torch.nn.functional.normalize
    texts = [normal(model.get_text_features(**t).pooler_output, dim=-1) for t in several]
    texts = normal(torch.stack(texts).mean(0), dim=-1)
    pictures = normal(model.get_image_features(pixel_values=pixel_values).pooler_output, dim=-1)
    return model.logit_scale.exp() * pictures @ texts.T
'''


def _of_prompts(model: Model, *, mixed: bool) -> str:
    count = len(model.task.class_templates)
    if count > 1 and not mixed:
        return '`logits(**processor(pictures, return_tensors="pt"))` gives logits of images, by class.'
    text = '`model(**texts, **processor(pictures, return_tensors="pt"))` gives logits of images, by prompt.'
    if count == 1:
        return text
    return f"{text} The code uses only the first of the run's {count} templates; `fedfm predict` uses all."


def _of_base(model: Model, out: Path) -> str:
    if not (out / export_base.BASE).is_dir():
        return "Replace the name of the base in the code by your copy."
    if quantised.has_experts(model.module):
        return _EXPERTS
    return (
        f"`{export_base.BASE}/` links to the weights of this machine's copy; on another machine provide the base "
        "yourself. `AutoPeftModel` looks for it where the folder was written, even if another export is there now: "
        "once the folder has been moved, use the code above."
    )


def _training(run: RunFiles, task: TaskFacts) -> list[str]:
    local = mapping(mapping(run.experiment.get("method")).get("local"))
    adaptation = mapping(mapping(run.experiment.get("model")).get("adaptation"))
    keys = [(key_of(f.name), getattr(task, f.name)) for f in fields(task) if getattr(task, f.name) != f.default]
    rows = [
        ("task", ", ".join([task.name, *(f"{key} {value}" for key, value in keys)])),
        ("data", f"{Path(data_of(run)).name} at {len(run.manifest.get('clients') or ())} clients"),
        ("method", f"{run.method}, {run.done_rounds} rounds"),
        ("adaptation", ", ".join(f"{k} {v}" for k, v in adaptation.items() if k in _ADAPTATION)),
        ("client optimiser", ", ".join(f"{k} {v}" for k, v in local.items() if k in _LOCAL)),
        ("aggregation", str(mapping(run.experiment.get("aggregation")).get("name") or "mean")),
        ("seed", str(mapping(run.experiment.get("run")).get("seed"))),
        ("parameters of the run", f"SHA-256 {run.result.get('params_sha256')}"),
    ]
    return ["| what | value |", "|---|---|", *(f"| {what} | {_plain(value)} |" for what, value in rows if value)]


_ADAPTATION = ("name", "rank", "alpha", "dropout", "layers")
_LOCAL = ("name", "learning_rate", "epochs", "batch_size", "weight_decay", "momentum")


def _scores(run: RunFiles, client: str | None, figures: Sequence[str]) -> list[str]:
    """The table of scores; ``figures`` are the names of the task's own scores."""
    details = mapping(run.result.get("details"))
    figures = [f"{whose}{name}" for name in figures for whose in ("", "local_")]
    rows = [(key.replace("_", " "), numeric(run.result.get(key))) for key in SCORES]
    for key in figures:
        # If there is one class, its score equals the score of all.
        value, least = details.get(key), 0 if key.endswith(METRICS) else 1
        each = mapping(value) if isinstance(value, Mapping) else {}
        rows += [
            (f"{key.replace('_', ' ')}: {name}", numeric(x)) for name, x in each.items() if least < len(each) <= _MOST
        ]
        rows += [] if each else [(key.replace("_", " "), numeric(value))]
    if client is not None:
        late = mapping(mapping(run.manifest.get("newcomers")).get(client))
        own = numeric(late.get("accuracy")) if late else run.client_accuracy.get(client)
        rows.insert(0, ("accuracy of this client's model on its own test rows", own))
    known = [f"| {what} | {number(value).replace(NBSP, ' ')} |" for what, value in rows if value is not None]
    if not known:
        return ["No score was measured."]
    note = "Local scores are on the clients' own test rows: the local accuracy is the mean of the clients' accuracies, "
    note += "and other local scores are over all of these rows together. All other scores are on the global test rows."
    if run.sample:
        note += f" Local scores are of {run.sample}."
    if client is not None:
        note += " All but the first are scores of the run, not of this model alone."
    return ["| score | value |", "|---|---|", *known, "", note]


def _plain(text: Any) -> str:
    """The text on one line, without Markdown markup."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in visible(str(text)))


def _code(text: Any) -> str:
    return f"`{visible(str(text)).replace('`', chr(39))}`"
