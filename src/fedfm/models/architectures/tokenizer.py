"""Tokenizers trained on a user's text, for language models that start without weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from fedfm.errors import InputError
from fedfm.models.quiet import quiet

KINDS = ("bpe", "words")
END, UNKNOWN = "<eos>", "<unk>"
BYTES = 256  # number of byte tokens in every byte-level vocabulary


def train(texts: Iterable[str], size: int, kind: str = "bpe") -> Any:
    r"""A transformers tokenizer with a vocabulary from ``texts``; it adds no special tokens to a text.

    Args:
        texts: pieces of text.
        size: largest number of tokens.
        kind: ``bpe`` is byte-level byte-pair encoding (Sennrich, Haddow, Birch 2016, arXiv:1508.07909, on bytes). Its
            vocabulary has 256 bytes, ``<eos>`` and merges, and it is lossless for any text. ``words`` takes the most
            frequent words, separated by white space, as in published perplexities of Penn Treebank and WikiText. A line
            break becomes ``<eos>``, and a word outside the vocabulary becomes ``<unk>``.

    Raises:
        InputError: an unknown kind, or a size too small for this kind.

    Example:
        >>> tokenizer = train(["a b a\n"], 4, "words")
        >>> tokenizer.convert_ids_to_tokens(tokenizer("b c a\n")["input_ids"])
        ['b', '<unk>', 'a', '<eos>']
    """
    from transformers import PreTrainedTokenizerFast

    if kind not in KINDS:
        raise InputError(f'pretrain.vocabulary = "{kind}": expected "bpe" or "words"')
    least = BYTES + 1 if kind == "bpe" else 3
    if size < least:
        raise InputError(f"pretrain.vocabulary_size = {size}: {kind} needs at least {least}")
    with quiet():
        made = _bpe(texts, size) if kind == "bpe" else _words(texts, size)
        unknown = {"unk_token": UNKNOWN} if kind == "words" else {}
        return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END, **unknown)


def _bpe(texts: Iterable[str], size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[END], show_progress=False)
    made.train_from_iterator(texts, trainer)
    return made


def _words(texts: Iterable[str], size: int) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    counts = Counter(word for text in texts for word in text.split())
    for special in (END, UNKNOWN):
        counts.pop(special, None)
    # The word itself breaks ties, so that the same text gives the same vocabulary.
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]
    vocabulary = {word: i for i, word in enumerate((END, UNKNOWN, *frequent))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    made.normalizer = normalizers.Replace("\n", f" {END} ")
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made
