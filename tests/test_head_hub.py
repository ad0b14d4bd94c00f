"""Heads are found, downloaded and uploaded through the real client, against a server on loopback."""

import json
import logging
import runpy
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_specbranch import LengthHead, SpecBranchConfig
from hf_specbranch.cli import app, main
from hf_specbranch.heads import hub as hub_module
from hf_specbranch.heads import model as model_module

from .heads import random_head
from .hub_server import LoopbackHub
from .models import attached, prompt

NAME = "org/head"


@pytest.fixture
def head(target, draft):
    return random_head(target, draft)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with LoopbackHub().running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(model_module, "_HEADS", model_module.HeadStore(limit=8))
        yield hub


@pytest.fixture
def published(hub, head, tmp_path):
    return hub.add(NAME, head.save_pretrained(tmp_path / "published"))


def assert_same(a, b):
    assert a.config == b.config
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


def test_a_published_head_is_downloaded_by_name(published, head, tmp_path):
    fetched = LengthHead.from_pretrained(NAME, cache_dir=tmp_path / "cache")
    assert_same(fetched, LengthHead.from_pretrained(tmp_path / "published"))
    features = torch.randn(5, head.config.input_size)
    assert torch.equal(fetched(features), head(features))


def test_a_pinned_revision_is_honoured(hub, published, target, draft, tmp_path):
    first = published.names["main"]
    hub.add(NAME, random_head(target, draft, seed=1).save_pretrained(tmp_path / "second"))
    old = LengthHead.from_pretrained(f"{NAME}@{first}", cache_dir=tmp_path / "cache")
    new = LengthHead.from_pretrained(NAME, cache_dir=tmp_path / "cache")
    by_argument = LengthHead.from_pretrained(NAME, revision=first, cache_dir=tmp_path / "cache")
    assert_same(old, LengthHead.from_pretrained(tmp_path / "published"))
    assert_same(by_argument, old)
    assert_same(new, LengthHead.from_pretrained(tmp_path / "second"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/nothing", "there is no repository org/nothing, or it is private: check the name, or log in"),
        (f"{NAME}@v9", f"{NAME} has no revision 'v9': choose another"),
        ("org/other", r"org/other is no length head, it lacks config.json or model.safetensors"),
        ("org/secret", "org/secret, or it is private: check the name, or log in"),
        ("org/he ad", "org/he ad is no repository id"),
    ],
)
def test_what_cannot_be_had_is_said_with_a_remedy(hub, published, name, message, tmp_path):
    hub.add("org/other").commit({"README.md": b"hello"})
    hub.add("org/secret", tmp_path / "published", private=True)
    with pytest.raises(OSError, match=message):
        LengthHead.from_pretrained(name, cache_dir=tmp_path / "cache")


def test_a_private_head_opens_with_the_token(hub, head, tmp_path):
    hub.add("org/secret", head.save_pretrained(tmp_path / "head"), private=True)
    fetched = LengthHead.from_pretrained("org/secret", token=hub.token, cache_dir=tmp_path / "cache")
    assert_same(fetched, LengthHead.from_pretrained(tmp_path / "head"))


def test_interrupted_download_leaves_no_head(hub, published, head, tmp_path):
    hub.cut_after = 1000
    with pytest.raises(OSError, match=f"length head {NAME}: the download of {NAME} failed"):
        LengthHead.from_pretrained(NAME, cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("snapshots/*/model.safetensors"))
    hub.cut_after = None
    assert_same(
        LengthHead.from_pretrained(NAME, cache_dir=tmp_path / "cache"),
        LengthHead.from_pretrained(tmp_path / "published"),
    )


def test_a_tampered_file_on_the_hub_is_refused(hub, published, tmp_path):
    content = bytearray(published.files("main")["model.safetensors"])
    content[-3] ^= 1
    published.commit({"model.safetensors": bytes(content)})
    with pytest.raises(ValueError, match="model.safetensors was altered: its weights have SHA-256"):
        LengthHead.from_pretrained(NAME, cache_dir=tmp_path / "cache")


def test_the_cache_serves_when_the_hub_is_gone(published, hub, tmp_path, monkeypatch):
    fetched = LengthHead.from_pretrained(NAME, cache_dir=tmp_path / "cache")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert_same(LengthHead.from_pretrained(NAME, cache_dir=tmp_path / "cache"), fetched)
    with pytest.raises(OSError, match="org/never-seen is not in the local cache, and the Hub cannot be reached"):
        LengthHead.from_pretrained("org/never-seen", cache_dir=tmp_path / "cache")


def test_offline_mode_reads_the_cache_and_asks_nobody(published, hub, tmp_path, monkeypatch):
    fetched = LengthHead.from_pretrained(NAME, cache_dir=tmp_path / "cache")
    asked = len(hub.requests)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it reads the environment when imported
    assert_same(LengthHead.from_pretrained(NAME, cache_dir=tmp_path / "cache"), fetched)
    with pytest.raises(OSError, match="org/never-seen is not in the local cache"):
        LengthHead.from_pretrained("org/never-seen", cache_dir=tmp_path / "cache")
    assert len(hub.requests) == asked


def test_a_head_is_uploaded_with_its_card_and_found_again(hub, head, tmp_path):
    address = head.push_to_hub("me/my-head", token=hub.token)
    repository = hub.repositories["me/my-head"]
    assert address == f"{hub.url}/me/my-head/commit/{repository.names['main']}"
    assert set(repository.files("main")) >= {"README.md", "config.json", "model.safetensors"}
    assert 'head="me/my-head"' in repository.files("main")["README.md"].decode()
    found = hub_module.search(head.config.target.id, head.config.draft.id)
    assert [entry.repo_id for entry in found] == ["me/my-head"] and found[0].for_draft
    fetched = LengthHead.from_pretrained("me/my-head", cache_dir=tmp_path / "cache")
    assert torch.equal(fetched.mean, head.mean)


def test_an_upload_without_the_right_to_is_refused(hub, head):
    with pytest.raises(OSError, match="could not upload the head"):
        head.push_to_hub("me/my-head", token="wrong")
    assert not hub.repositories


def publish_pair(hub, tmp_path, target, draft, **ids):
    """Heads for a named pair: one for this draft, one more popular for another."""
    target.name_or_path, draft.name_or_path = "org/large", "org/small"
    fits = random_head(target, draft)
    hub.add("org/fits", fits.save_pretrained(tmp_path / "fits"), downloads=3)
    draft.name_or_path = "org/tiny"
    hub.add("org/popular", random_head(target, draft).save_pretrained(tmp_path / "popular"), downloads=90)
    draft.name_or_path = "org/small"


@pytest.fixture
def named_pair(target, draft, hub, tmp_path):
    large, small = attached(target), attached(draft)
    publish_pair(hub, tmp_path, large, small)
    return large, small


def test_search_puts_the_head_for_this_draft_first(named_pair, hub):
    found = hub_module.search("org/large", "org/small")
    assert [(entry.repo_id, entry.for_draft) for entry in found] == [("org/fits", True), ("org/popular", False)]
    assert hub_module.search("org/unknown") == []
    printed = CliRunner().invoke(app, ["head", "search", "--target", "org/large", "--draft", "org/small"])
    assert printed.output.splitlines()[0] == "org/fits  3 downloads, 0 likes  for this draft"
    machine = CliRunner().invoke(app, ["head", "search", "--target", "org/large", "--json"])
    assert [entry["repo_id"] for entry in json.loads(machine.output)] == ["org/popular", "org/fits"]


@pytest.mark.compat
@pytest.mark.matrix
def test_auto_takes_the_head_for_this_pair_and_says_which(named_pair, hub, caplog):
    large, small = named_pair
    kwargs = {**prompt(), "max_new_tokens": 12, "do_sample": False}
    with caplog.at_level(logging.WARNING, logger="hf_specbranch"):
        for _ in range(2):
            out = large.generate(**kwargs, assistant_model=small, length_head="auto")
    assert torch.equal(out, large.generate(**kwargs, assistant_model=small, specbranch=False))
    said = [record.message for record in caplog.records if record.name == "hf_specbranch"]
    sha = hub.repositories["org/fits"].names["main"]
    assert said == [f"length_head='auto': using org/fits at revision {sha}"]
    large.generate(**kwargs, assistant_model=small, length_head="auto")
    assert large.specbranch_stats.length_head == f"org/fits@{sha}"
    large.generate(**kwargs, assistant_model=small, length_head=None)
    assert large.specbranch_stats.length_head == ""


@pytest.mark.parametrize("network", [True, False])
def test_auto_without_a_head_goes_on_and_says_so_once(hub, target, draft, caplog, monkeypatch, network):
    if not network:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    model = attached(target)
    settings = SpecBranchConfig(length_head="auto")
    with caplog.at_level(logging.WARNING, logger="hf_specbranch"):
        for _ in range(2):
            model.generate(**prompt(), max_new_tokens=8, assistant_model=draft, specbranch=settings)
    said = [record.message for record in caplog.records if record.name == "hf_specbranch"]
    assert len(said) == 1 and "going on without" in said[0]


def test_generate_takes_a_head_by_name(hub, published, target, draft):
    kwargs = {**prompt(), "max_new_tokens": 16, "do_sample": False}
    model = attached(target)
    out = model.generate(**kwargs, assistant_model=draft, length_head=NAME)
    assert torch.equal(out, target.generate(**kwargs))
    sha = published.names["main"]
    assert torch.equal(out, model.generate(**kwargs, assistant_model=draft, length_head=f"{NAME}@{sha}"))


def test_the_command_says_errors_in_one_line(hub, capsys, monkeypatch):
    words = ["hf-specbranch", "head", "push", "--head", "org/nothing", "--repo", "me/x"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capsys.readouterr().err
    assert ended.value.code == 1 and errors.startswith("error: length head org/nothing: there is no repository")
    assert len(errors.splitlines()) == 1


def test_everything_is_published_to_a_namespace(hub, head, tmp_path, capsys, monkeypatch):
    publish = runpy.run_path(str(Path(__file__).parent.parent / "examples/publish_to_hub.py"))["main"]
    monkeypatch.setenv("HF_TOKEN", hub.token)
    words = ["--namespace", "me", "--head", str(head.save_pretrained(tmp_path / "head"))]
    publish(words)
    assert not hub.repositories and "nothing was sent: add --upload" in capsys.readouterr().out
    publish([*words, "--upload"])
    target, draft = head.config.target.id, head.config.draft.id
    name, demo = f"me/{target}-with-{draft}-length-head", "me/demo_pair-target-with-demo_pair-weak-length-head"
    real = "me/Qwen2.5-Coder-1.5B-Instruct-with-Qwen2.5-Coder-0.5B-Instruct-length-head"
    assert set(hub.repositories) == {"me/specbranch", name, demo, real}
    files = hub.repositories["me/specbranch"].files("main")
    assert {"README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"} <= set(files)
    assert b'custom_generate="me/specbranch"' in files["README.md"]
    assert hub_module.search(target, draft)[0].repo_id == name
    fetched = LengthHead.from_pretrained(name, cache_dir=tmp_path / "fetched")
    assert fetched.origin == f"{name}@{hub.repositories[name].names['main']}"
    assert f'head="{demo}"' in hub.repositories[demo].files("main")["README.md"].decode()
