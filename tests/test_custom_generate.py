"""The Hub form: `generate(custom_generate=folder)` with nothing imported."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from transformers import TextIteratorStreamer

from hf_specbranch import __version__, load_demo_pair

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


@pytest.fixture(autouse=True)
def fresh(pair):
    yield
    if hasattr(pair[0], "detach_specbranch"):
        pair[0].detach_specbranch()


def ask(pair, **kwargs):
    inputs = pair[2]("def add(a, b):", return_tensors="pt")
    return pair[0].generate(**inputs, **{"max_new_tokens": 12, "do_sample": False, **kwargs})


def remote(pair, **kwargs):
    return ask(pair, custom_generate=FOLDER, trust_remote_code=True, **kwargs)


def test_the_text_is_that_of_plain_generate(pair):
    plain = ask(pair)
    assert torch.equal(remote(pair, assistant_model=pair[1]), plain)
    assert pair[0].specbranch_stats.num_accepted_tokens > 0


def test_it_may_be_called_again(pair):
    first, second = (remote(pair, assistant_model=pair[1]) for _ in range(2))
    assert torch.equal(first, second)


def test_settings_and_a_streamer_arrive(pair):
    streamer = TextIteratorStreamer(pair[2])
    out = remote(pair, assistant_model=pair[1], specbranch={"policy": "vanilla"}, streamer=streamer)
    assert pair[0].specbranch_stats.policy == "vanilla"
    assert "".join(streamer) == pair[2].decode(out[0])


def test_statistics_come_with_the_output(pair):
    out = remote(pair, assistant_model=pair[1], return_dict_in_generate=True)
    assert out.stats.new_tokens == 12


def test_without_a_draft_plain_generate_runs(pair):
    assert torch.equal(remote(pair), ask(pair))


def test_code_that_is_not_trusted_does_not_run(pair):
    with pytest.raises(ValueError, match="trust_remote_code"):
        ask(pair, custom_generate=FOLDER, assistant_model=pair[1], trust_remote_code=False)
