"""A sample's token ids: what is fed, where the parts end, and how the answer goes on."""

import dataclasses

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvpass.benchmarks.tasks import Sample, encode

SAMPLE = Sample("t", "0", "qa", "Read <|end|> {0}\n", "It is ünder\nthe tree.\n", "\n\nWhere?\nAnswer:", ("under it",))


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level, with the merges of one word and its space, two newlines in one token, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["un", "Ġun", "ĊĊ", "th", "Ġth", "Ġthe", "the"]
    merges = [("u", "n"), ("Ġ", "un"), ("Ċ", "Ċ"), ("t", "h"), ("Ġ", "th"), ("Ġth", "e"), ("th", "e")]
    vocabulary = {token: index for index, token in enumerate(["<|end|>", "<|user|>", *alphabet, *words])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", extra_special_tokens=["<|user|>"])
    tokenizer.chat_template = "<|user|>{{ messages[0]['content'] | trim }}<|end|>A:"
    return tokenizer


def test_bytes_without_a_tokenizer():
    """Without a tokenizer ids are bytes, cut where the parts end; the answer follows after a space."""
    tokens = encode(SAMPLE, None)
    assert [bytes(part).decode() for part in (tokens.prefix, tokens.context, tokens.suffix)] == [
        SAMPLE.prefix,
        SAMPLE.context,
        SAMPLE.suffix,
    ]
    assert bytes(tokens.gold) == b" under it"


def test_fed_ids_are_those_of_the_whole_text(tokenizer):
    """The prompt is tokenised as a whole: a token over a boundary belongs to the part it begins in."""
    tokens = encode(SAMPLE, tokenizer)
    assert list(tokens.prompt) == tokenizer(SAMPLE.prompt, split_special_tokens=True).input_ids
    assert tokenizer.decode(tokens.context) == SAMPLE.context + "\n"
    assert tokenizer.decode(tokens.suffix) == SAMPLE.suffix[1:]


def test_gold_goes_on_as_running_text(tokenizer):
    """After "Answer:" the gold ids begin with the word's own space; after a space or a newline they do not."""
    assert tokenizer.convert_ids_to_tokens(encode(SAMPLE, tokenizer).gold)[0] == "Ġun"
    line = dataclasses.replace(SAMPLE, suffix="\nAnswer:\n")
    assert tokenizer.convert_ids_to_tokens(encode(line, tokenizer).gold)[0] == "un"


def test_chat_template_goes_around_the_prompt(tokenizer):
    """The template's ids join prefix and suffix, the context is untouched, and the answer follows without a space."""
    plain, chat = encode(SAMPLE, tokenizer), encode(dataclasses.replace(SAMPLE, chat=True), tokenizer)
    assert chat.prefix == (tokenizer.convert_tokens_to_ids("<|user|>"), *plain.prefix)
    assert chat.context == plain.context
    assert chat.suffix == (*plain.suffix, tokenizer.eos_token_id, *tokenizer("A:").input_ids)
    assert tokenizer.convert_ids_to_tokens(chat.gold)[0] == "un"


def test_special_tokens_in_a_text_are_characters(tokenizer):
    """What spells a special token, a brace or a template in a sample's text is characters, in every part."""
    row = "<|end|>{{ messages }}{% raw %}"
    sample = Sample("t", "0", "qa", row, row, row, (row,), chat=True)
    tokens = encode(sample, tokenizer)
    special = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>")}
    assert not special & {*tokens.prefix[1:], *tokens.context, *tokens.suffix[:-3], *tokens.gold}
    assert tokenizer.decode(tokens.context) == row
