"""The Hub form: `generate(custom_generate=folder)` with nothing imported."""

import copy
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, TextIteratorStreamer

from hf_specbranch import __version__, load_demo_pair, specbranch

pytestmark = pytest.mark.compat
FOLDER = str(Path(__file__).parent.parent / "examples" / "custom_generate")


@pytest.fixture(scope="module")
def pair():
    return load_demo_pair()


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """transformers looks up what requirements.txt names; a checkout that only lies on the path is not found there."""
    try:
        version("hf_specbranch")
    except PackageNotFoundError:
        record = tmp_path / f"hf_specbranch-{__version__}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hf_specbranch\nVersion: {__version__}\n")
        monkeypatch.syspath_prepend(tmp_path)


def ask(pair, **kwargs):
    inputs = pair[2]("def add(a, b):", return_tensors="pt")
    return pair[0].generate(**inputs, **{"max_new_tokens": 12, "do_sample": False, **kwargs})


def remote(pair, **kwargs):
    return ask(pair, custom_generate=FOLDER, trust_remote_code=True, **kwargs)


def test_the_text_is_that_of_plain_generate(pair):
    out = remote(pair, assistant_model=pair[1], return_dict_in_generate=True, specbranch={"policy": "vanilla"})
    assert torch.equal(out.sequences, ask(pair))
    assert out.stats.num_accepted_tokens > 0 and out.stats.new_tokens == 12


def test_it_may_be_called_again(pair):
    first, second = (remote(pair, assistant_model=pair[1]) for _ in range(2))
    assert torch.equal(first, second)


def test_the_model_is_left_as_it_was(pair):
    model = copy.deepcopy(pair[0])
    names, own = set(model.__dict__), (model, *pair[1:])
    remote(own, assistant_model=pair[1])
    assert type(model) is LlamaForCausalLM and set(model.__dict__) == names
    with pytest.raises(ValueError, match="policy='magic'"):
        remote(own, assistant_model=pair[1], specbranch={"policy": "magic"})
    assert type(model) is LlamaForCausalLM and set(model.__dict__) == names


def test_model_stays_attached_until_the_last_call_ends(pair):
    plain, kind = ask(pair), type(pair[0])
    with ThreadPoolExecutor(2) as threads:
        for out in threads.map(lambda _: remote(pair, assistant_model=pair[1]), range(4)):
            assert torch.equal(out, plain)
    assert type(pair[0]) is kind


def test_an_attached_model_stays_attached(pair):
    target, draft, tokenizer = pair
    model = specbranch(copy.deepcopy(target), draft=draft)
    out = remote((model, draft, tokenizer), specbranch={"policy": "vanilla"})
    assert torch.equal(out, ask(pair))
    assert model.specbranch_stats.policy == "vanilla" and model._specbranch_memory.draft is draft


def test_settings_and_a_streamer_arrive(pair):
    streamer = TextIteratorStreamer(pair[2])
    kwargs = {"specbranch": {"policy": "vanilla"}, "streamer": streamer, "return_dict_in_generate": True}
    out = remote(pair, assistant_model=pair[1], **kwargs)
    assert out.stats.policy == "vanilla"
    assert "".join(streamer) == pair[2].decode(out.sequences[0])


def test_without_a_draft_plain_generate_runs(pair):
    assert torch.equal(remote(pair), ask(pair))


def test_code_that_is_not_trusted_does_not_run(pair):
    with pytest.raises(ValueError, match="trust_remote_code"):
        ask(pair, custom_generate=FOLDER, assistant_model=pair[1], trust_remote_code=False)
