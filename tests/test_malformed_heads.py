"""Whatever a stranger publishes as a length head: it is refused by one error, or skipped, and nothing else happens."""

import json
import logging
import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import OPTConfig, OPTForCausalLM

from hf_specbranch import LengthHead
from hf_specbranch.heads import HeadError
from hf_specbranch.heads import model as model_module

from .heads import random_head
from .hub_server import LoopbackHub
from .malformed_heads import MALFORMED, PUBLISHED, malformed, read_head, write_head
from .models import VOCABULARY, attached, llama, prompt, slowly
from .tokens import letter_tokenizer

FITS = "org/fits"


@pytest.fixture(scope="module")
def sound(target, draft, tmp_path_factory):
    """The folder of a head with nothing wrong."""
    return random_head(target, draft).save_pretrained(tmp_path_factory.mktemp("sound") / "head")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with LoopbackHub().running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(model_module, "_HEADS", model_module.HeadStore(limit=8))
        yield hub


@pytest.fixture
def named_pair(target, draft):
    large, small = attached(target), attached(draft)
    large.name_or_path, small.name_or_path = "org/large", "org/small"
    return large, small


@pytest.fixture
def fits(hub, named_pair, tmp_path):
    """A sound head on the Hub, which is found last."""
    return hub.add(FITS, random_head(*named_pair).save_pretrained(tmp_path / "fits"), downloads=1)


def said_by_auto(caplog, model, draft, **kwargs):
    """What the log says of a search, and whether the output is that of the model alone."""
    call = {**prompt(), "max_new_tokens": 12, "do_sample": False}
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="hf_specbranch"):
        out = model.generate(**call, assistant_model=draft, length_head="auto", **kwargs)
    assert torch.equal(out, model.generate(**call, assistant_model=draft, specbranch=False))
    return [record.getMessage() for record in caplog.records if record.name == "hf_specbranch"]


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_head_is_refused_by_name(name, sound, tmp_path):
    folder, said = malformed(name, sound, tmp_path / "head")
    with pytest.raises(HeadError, match=said) as caught:
        LengthHead.from_pretrained(folder)
    message = str(caught.value)
    assert str(folder) in message and len(message) < 1000 and message.isprintable()


@pytest.mark.parametrize("name", ["a threshold is a text", "a scalar tensor", "the config is nested"])
def test_malformed_head_is_refused_before_any_work(name, sound, tmp_path, target, draft):
    folder, said = malformed(name, sound, tmp_path / "head")
    model = attached(target)
    model.register_forward_pre_hook(lambda *_: pytest.fail("worked before refusing"))
    with pytest.raises(ValueError, match=said):
        model.generate(**prompt(), max_new_tokens=3, assistant_model=draft, length_head=str(folder))


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_auto_skips_malformed_heads(every, hub, fits, named_pair, tmp_path, caplog):
    names = list(PUBLISHED)[::every]
    for number, name in enumerate(names):
        folder, _ = malformed(name, tmp_path / "fits", tmp_path / str(number))
        hub.add(f"org/bad-{number}", folder, downloads=10_000 - number)
    hub.add("org/empty").commit({"README.md": (tmp_path / "fits" / "README.md").read_bytes()})
    hub.repositories["org/empty"].downloads = 2
    *skipped, empty, used = said_by_auto(caplog, *named_pair)
    assert len(skipped) == len(names) >= 30
    for number, (name, line) in enumerate(zip(names, skipped)):
        assert line.startswith(f"length_head='auto': skipping org/bad-{number}: "), line
        assert re.search(PUBLISHED[name][1], line), line
    assert "skipping org/empty: length head org/empty: org/empty is no length head, it lacks" in empty
    assert used == f"length_head='auto': using {FITS} at revision {fits.names['main']}"


def test_malformed_head_on_the_hub_is_refused(hub, sound, tmp_path):
    hub.add("org/bad", malformed("no features", sound, tmp_path / "bad")[0])
    with pytest.raises(HeadError, match=r"config.json: features=\[\]"):
        LengthHead.from_pretrained("org/bad", cache_dir=tmp_path / "cache")


def fetched(hub, repo_id):
    """The files that were downloaded from a repository."""
    return {path.rsplit("/")[-1] for method, path in hub.requests if method == "GET" and path.startswith(f"/{repo_id}")}


@pytest.mark.parametrize("name", ["the weights are giant", *map(slowly, ("gamma is giant", "the config is giant"))])
def test_what_is_too_large_is_not_downloaded(name, hub, fits, named_pair, tmp_path, caplog):
    hub.add("org/giant", malformed(name, tmp_path / "fits", tmp_path / "giant")[0], downloads=9)
    assert "skipping org/giant" in said_by_auto(caplog, *named_pair)[0]
    assert fetched(hub, "org/giant") <= {"config.json"} - ({"config.json"} if "config" in name else set())
    assert fetched(hub, FITS) == {"config.json", "model.safetensors"}


def test_auto_skips_a_head_for_another_pair(hub, fits, named_pair, tmp_path, caplog):
    large, small = named_pair
    wider = llama(seed=0, hidden=48)
    wider.name_or_path = large.name_or_path
    hub.add("org/wide", random_head(wider, small).save_pretrained(tmp_path / "wide"), downloads=9)
    skipped, used = said_by_auto(caplog, large, small)
    assert (
        "skipping org/wide: the length head does not fit this pair (target hidden_size: head 48, given 32)" in skipped
    )
    assert fetched(hub, "org/wide") == {"config.json"} and FITS in used


def test_auto_skips_a_head_for_another_tokenizer(hub, fits, named_pair, tmp_path, caplog):
    other = random_head(*named_pair, tokenizer_hash="0" * 64)
    hub.add("org/other", other.save_pretrained(tmp_path / "other"), downloads=9)
    assert "using org/other" in said_by_auto(caplog, *named_pair)[0]
    skipped, used = said_by_auto(caplog, *named_pair, tokenizer=letter_tokenizer(VOCABULARY))
    assert "skipping org/other" in skipped and "tokenizer hash: head 0000" in skipped and FITS in used


def test_auto_searches_again_for_a_model_of_the_same_name(hub, fits, named_pair, tmp_path, caplog):
    large, small = named_pair
    assert FITS in said_by_auto(caplog, large, small)[0]
    wider = attached(llama(seed=0, hidden=48))
    wider.name_or_path = large.name_or_path
    skipped, none = said_by_auto(caplog, wider, small)
    assert f"skipping {FITS}" in skipped and "no head for org/large with org/small" in none


def test_a_head_for_narrower_embeddings_is_refused(draft):
    """OPT's embeddings may be narrower than its states: a head that reads both as one width is no head for it."""
    settings = dict(
        vocab_size=VOCABULARY, hidden_size=32, word_embed_proj_dim=16, ffn_dim=32, max_position_embeddings=64
    )
    model = OPTForCausalLM(OPTConfig(num_hidden_layers=2, num_attention_heads=2, **settings))
    with pytest.raises(HeadError, match="target embedding size: head 32, given 16"):
        random_head(model, draft).check_pair(model, draft)
    random_head(model, draft, features=("hidden", "confidence")).check_pair(model, draft)


class LargestTensor(TorchDispatchMode):
    """The most entries of any tensor that took memory."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type != "meta":
            self.entries = max(self.entries, result.numel())
        return result


GIANTS = {
    "gamma": {"gamma": 2_000_000},
    "drafted tokens": {"drafted_tokens": 3_000_000},
    "layers": {"layer_sizes": [2**31] * 4},
    "everything at its bound": {
        "gamma": 1024,
        "drafted_tokens": 128,
        "match_size": 2**14,
        "query_size": 2**14,
        "layer_sizes": [2**14] * 16,
    },
    "just below the bound": {"layer_sizes": [2**14, 2**13]},
}


@pytest.mark.parametrize("name", GIANTS)
def test_giants_are_refused_before_anything_is_built(name, sound, tmp_path):
    folder = Path(shutil.copytree(sound, tmp_path / "head"))
    record, tensors = read_head(folder)
    write_head(folder, {**record, **GIANTS[name]}, tensors)
    start = time.perf_counter()
    with LargestTensor() as watched, pytest.raises(HeadError):
        LengthHead.from_pretrained(folder)
    assert time.perf_counter() - start < 5  # a busy machine included
    assert watched.entries < 10_000


# ---- any change at all

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**30, 2**63, 1e300]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TRAINED = json.dumps(
    {
        "prompts": {"number": 3, "file": "few.jsonl", "sha256": "ab", "sets": [{"sha256": "ab"}]},
        "macro_f1": {"head": 0.6, "confidence": 0.5, "majority": 0.2},
        "accuracy": {"head": 0.6, "confidence": 0.5, "majority": 0.2},
        "lines": 30,
        "held_out_lines": 6,
        "classes": [10, 10, 10],
        "temperatures": [0.0, 0.8],
        "measured": {
            "prompts": {"number": 3, "file": "few.jsonl"},
            "max_new_tokens": 8,
            "runs": [{"temperature": 0.0, "method": "vanilla", "rollback_rate": 0.5, "tokens_per_pass": 1.5}],
        },
    }
)
NUMBERS = st.floats(0, 1) | st.integers(0, 9)  # more often within the bounds


def paths(record, before=()):
    for name, value in record.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_config_with_any_value_is_refused_or_works(data, sound, target):
    record, tensors = read_head(sound)
    changed = json.loads(json.dumps(record))
    changed["training"] = json.loads(TRAINED)
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, name = data.draw(st.sampled_from(sorted(paths(changed))))
        part = changed
        for parent in parents:
            part = part[parent]
        part[name] = data.draw(JSON | NUMBERS)
    with tempfile.TemporaryDirectory() as folder:
        write_head(Path(folder), changed, tensors)
        try:
            head = LengthHead.from_pretrained(folder)
        except HeadError as error:
            assert folder in str(error)
            return
        again = LengthHead.from_pretrained(head.save_pretrained(Path(folder) / "again"))
    assert again.config.to_json() == head.config.to_json().replace(
        json.dumps(head.config.library_version), json.dumps(again.config.library_version)
    )
    head.bind(target)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_weights_with_any_bytes_are_refused_or_the_same(data, sound):
    content = bytearray((sound / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, min(len(content), 4000) - 1))
        content[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes((sound / "config.json").read_bytes())
        (Path(folder) / "model.safetensors").write_bytes(content)
        try:
            head = LengthHead.from_pretrained(folder)
        except HeadError:
            return
    same = LengthHead.from_pretrained(sound).state_dict()
    assert all(torch.equal(weights, same[name]) for name, weights in head.state_dict().items())


def test_numbers_at_the_edge_of_float32_change_no_token(sound, tmp_path, target, draft):
    folder = Path(shutil.copytree(sound, tmp_path / "head"))
    record, tensors = read_head(folder)
    for name, weights in tensors.items():
        weights.copy_(torch.full_like(weights, 1e-45) if name == "std" else weights.sign() * 3e38)
    write_head(folder, record, tensors)
    kwargs = {**prompt(), "max_new_tokens": 16, "do_sample": False}
    out = attached(target).generate(**kwargs, assistant_model=draft, length_head=str(folder))
    assert torch.equal(out, target.generate(**kwargs))


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        (7, TypeError, "length head 7: expected a folder or a repository id"),
        (None, TypeError, "length head None: expected a folder or a repository id"),
        ("", OSError, "no length head at : expected a folder"),
        ("~nobody-at-all/head", OSError, "no length head at ~nobody-at-all/head: expected a folder"),
        ("a" * 5000, OSError, "no length head at aaaa"),
        ("a\0b", OSError, "no length head at a"),
    ],
)
def test_what_names_no_head_is_refused(name, error, said):
    with pytest.raises(error, match=said):
        LengthHead.from_pretrained(name)
