"""What a head learns from texts, and from drafts of several folders."""

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_specbranch import LengthHead
from hf_specbranch.bench.prompts import Prompt
from hf_specbranch.cli import app
from hf_specbranch.decoding.hooks import Survivor
from hf_specbranch.heads.collect import collect
from hf_specbranch.heads.dataset import CollectSettings, read_folders, read_samples, read_texts
from hf_specbranch.heads.evaluate import EvalSettings, evaluate
from hf_specbranch.heads.network import Expectation, head_inputs
from hf_specbranch.heads.train import TrainSettings, learn_expectation, train

from .models import VOCABULARY
from .tokens import letter_tokenizer

SETTINGS = CollectSettings(gamma=4, max_new_tokens=16, batch_size=4, num_layers=1, drafted_tokens=2)
SMALL = TrainSettings(epochs=3, layer_sizes=(16, 8), match_size=4, query_size=8, text_epochs=2)
TEXTS = ["abcdefgh"[start:] for start in range(6)]


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer(VOCABULARY)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, target, draft, tokenizer):
    made = []
    for name, texts in (("one", ["abc", "bcd", "cde", "def"]), ("two", ["xyz", "yzx", "zxy"])):
        folder = tmp_path_factory.mktemp(name)
        prompts = [Prompt(text, text) for text in texts]
        collect(target, draft, tokenizer, prompts, folder / f"{name}.jsonl", folder, SETTINGS, progress=False)
        made.append(folder)
    return made


@pytest.fixture(scope="module")
def reading(target, tokenizer):
    return read_texts(target, tokenizer, TEXTS, num_layers=1, places=2, new_tokens=24, batch_size=3, progress=False)


def test_a_reading_holds_what_the_target_thought(reading, target):
    positions = len(reading.tokens)
    assert reading.hidden.shape[:2] == (positions, 1) and reading.tokens.shape == (positions, 3)
    # greedy text: the token that followed is the likeliest in its place
    first = reading.tokens[:10, 1]
    assert (reading.likely[:, 0, 0] == reading.tokens[:, 1]).float().mean() > 0.4
    assert first.shape == (10,) and (reading.chance.sum(-1) <= 1 + 1e-4).all()


def test_reading_is_repeatable(reading, target, tokenizer):
    again = read_texts(target, tokenizer, TEXTS, num_layers=1, places=2, new_tokens=24, batch_size=3, progress=False)
    assert all(torch.equal(one, two) for one, two in zip(reading, again))


def test_an_expectation_learns_log_probabilities(reading):
    torch.manual_seed(0)
    context = torch.cat([reading.hidden.flatten(1).float(), reading.embeddings[reading.tokens[:, 0]]], dim=1)
    context = (context - context.mean(0)) / context.std(0)
    table = reading.embeddings / reading.embeddings.std()
    expectation = Expectation(context.shape[1], table.shape[1], tokens=2, query_size=32, match_size=16)
    losses = learn_expectation(expectation, context, reading, table, 80, dropout=0.0, seed=0, progress=False)
    assert losses[-1] < 0.85 * losses[0]
    with torch.no_grad():
        scores = expectation(context, table[reading.tokens[:, 1:]])
    truth = (reading.likely == reading.tokens[:, 1:, None]).float().mul(reading.chance).sum(-1)
    known = truth[:, 0] > 0
    together = torch.stack([scores[known, 0], truth[known, 0].log()])
    assert torch.corrcoef(together)[0, 1] > 0.5


def test_training_with_texts_is_repeatable_and_matters(folders, reading):
    one, two = (train(folders[0], SMALL, progress=False, reading=reading).head for _ in range(2))
    without = train(folders[0], SMALL, progress=False).head
    weights = [head.expectation.key.weight for head in (one, two, without)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_drafts_of_several_folders_are_joined_by_prompt(folders, target, draft, tokenizer):
    (_, one), (_, two) = (read_samples(folder) for folder in folders)
    manifest, both = read_folders(folders)
    assert len(both["accepted"]) == len(one["accepted"]) + len(two["accepted"])
    assert len(set(both["prompt"].tolist())) == 7
    assert [each["file"] for each in manifest.prompts["sets"]] == ["one.jsonl", "two.jsonl"]
    head = train(folders, SMALL, progress=False).head
    prompts = [Prompt(text, text) for text in ["xyz", "yzx", "zxy"]]
    with pytest.raises(ValueError, match="the head was trained on"):
        evaluate(head, target, draft, tokenizer, prompts, folders[1] / "two.jsonl", EvalSettings(), progress=False)


def test_folders_of_different_pairs_do_not_belong_together(folders, tmp_path):
    for file in folders[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["settings"]["gamma"] = 5
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"do not belong together \(gamma: 4 and 5\)"):
        read_folders([folders[0], tmp_path])


def test_features_a_head_does_not_read_are_not_computed(target):
    torch.manual_seed(0)
    drafts = Survivor(
        tokens=torch.tensor([[3, 4, 5]]),
        length=torch.tensor([2]),
        confidence=torch.full((1, 3), 0.5),
        committed=torch.tensor([1]),
        features=None,
        scores=torch.rand(1, 3, VOCABULARY).softmax(-1),
    )
    embeddings = target.get_input_embeddings()
    every = head_inputs(drafts, embeddings, 4, 2)
    some = head_inputs(drafts, embeddings, 4, 2, ("confidence", "entropy"))
    assert torch.equal(some.entropy, every.entropy) and torch.equal(some.confidence, every.confidence)
    assert some.probability.numel() == some.drafted.numel() == 0
    exact = -torch.special.xlogy(drafts.scores, drafts.scores).sum(-1)
    assert torch.allclose(every.entropy[:, :2], exact[:, :2], atol=1e-5)


@pytest.mark.slow
def test_the_command_reads_texts_and_several_folders(tmp_path):
    run = CliRunner()
    for name, text in (("a", "def add(a, b):\n"), ("b", "class Point:\n")):
        lines = "".join(json.dumps({"id": f"{name}{n}", "prompt": text + "\n" * n}) + "\n" for n in range(2))
        (tmp_path / f"{name}.jsonl").write_text(lines)
        command = ["head", "collect", "--draft", "weak", "--prompts", str(tmp_path / f"{name}.jsonl")]
        command += ["--out", str(tmp_path / name), "--max-new-tokens", "12", "--temperatures", "0", "--json"]
        assert run.invoke(app, [*command, "--threads", "1"]).exit_code == 0
    command = ["head", "train", "--texts", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "head"), "--json"]
    command += ["--data", str(tmp_path / "a"), "--data", str(tmp_path / "b"), "--epochs", "2", "--no-pictures"]
    done = run.invoke(app, [*command, "--text-tokens", "8", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["prompts"]["file"] == "a.jsonl, b.jsonl"
    assert LengthHead.from_pretrained(tmp_path / "head").config.matches
