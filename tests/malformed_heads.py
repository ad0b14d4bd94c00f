"""Heads as strangers may publish them: each entry damages the folder of a sound head in one way."""

import json
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_specbranch.heads.files import content_hash

CONFIG, WEIGHTS = "config.json", "model.safetensors"
HUGE = 10**400  # JSON knows no largest integer


def write_head(folder, record, tensors, repeated=None):
    """The files of a head that contradict nothing but common sense: the hash and the repeated config are right."""
    flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
    hashed = tensors if all(tensor.ndim for tensor in tensors.values()) else flat
    record = {**record, "weights_sha256": content_hash(hashed)}
    text = json.dumps(record)
    (folder / CONFIG).write_text(text)
    save_file(tensors, folder / WEIGHTS, metadata={"config": text if repeated is None else repeated})


def read_head(folder):
    with safe_open(folder / WEIGHTS, framework="pt") as weights:
        tensors = {name: weights.get_tensor(name).clone() for name in weights.keys()}
    return json.loads((folder / CONFIG).read_text()), tensors


def config(path, value):
    """A config with another value at a path such as target.id; `...` removes it."""

    def damage(folder):
        record, tensors = read_head(folder)
        *parents, name = path.split(".")
        part = record
        for parent in parents:
            part = part[parent]
        part[name] = value
        if value is ...:
            del part[name]
        write_head(folder, record, tensors)

    return damage


def tensor(name, change):
    """Weights with another tensor of a name; None removes it."""

    def damage(folder):
        record, tensors = read_head(folder)
        changed = change(tensors.pop(name, None))
        write_head(folder, record, tensors if changed is None else {**tensors, name: changed.contiguous()})

    return damage


def content(file, change):
    """A file with other bytes; None removes it, `...` puts a folder in its place."""

    def damage(folder):
        changed = change((folder / file).read_bytes())
        (folder / file).unlink()
        if changed is ...:
            (folder / file).mkdir()
        elif changed is not None:
            (folder / file).write_bytes(changed)

    return damage


def repeated(text):
    def damage(folder):
        write_head(folder, *read_head(folder), repeated=text)

    return damage


def header(text):
    """A safetensors file with this header and no tensors."""
    return content(WEIGHTS, lambda _: len(text).to_bytes(8, "little") + text)


def filled(value):
    def change(old):
        old[..., -1] = value
        return old

    return change


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


ONE_MORE = {"macro_f1": {"head": 0.5, "confidence": 0.5, "majority": 0.5}}  # and nothing else of a training record
MATCH = r"do not match its config: '{}': expected {}, found {}".format

CONFIGS = {
    "gamma is a text": ("gamma", "four", "gamma='four': expected a whole number"),
    "gamma is true": ("gamma", True, "gamma=True: expected a whole number"),
    "gamma is a fraction": ("gamma", 4.5, "gamma=4.5: expected a whole number"),
    "gamma is 0": ("gamma", 0, "gamma=0: expected a whole number of at least 1"),
    "gamma is null": ("gamma", None, "gamma=None: expected a whole number"),
    "gamma is missing": ("gamma", ..., "does not describe a length head: expected target, draft, gamma"),
    "gamma is giant": ("gamma", 2_000_000, "gamma=2000000: expected .* at most 1024"),
    "gamma has 400 digits": ("gamma", HUGE, r"gamma=1000.*\.\.\.0+: expected a whole number"),
    "gamma is not that of the weights": ("gamma", 5, MATCH("layers.0.weight", r"F32 \[16, 34\]", r"F32 \[16, 28\]")),
    "drafted_tokens is giant": ("drafted_tokens", 3_000_000, "drafted_tokens=3000000: expected .* at most 128"),
    "drafted_tokens is large": ("drafted_tokens", 128, r"do not match its config: .*; and \d+ more"),
    "num_layers is a text": ("num_layers", "1", "num_layers='1': expected a whole number"),
    "num_layers is a list": ("num_layers", [1], r"num_layers=\[1\]: expected a whole number"),
    "match_size is negative": ("match_size", -4, "match_size=-4: expected a whole number of at least 0"),
    "match_size is a text": ("match_size", "4", "match_size='4': expected a whole number"),
    "query_size is 0": ("query_size", 0, "query_size=0: expected a whole number of at least 1"),
    "query_size is null": ("query_size", None, "query_size=None: expected a whole number"),
    "no features": ("features", [], r"features=\[\]: expected a list of 1 to 7"),
    "features is a text": ("features", "hidden", "features='hidden': expected a list"),
    "features is null": ("features", None, "features=None: expected a list"),
    "features is an object": ("features", {"hidden": 1}, r"features=\{'hidden': 1\}: expected a list"),
    "a feature is a list": ("features", [["hidden"]], r"features=\[\['hidden'\]\]: expected some of"),
    "a feature is a number": ("features", [1, None], r"features=\[1, None\]: expected some of"),
    "a feature that is no more": ("features", ["margin"], r"features=\['margin'\]: expected some of \['hidden', 'comm"),
    "a feature twice": ("features", ["kind", "kind"], "expected each of them once"),
    "no layers": ("layer_sizes", [], r"layer_sizes=\[\]: expected a list of 1 to 16"),
    "layers is a number": ("layer_sizes", 16, "layer_sizes=16: expected a list"),
    "a layer is a text": ("layer_sizes", [16, "8"], r"layer_sizes\[1\]='8': expected a whole number"),
    "a layer is giant": ("layer_sizes", [16, 10**9], r"layer_sizes\[1\]=1000000000: expected .* at most 16384"),
    "many layers": ("layer_sizes", [16] * 5000, "expected a list of 1 to 16 whole numbers"),
    "dropout is 2": ("dropout", 2, "dropout=2: expected a number from 0 to 1"),
    "dropout is NaN": ("dropout", float("nan"), "dropout=nan: expected a number from 0 to 1"),
    "a threshold is a text": ("none_threshold", "0.5", "none_threshold='0.5': expected a number from 0 to 1"),
    "a threshold is a list": ("all_threshold", [0.5], r"all_threshold=\[0.5\]: expected a number from 0 to 1"),
    "a threshold is null": ("all_threshold", None, "all_threshold=None: expected a number from 0 to 1"),
    "a threshold is infinite": ("none_threshold", float("inf"), "none_threshold=inf: expected a number"),
    "a threshold has 400 digits": ("all_threshold", HUGE, "all_threshold=1000.*: expected a number from 0 to 1"),
    "epsilon is a text": ("confidence_threshold", "auto", "confidence_threshold='auto': expected a number"),
    "the tokenizer's hash is a number": ("tokenizer_hash", 5, "tokenizer_hash=5: expected 64 hexadecimal digits"),
    "the tokenizer's hash is short": ("tokenizer_hash", "ab", "tokenizer_hash='ab': expected 64 hexadecimal"),
    "the target is null": ("target", None, "target=None: expected an object with exactly id, revision"),
    "the target is a list": ("target", [1, 2], r"target=\[1, 2\]: expected an object with exactly"),
    "the target lacks a field": ("target.vocab_size", ..., "target={.*}: expected an object with exactly"),
    "the target's width is a text": ("target.hidden_size", "32", "target.hidden_size='32': expected a whole number"),
    "the target's width is 0": ("target.hidden_size", 0, "target.hidden_size=0: expected a whole number of at least 1"),
    "the target's width is giant": ("target.hidden_size", 2**40, "target.hidden_size=1099511627776: expected"),
    "the target's width is large": (
        "target.hidden_size",
        2**20,
        "describes a head of .* weights|does not fit this pair",
    ),
    "the target's depth is null": ("target.num_layers", None, "target.num_layers=None: expected a whole number"),
    "the draft's name is a number": ("draft.id", 7, "draft.id=7: expected a text of one line"),
    "the draft's name has two lines": ("draft.id", "a\n- b", r"draft.id='a\\n- b': expected a text of one line"),
    "the draft's name is no Unicode": ("draft.id", "\ud800", r"draft.id='\\ud800': expected a text of one line"),
    "the revision is an object": ("draft.revision", {}, "draft.revision={}: expected a text"),
    "training is a list": ("training", [], r"training=\[\]: expected an object"),
    "training is half there": ("training", ONE_MORE, "training=.*: expected an object with prompts, macro_f1"),
    "training is nested": ("training", {"a": nested(400)}, "nested deeply: expected at most 16 levels"),
    "the format is true": ("format_version", True, "format_version=True, .* this version reads format 1"),
    "the format is a list": ("format_version", [], r"format_version=\[\], .* this version reads format 1"),
    "the format is newer": ("format_version", 2, "format_version=2, .* this version reads format 1"),
    "the version is an object": ("library_version", {}, "library_version={}: expected a text"),
    "an unknown field": ("magic", 1, r"unknown fields \['magic'\]: expected some of"),
}
FILES = {
    "the config is empty": (content(CONFIG, lambda _: b""), "config.json is not JSON"),
    "the config is a list": (content(CONFIG, lambda _: b"[]"), "config.json holds a JSON list: expected an object"),
    "the config is null": (content(CONFIG, lambda _: b"null"), "config.json holds a JSON NoneType"),
    "the config is an empty object": (content(CONFIG, lambda _: b"{}"), "config.json does not describe a length head"),
    "the config is cut off": (content(CONFIG, lambda old: old[:99]), "config.json is not JSON"),
    "the config is not UTF-8": (content(CONFIG, lambda old: b"\xff\xfe" + old), "config.json is not JSON .*utf-8"),
    "the config is nested": (content(CONFIG, lambda _: b"[" * 200_000), "config.json is not JSON .*recursion"),
    "the config has 9,000 digits": (
        content(CONFIG, lambda _: b'{"gamma": %s}' % (b"9" * 9000)),
        "is not JSON|does not describe",
    ),
    "the config is giant": (content(CONFIG, lambda old: old + b" " * 2**20), "bytes: expected at most 1,048,576"),
    "the weights are empty": (content(WEIGHTS, lambda _: b""), "is truncated or no safetensors file"),
    "the weights are cut off": (content(WEIGHTS, lambda old: old[:-9]), "is truncated or no safetensors file"),
    "the weights are a text": (content(WEIGHTS, lambda _: b"version https://git-lfs"), "no safetensors file"),
    "the weights are giant": (content(WEIGHTS, lambda old: old + bytes(2**23)), "bytes: expected at most"),
    "a header beyond the file": (content(WEIGHTS, lambda old: b"\xff" * 7 + b"\0" + old), "no safetensors file"),
    "a header that is nested": (header(b'{"a":' + b"[" * 100_000), "no safetensors file"),
    "a header that is a list": (header(b"[]" + b" " * 6), "no safetensors file"),
    "a header without tensors": (header(b"{}" + b" " * 6), "and the config inside .* differ"),
    "no repeated config": (repeated(""), "and the config inside .* differ"),
    "the repeated config is a list": (repeated("[]"), "and the config inside .* differ"),
    "the repeated config is nested": (repeated("[" * 100_000), "and the config inside .* differ"),
    "a scalar tensor": (tensor("mean", lambda old: old[0]), MATCH("mean", r"F32 \[154\]", r"F32 \[\]")),
    "a tensor of another shape": (tensor("std", lambda old: old[:9]), MATCH("std", r"F32 \[154\]", r"F32 \[9\]")),
    "a transposed tensor": (tensor("layers.0.weight", lambda old: old.T), MATCH("layers.0.weight", ".*", ".*")),
    "a missing tensor": (tensor("layers.3.bias", lambda _: None), MATCH("layers.3.bias", r"F32 \[8\]", "none")),
    "an additional tensor": (tensor("more", lambda _: torch.ones(2)), MATCH("more", "no such tensor", r"F32 \[2\]")),
    "numbers of 64 bits": (tensor("mean", torch.Tensor.double), MATCH("mean", r"F32 .*", r"F64 \[154\]")),
    "numbers of 16 bits": (tensor("mean", torch.Tensor.bfloat16), MATCH("mean", r"F32 .*", r"BF16 \[154\]")),
    "whole numbers": (tensor("mean", torch.Tensor.long), MATCH("mean", r"F32 .*", r"I64 \[154\]")),
    "truth values": (tensor("std", torch.Tensor.bool), MATCH("std", r"F32 .*", r"BOOL \[154\]")),
    "a weight is NaN": (tensor("layers.0.weight", filled(torch.nan)), "layers.0.weight in .* holds NaN or infinite"),
    "a mean is infinite": (tensor("mean", filled(torch.inf)), "mean in .* holds NaN or infinite"),
    "a deviation is 0": (tensor("std", filled(0.0)), "std in .* a smallest entry of 0.0: expected all above 0"),
    "a deviation is negative": (tensor("std", filled(-1.0)), "std in .* a smallest entry of -1.0: expected all above"),
}
PLACES = {  # what a repository cannot have, or the client reports by itself
    "the config is missing": (content(CONFIG, lambda _: None), "no config.json in"),
    "the config is a folder": (content(CONFIG, lambda _: ...), "config.json is a folder: expected a file"),
    "the weights are missing": (content(WEIGHTS, lambda _: None), "no model.safetensors in"),
    "the weights are a folder": (content(WEIGHTS, lambda _: ...), "model.safetensors is a folder: expected a file"),
}
PUBLISHED = {**{name: (config(path, value), said) for name, (path, value, said) in CONFIGS.items()}, **FILES}
MALFORMED = {**PUBLISHED, **PLACES}


def malformed(name, sound, folder):
    """A copy of a sound head's folder with one thing wrong, and what is said of it."""
    damage, said = MALFORMED[name]
    shutil.copytree(sound, folder)
    damage(folder)
    return folder, said
