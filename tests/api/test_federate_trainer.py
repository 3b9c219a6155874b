"""fedfm.federate of a Hugging Face Trainer: one client and one round against the Trainer's own loop."""

import numpy as np
import pytest
import torch
from torch import nn

import fedfm
from fedfm import seeds
from fedfm.errors import InputError

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=40, max_position_embeddings=16, num_labels=3, **SMALL, **dropout)
    )


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, max_position_embeddings=32, num_key_value_heads=2, **SMALL))


def texts(n=21, seed=0):
    """Made-up token ids of unequal length; with 21 rows the last batches of an epoch are short."""
    from datasets import Dataset

    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, n)
    ids = [[1, int(10 + y), *rng.integers(20, 40, rng.integers(2, 8)).tolist()] for y in labels]
    return Dataset.from_dict({"input_ids": ids, "label": labels.tolist()})


class Pad:
    """Pads; for a language model the labels are the ids, without padding."""

    def __init__(self, language=False):
        self.language = language

    def __call__(self, features):
        length = max(len(f["input_ids"]) for f in features)
        ids = torch.tensor([f["input_ids"] + [0] * (length - len(f["input_ids"])) for f in features])
        real = ids > 0
        labels = ids.masked_fill(~real, -100) if self.language else torch.tensor([f["label"] for f in features])
        return {"input_ids": ids, "attention_mask": real.long(), "labels": labels}


class Orders(torch.utils.data.Sampler):
    """The orders in which client "a" takes its rows, one an epoch; ``epochs`` of them a round."""

    def __init__(self, n, seed, epochs):
        self.n, self.seed, self.epochs, self.epoch = n, seed, epochs, 0

    def __iter__(self):
        t, k = divmod(self.epoch, self.epochs)
        if k == 0:
            self.rng = seeds.generator(seeds.derive(self.seed, "client", t + 1, "a"), "batches")
        self.epoch += 1
        return iter(self.rng.permutation(self.n).tolist())

    def __len__(self):
        return self.n


def in_order(base, epochs=99):
    """The Trainer with this order, and nothing else of fedfm's."""

    class InOrder(base):
        def _get_train_sampler(self, train_dataset=None):
            return Orders(len(self.train_dataset), self.args.seed, epochs)

    return InOrder


def arguments(folder, **args):
    from transformers import TrainingArguments

    settings = {"learning_rate": 5e-3, "per_device_train_batch_size": 4, "num_train_epochs": 2, "seed": 7}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"} | args
    return TrainingArguments(output_dir=str(folder / "hf"), **settings)


def apart(one, other, start):
    """Largest difference of two modules' parameters, by how far training moved one at most."""
    a, b, s = (nn.utils.parameters_to_vector(m.parameters()).detach() for m in (one, other, start))
    return float((a - b).abs().max() / (b - s).abs().max())


@pytest.mark.sample("bert-defaults", "llama-cosine")
@pytest.mark.each_value
@pytest.mark.parametrize(
    "args",
    [
        {"weight_decay": 0.3},  # the defaults: linear schedule, norm 1, biases and norms without decay
        {"lr_scheduler_type": "cosine", "warmup_steps": 3, "adam_beta1": 0.8, "adam_beta2": 0.98, "adam_epsilon": 1e-6},
        {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.25,
         "weight_decay": 0.1},
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1, "label_smoothing_factor": 0.2},
        {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0, "bf16": True, "activation_checkpointing": True},
    ],
    ids=["defaults", "cosine", "sgd", "accumulation", "bf16"],
)  # fmt: skip
@pytest.mark.parametrize("of", [bert, llama])
def test_one_client_and_one_round_is_the_trainers_own_loop(tmp_path, of, args):
    from transformers import Trainer

    told = {"args": arguments(tmp_path, **args), "train_dataset": texts(), "data_collator": Pad(of is llama)}
    theirs = in_order(Trainer)(of(), **told)
    theirs.train()
    ours = Trainer(of(), **told)
    fedfm.federate(ours, clients={"a": texts()}, rounds=1, out=tmp_path / "run", run={"workers": 1})
    assert apart(ours.model, theirs.model, of()) < 1e-4
    kept = {k: v for k, v in args.items() if k in ("optim", "learning_rate", "max_grad_norm")}
    without = in_order(Trainer)(of(), **told | {"args": arguments(tmp_path, **kept)})
    without.train()
    assert apart(without.model, theirs.model, of()) > 1e-3  # the arguments do tell


def test_an_own_loss_and_a_long_text_without_counted_tokens(tmp_path):
    from transformers import Trainer

    class Focal(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = ((1 - outputs.logits.softmax(1)) ** 2).gather(1, inputs["labels"][:, None]).mean()
            return (loss, outputs) if return_outputs else loss

    told = {
        "args": arguments(tmp_path, gradient_accumulation_steps=3),
        "train_dataset": texts(),
        "data_collator": Pad(),
    }
    theirs = in_order(Focal)(bert(), **told)
    theirs.train()
    ours = Focal(bert(), **told)
    fedfm.federate(ours, clients={"a": texts()}, rounds=1, out=tmp_path / "run", run={"workers": 1})
    assert apart(ours.model, theirs.model, bert()) < 1e-4


def test_rows_are_scored_in_the_trainers_batches_which_are_halved_without_memory(tmp_path):
    from transformers import Trainer

    class Short(Trainer):
        judged, most = [], 5

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if not model.training:
                self.judged.append(len(inputs["labels"]))
                if len(inputs["labels"]) > self.most:
                    raise torch.OutOfMemoryError
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    told = {"train_dataset": texts(4), "eval_dataset": texts(), "data_collator": Pad(language=True)}
    ours = Short(llama(), args=arguments(tmp_path, per_device_eval_batch_size=5), **told)
    result = fedfm.federate(ours, clients={"a": texts(4)}, rounds=1, out=tmp_path / "run", run={"workers": 1})
    assert max(ours.judged) == 5
    assert result["loss"] == pytest.approx(ours.evaluate()["eval_loss"], rel=1e-5)  # a mean of batches' means
    ours.most = 4
    with pytest.warns(RuntimeWarning, match="from here on 2 rows at once"):
        fedfm.federate(ours, clients={"a": texts(4)}, rounds=1, out=tmp_path / "few", run={"workers": 1})


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing`:FutureWarning")  # TRL sets the old name
def test_trls_sft_trainer_is_its_own_loop(tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tiny_text import save_llama

    folder = save_llama(tmp_path / "llama")
    asked = ["swim river the", "leaf of root near old", "a quiet wing", "small grey nest under", "soil"]
    rows = Dataset.from_dict(
        {"prompt": asked * 3, "completion": [" fish the", " plant", " bird of a bird", "", " a"] * 3}
    )
    settings = {"optim": "sgd", "learning_rate": 0.5, "max_length": 24, "gradient_accumulation_steps": 2, "seed": 7}
    settings |= {"per_device_train_batch_size": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    config = trl.SFTConfig(output_dir=str(tmp_path / "hf"), save_strategy="no", num_train_epochs=2, **settings)

    def made(base, config=config):
        return base(
            AutoModelForCausalLM.from_pretrained(folder),
            args=config,
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(folder),
        )

    dense = trl.SFTConfig(output_dir=str(tmp_path / "hf"), packing=True, report_to=[], use_cpu=True, max_length=24)
    with pytest.raises(InputError, match="packing: batches without padding"):
        fedfm.federate(made(trl.SFTTrainer, dense), partition={"clients": 1}, rounds=1, out=tmp_path / "no")
    theirs, ours = made(in_order(trl.SFTTrainer)), made(trl.SFTTrainer)
    theirs.train()
    fedfm.federate(ours, clients={"a": ours.train_dataset}, rounds=1, out=tmp_path / "run", run={"workers": 1})
    start = AutoModelForCausalLM.from_pretrained(folder)
    assert apart(ours.model, theirs.model, start) < 1e-4
    assert apart(ours.model, start, theirs.model) > 0.5


def test_a_schedule_goes_over_all_rounds(tmp_path):
    """Three rounds of one epoch are three epochs, but for the optimiser's moments: none with plain SGD."""
    from transformers import Trainer

    args = {"optim": "sgd", "learning_rate": 0.5, "warmup_steps": 4, "num_train_epochs": 1}
    told = {"train_dataset": texts(), "data_collator": Pad()}
    ours = Trainer(bert(), args=arguments(tmp_path, **args), **told)
    fedfm.federate(ours, clients={"a": texts()}, rounds=3, out=tmp_path / "run", run={"workers": 1})

    theirs = in_order(Trainer, epochs=1)(bert(), args=arguments(tmp_path, **args | {"num_train_epochs": 3}), **told)
    theirs.train()
    assert apart(ours.model, theirs.model, bert()) < 1e-4


def test_a_module_of_half_precision_is_reported_or_refused(tmp_path):
    from transformers import Trainer

    told = {"args": arguments(tmp_path), "train_dataset": texts(), "data_collator": Pad()}
    settings = {"clients": {"a": texts()}, "rounds": 1, "run": {"workers": 1}}
    with pytest.raises(InputError, match="float16, whose gradients vanish"):
        fedfm.federate(Trainer(bert().half(), **told), **settings, out=tmp_path / "a")
    result = fedfm.federate(Trainer(bert().bfloat16(), **told), **settings, out=tmp_path / "b")
    assert any("parameters are bfloat16" in text for text in fedfm.load_run(result["run"]).manifest["notices"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"fp16": True, "use_cpu": True}, "fp16.*loss scaler"),
        ({"optim": "adafactor"}, 'optim = "adafactor"'),
        ({"optim_args": "momentum=0.9", "optim": "sgd"}, "optim_args"),
        ({"lr_scheduler_type": "polynomial"}, 'lr_scheduler_type = "polynomial"'),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}}, "lr_scheduler_kwargs"),
        ({"max_steps": 10}, "complete epochs"),
        ({"num_train_epochs": 0.5}, "complete epochs"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
    ],
)
def test_arguments_that_clients_cannot_honour_are_refused_by_name(tmp_path, args, words):
    from transformers import Trainer

    made = Trainer(bert(), args=arguments(tmp_path, **args), train_dataset=texts(), data_collator=Pad())
    with pytest.raises(InputError, match=words):
        fedfm.federate(made, clients={"a": texts()}, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loop_of_ones_own_is_refused_and_what_is_not_used_is_named(tmp_path):
    from transformers import EarlyStoppingCallback, Trainer

    def never(self, *args, **kwargs):
        raise AssertionError

    class Watched(Trainer):
        evaluate = prediction_step = never

    told = {"args": arguments(tmp_path), "train_dataset": texts(), "data_collator": Pad()}
    settings = {"clients": {"a": texts()}, "rounds": 1, "run": {"workers": 1}}
    for name in ("training_step", "train", "create_optimizer_and_scheduler", "_get_train_sampler"):
        own = type("Loop", (Trainer,), {name: never})(bert(), **told)
        with pytest.raises(InputError, match=f"Loop overrides {name}"):
            fedfm.federate(own, **settings, out=tmp_path / "a")
    model = bert()
    given = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    with pytest.raises(InputError, match="it has an optimiser or a schedule as an object"):
        fedfm.federate(Trainer(model, optimizers=given, **told), **settings, out=tmp_path / "b")
    watched = Watched(bert(), callbacks=[EarlyStoppingCallback()], compute_metrics=lambda p: {}, **told)
    result = fedfm.federate(watched, **settings, out=tmp_path / "c")
    run = fedfm.load_run(result["run"])
    assert run.experiment.run.seed == 7
    unused = "callback EarlyStoppingCallback, its own evaluate"
    assert any(unused in notice for notice in run.manifest["notices"])
    assert not any("args." in notice for notice in run.manifest["notices"])
