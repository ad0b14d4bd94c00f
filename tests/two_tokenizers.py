"""Two small models with tokenizers of their own, over the same texts."""

import copy
import functools
import json
import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .models import llama

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "A quick answer is not always a good answer; the lazy dog knows that.",
    "def area(width, height):\n    return width * height\n",
    "Der Fluß fließt über die Brücke, 世界 und 12345 Steine.",
]
ENDS = {"target": "<eos>", "draft": "</s>"}


def tokenizer_of(role, size):
    """A byte-level BPE tokenizer; the draft's has other merges, other ids and another end-of-sequence token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", ENDS[role]] if role == "target" else [ENDS[role], "<unused>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES if role == "target" else SENTENCES[:2], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=ENDS[role], padding_side="left", name_or_path=role
    )


@functools.cache
def tokenizers():
    return tokenizer_of("target", 330), tokenizer_of("draft", 300)


def trained(role, tokenizer, steps=60):
    """A small model that has learned the sentences, more or less."""
    model = llama(seed=0, vocabulary=len(tokenizer), hidden=32, layers=1, sharpness=1.0, eos=tokenizer.eos_token_id)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    inputs = tokenizer([text + tokenizer.eos_token for text in SENTENCES], return_tensors="pt", padding=True)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.name_or_path = role
    return model.eval().requires_grad_(False)


@functools.cache
def _pair():
    with torch.enable_grad():
        return tuple(trained(role, each) for role, each in zip(("target", "draft"), tokenizers()))


def pair():
    """Return a target and a draft that agree on most of a text, and their tokenizers."""
    return *map(copy.deepcopy, _pair()), *tokenizers()


def prompts(rows):
    """Beginnings of the sentences, in the target's tokens."""
    texts = [text[: 6 + 3 * index] for index, text in enumerate(SENTENCES)][:rows]
    inputs = tokenizers()[0](texts, return_tensors="pt", padding=True)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def letters(words):
    """A tokenizer whose tokens are letters, and two that no text is encoded with."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@functools.cache
def with_other_letters(draft):
    """Return the arguments of `generate()` for a draft with other ids, without the letter b, and with two more tokens.

    Args:
        draft: a model whose tokens are the letters from a on.
    """
    ours = string.ascii_lowercase[: draft.config.vocab_size]
    theirs = ["?", "ca", *(letter for letter in reversed(ours) if letter != "b")]
    config = copy.deepcopy(draft.config)
    config.vocab_size = len(theirs)
    with torch.random.fork_rng():
        other = type(draft)(config).eval()
    rows = torch.tensor([ours.index(name[-1]) if name != "?" else 1 for name in theirs])
    weights = {
        name: weight[rows] if weight.shape[0] == len(ours) else weight for name, weight in draft.state_dict().items()
    }
    weights["lm_head.weight"][0] = -10.0 * weights["lm_head.weight"][0]
    other.load_state_dict(weights)
    return {"assistant_model": other, "tokenizer": letters(list(ours)), "assistant_tokenizer": letters(theirs)}


def metaspace_tokenizer():
    """A tokenizer as SentencePiece makes them: a space before each text, spaces as "▁", tokens for single bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=144, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator(SENTENCES[:2], trainer)
    made = json.loads(tokenizer.to_str())
    vocabulary = made["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
