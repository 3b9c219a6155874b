"""fedfm.federate of Trainers of TRL and sentence-transformers, and of batches that hold more than tensors: one client
and one round against the Trainer's own loop.
"""

import pytest
import torch
from test_federate_trainer import apart, arguments, in_order

import fedfm
from fedfm.errors import InputError

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
PLAIN = {"optim": "sgd", "learning_rate": 0.5, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 7}
SAID = ["swim river the", "leaf of root near old", "a quiet wing", "small grey nest under", "soil"]
BETTER, WORSE = [" fish the", " plant", " bird of a bird", " a", " a"], [" a", " the fish", " of", " plant", " fish"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries, about their own names


def both(theirs, ours, start, tmp_path, **more):
    """How far a federation of one client is from the Trainer's own loop, after both have trained."""
    theirs.train()
    fedfm.federate(ours, clients={"a": ours.train_dataset}, rounds=1, out=tmp_path / "run", run={"workers": 1}, **more)
    assert apart(ours.model, start, theirs.model) > 0.5
    return apart(ours.model, theirs.model, start)


@pytest.mark.parametrize("kind", ["DPO", "Reward"])
def test_trls_trainers_of_preferences_are_their_own_loop(kind, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from tiny_text import save_llama

    folder = save_llama(tmp_path / "llama")
    texts = {"chosen": BETTER * 2, "rejected": WORSE * 2}
    if kind == "DPO":
        texts = {"prompt": SAID * 2} | texts
    rows = Dataset.from_dict(texts)
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path / "hf"), bf16=False, num_train_epochs=2, per_device_train_batch_size=4, **PLAIN
    )

    def module():
        torch.manual_seed(0)
        if kind == "DPO":
            return AutoModelForCausalLM.from_pretrained(folder)
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, pad_token_id=0)

    def made(base):
        return base(module(), args=config, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(folder))

    base = getattr(trl, f"{kind}Trainer")
    theirs, ours = made(in_order(base)), made(base)
    assert both(theirs, ours, module(), tmp_path) < 1e-4
    if kind == "Reward":  # the two rewards of each row
        told = fedfm.predict(tmp_path / "run", ours.train_dataset, given=ours)["outputs"]
        assert [len(rewards) for rewards in told] == [2] * len(rows)
        ids = torch.tensor([ours.train_dataset[0]["chosen_ids"]])
        assert told[0][0] == pytest.approx(float(ours.model.eval()(input_ids=ids).logits), abs=1e-5)


def test_a_sentence_transformer_is_its_own_loop(tmp_path):
    pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
        models,
    )

    from tiny_text import save_bert

    folder = save_bert(tmp_path / "bert")
    rows = Dataset.from_dict(
        {"anchor": SAID, "positive": [text + more for text, more in zip(SAID, BETTER, strict=True)]}
    )
    settings = PLAIN | {"per_device_train_batch_size": 8, "num_train_epochs": 1}  # one batch of all rows: no order

    def made(loss=losses.MultipleNegativesRankingLoss, **more):
        torch.manual_seed(0)
        module = SentenceTransformer(modules=[models.Transformer(str(folder)), models.Pooling(16)], device="cpu")
        args = SentenceTransformerTrainingArguments(output_dir=str(tmp_path / "hf"), **settings, **more)
        return SentenceTransformerTrainer(module.eval(), args=args, train_dataset=rows, loss=loss(module))

    theirs, ours, start = made(), made(), made().model
    for trainer in (theirs, ours):  # dropout draws from other streams
        for part in trainer.model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
    assert both(theirs, ours, start, tmp_path) < 1e-4
    told = fedfm.predict(tmp_path / "run", rows, given=ours)["outputs"]
    encoded = ours.model.encode(SAID, convert_to_tensor=True)
    torch.testing.assert_close(
        torch.tensor([row["sentence_embedding_0"] for row in told]), encoded, atol=1e-5, rtol=1e-4
    )
    with pytest.raises(InputError, match="batch_sampler chooses rows by their content"):
        fedfm.federate(made(batch_sampler="no_duplicates"), partition={"clients": 1}, rounds=1, out=tmp_path / "no")
    weighted = made(lambda module: losses.SoftmaxLoss(module, 16, 2))
    with pytest.raises(InputError, match="parameters outside the module"):
        fedfm.federate(weighted, partition={"clients": 1}, rounds=1, out=tmp_path / "no")


def test_a_detectors_lists_of_dicts_reach_its_loss(tmp_path):
    from transformers import AutoModelForObjectDetection, Trainer, YolosConfig

    config = YolosConfig(
        **SMALL, image_size=[16, 16], patch_size=8, num_detection_tokens=3, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"pixel_values": torch.rand(3, 16, 16, generator=generator),
         "labels": {"class_labels": torch.tensor([i % 2]), "boxes": torch.tensor([[0.5, 0.4 + 0.02 * i, 0.4, 0.4]])}}
        for i in range(6)
    ]  # fmt: skip

    def collate(batch):
        pixels = torch.stack([row["pixel_values"] for row in batch])
        return {"pixel_values": pixels, "labels": [row["labels"] for row in batch]}

    def made(base):
        args = arguments(tmp_path, optim="sgd", learning_rate=0.05, remove_unused_columns=False)
        torch.manual_seed(0)
        module = AutoModelForObjectDetection.from_config(config)
        return base(module, args=args, train_dataset=rows, data_collator=collate)

    theirs, ours = made(in_order(Trainer)), made(Trainer)
    assert both(theirs, ours, made(Trainer).model, tmp_path) < 1e-4
    told = fedfm.predict(tmp_path / "run", rows, given=ours)
    with torch.no_grad():
        expected = ours.model.eval()(pixel_values=torch.stack([row["pixel_values"] for row in rows]))
    for name in ("logits", "pred_boxes"):
        found = torch.tensor([row[name] for row in told["outputs"]])
        torch.testing.assert_close(found, expected[name], atol=1e-5, rtol=1e-4)


def test_answers_in_a_text_are_found_by_name_without_padding(tmp_path):
    from transformers import BertConfig, BertForQuestionAnswering, Trainer

    torch.manual_seed(0)
    module = BertForQuestionAnswering(BertConfig(vocab_size=40, max_position_embeddings=16, **SMALL))
    rows = [
        {"input_ids": list(range(1, 4 + i)), "start_positions": 1, "end_positions": 2} for i in range(6)
    ]  # of unequal length

    def pad(batch):
        longest = max(len(row["input_ids"]) for row in batch)
        ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch])
        found = {"input_ids": ids, "attention_mask": (ids > 0).long()}
        return found | {k: torch.tensor([row[k] for row in batch]) for k in ("start_positions", "end_positions")}

    ours = Trainer(module, args=arguments(tmp_path), train_dataset=rows, data_collator=pad)
    fedfm.federate(ours, partition={"clients": 2}, rounds=1, out=tmp_path / "run", run={"workers": 1})
    told = fedfm.predict(tmp_path / "run", rows, given=ours)["outputs"]
    for row, found in zip(rows, told, strict=True):
        with torch.no_grad():
            alone = module.eval()(input_ids=torch.tensor([row["input_ids"]]))
        assert found.keys() == {"start_logits", "end_logits"}
        for name, scores in found.items():
            torch.testing.assert_close(torch.tensor(scores), alone[name][0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("classes", [2, 3, 16])
def test_every_token_of_a_row_gets_its_scores(classes, tmp_path):
    """As many classes as the module has kinds of segments, or positions."""
    from transformers import (
        AutoTokenizer,
        BertConfig,
        BertForTokenClassification,
        DataCollatorForTokenClassification,
        Trainer,
    )

    from tiny_text import save_bert

    torch.manual_seed(0)
    module = BertForTokenClassification(
        BertConfig(vocab_size=40, max_position_embeddings=16, num_labels=classes, **SMALL)
    )
    rows = [{"input_ids": [2, *range(5, 7 + i), 3], "labels": [i % classes] * (4 + i)} for i in range(5)]
    collate = DataCollatorForTokenClassification(AutoTokenizer.from_pretrained(save_bert(tmp_path / "bert")))
    ours = Trainer(module, args=arguments(tmp_path), train_dataset=rows, data_collator=collate)
    fedfm.federate(ours, partition={"clients": 2}, rounds=1, out=tmp_path / "run", run={"workers": 1})
    told = fedfm.predict(tmp_path / "run", rows, given=ours)["outputs"]
    for row, found in zip(rows, told, strict=True):
        with torch.no_grad():
            alone = module.eval()(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        torch.testing.assert_close(torch.tensor(found["logits"]), alone, atol=1e-5, rtol=1e-4)


def test_frames_of_speech_are_those_of_the_row_alone(tmp_path):
    """Rows of unequal length: a frame stands for several places of the mask."""
    from transformers import Trainer, Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(0)
    config = Wav2Vec2Config(
        **SMALL, vocab_size=12, conv_dim=[8, 8], conv_stride=[5, 2], conv_kernel=[10, 3], num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, feat_extract_norm="layer",
        do_stable_layer_norm=True, pad_token_id=0,
    )  # fmt: skip
    module = Wav2Vec2ForCTC(config)
    lengths = (150, 220, 150, 300)
    rows = [{"input_values": torch.randn(n), "labels": torch.tensor([3, 4])} for n in lengths]

    def pad(batch):
        longest = max(len(row["input_values"]) for row in batch)
        mask = torch.stack([torch.arange(longest) < len(row["input_values"]) for row in batch]).long()
        sound = torch.nn.utils.rnn.pad_sequence([row["input_values"] for row in batch], batch_first=True)
        return {"input_values": sound, "attention_mask": mask, "labels": torch.stack([r["labels"] for r in batch])}

    args = arguments(tmp_path, remove_unused_columns=False)
    ours = Trainer(module, args=args, train_dataset=rows, data_collator=pad)
    fedfm.federate(ours, partition={"clients": 2}, rounds=1, out=tmp_path / "run", run={"workers": 1})
    told = fedfm.predict(tmp_path / "run", rows, given=ours)["outputs"]
    for row, found in zip(rows, told, strict=True):
        with torch.no_grad():
            alone = module.eval()(input_values=row["input_values"][None]).logits[0]
        torch.testing.assert_close(torch.tensor(found["logits"]), alone, atol=1e-4, rtol=1e-4)


def test_an_encoder_and_its_decoder_answer_each_input(tmp_path):
    from transformers import (
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    from tiny_text import save_llama

    tokenizer = AutoTokenizer.from_pretrained(save_llama(tmp_path / "llama"))
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    begin, end = tokenizer.pad_token_id or 0, tokenizer.eos_token_id
    module = T5ForConditionalGeneration(
        T5Config(vocab_size=len(tokenizer), decoder_start_token_id=begin, eos_token_id=end, **sizes)
    )
    rows = []
    for asked, said in zip(SAID, BETTER, strict=True):
        ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(said, add_special_tokens=False)["input_ids"], end]
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": answer})
    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path / "hf"), num_train_epochs=60, per_device_train_batch_size=5,
        **PLAIN | {"optim": "adamw_torch", "learning_rate": 0.02},
    )  # fmt: skip
    collate = DataCollatorForSeq2Seq(tokenizer, module)
    ours = Seq2SeqTrainer(module, args, train_dataset=rows, data_collator=collate, processing_class=tokenizer)
    fedfm.federate(ours, partition={"clients": 1}, rounds=1, out=tmp_path / "run", run={"workers": 1})
    told = fedfm.predict(tmp_path / "run", rows, given=ours)
    assert told["answers"] == [tokenizer.decode(row["labels"], skip_special_tokens=True) for row in rows]
    assert told["cut"] == []
    with torch.no_grad():
        alone = module.eval()(**{k: torch.tensor([x]) for k, x in rows[0].items()}).loss
    assert told["losses"][0] == pytest.approx(float(alone), rel=1e-4)
    bare = [{key: x for key, x in row.items() if key != "labels"} for row in rows]
    asked = fedfm.predict(tmp_path / "run", bare, given=ours)
    assert asked["answers"] == told["answers"]
    assert asked["loss"] is None


def test_the_future_of_a_series_is_sampled_where_the_decoder_needs_it(tmp_path):
    from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction, Trainer

    torch.manual_seed(0)
    halves = {f"{part}_{what}": size for part in ("encoder", "decoder")
              for what, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 8))}  # fmt: skip
    config = TimeSeriesTransformerConfig(
        prediction_length=3, context_length=4, lags_sequence=[1], num_time_features=1, d_model=8,
        num_parallel_samples=7, **halves,
    )  # fmt: skip
    sizes = {"past_values": (5,), "past_time_features": (5, 1), "past_observed_mask": (5,)}
    sizes |= {"future_values": (3,), "future_time_features": (3, 1)}
    rows = [{name: torch.rand(size) for name, size in sizes.items()} for _ in range(6)]
    ours = Trainer(TimeSeriesTransformerForPrediction(config), args=arguments(tmp_path), train_dataset=rows)
    fedfm.federate(ours, partition={"clients": 2}, rounds=1, out=tmp_path / "run", run={"workers": 1})
    told = fedfm.predict(tmp_path / "run", rows, given=ours)["outputs"]
    assert len(told) == 6
    assert torch.tensor([row["sequences"] for row in told]).shape == (6, 7, 3)
    assert fedfm.predict(tmp_path / "run", rows, given=ours)["outputs"] == told
