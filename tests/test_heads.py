"""Heads: what they read, how they are trained, saved, loaded and refused."""

import gc
import json
import warnings

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from hf_specbranch import LengthHead, LengthHeadConfig, load_demo_pair
from hf_specbranch.bench.prompts import Prompt
from hf_specbranch.cli import app
from hf_specbranch.decoding.hooks import HookList, SpeculationHook, Survivor
from hf_specbranch.heads import metrics
from hf_specbranch.heads.cache import LeastRecentlyUsed
from hf_specbranch.heads.collect import collect
from hf_specbranch.heads.dataset import CollectSettings, Manifest, labels, read_samples
from hf_specbranch.heads.evaluate import EvalSettings, evaluate
from hf_specbranch.heads.network import head_inputs
from hf_specbranch.heads.train import TrainSettings, best_offsets, split_by_prompt, train

from .heads import random_head
from .models import VOCABULARY, attached, config, llama, prompt
from .tokens import letter_tokenizer

SETTINGS = CollectSettings(gamma=4, max_new_tokens=24, batch_size=4, num_layers=1, drafted_tokens=2)
PROMPTS = [Prompt(str(number), "abcdefghij"[number:] + "klmnop"[: number + 1]) for number in range(8)]


@pytest.fixture(scope="module")
def tokenizer():
    return letter_tokenizer(VOCABULARY)


@pytest.fixture(scope="module")
def data(tmp_path_factory, target, draft, tokenizer):
    folder = tmp_path_factory.mktemp("drafts")
    collect(target, draft, tokenizer, PROMPTS, folder / "prompts.jsonl", folder, SETTINGS, progress=False)
    return folder


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "few.jsonl"
    texts = ["def add(a, b):\n", "class Point:\n", "import os\n", "for i in range(10):\n"]
    path.write_text("".join(json.dumps({"id": str(n), "prompt": text}) + "\n" for n, text in enumerate(texts)))
    return path


# ---- what a head reads


def test_positions_after_the_draft_are_zero(target):
    q = torch.full((2, 3, VOCABULARY), 1.0 / VOCABULARY)
    drafts = Survivor(
        tokens=torch.tensor([[3, 4, 5], [6, 7, 8]]),
        length=torch.tensor([3, 1]),
        confidence=torch.full((2, 3), 0.5),
        committed=torch.tensor([1, 2]),
        features=torch.zeros(2, 1, 32),
        fresh=torch.tensor([False, True]),
        scores=q,
    )
    inputs = head_inputs(drafts, target.get_input_embeddings(), gamma=4, drafted_tokens=2)
    assert inputs.confidence.tolist() == [[0.5, 0.5, 0.5, 0], [0.5, 0, 0, 0]]
    assert inputs.entropy[0, 0] == pytest.approx(torch.tensor(float(VOCABULARY)).log().item(), abs=1e-4)
    assert torch.equal(inputs.drafted[1, 0], target.get_input_embeddings().weight[6])
    assert not inputs.drafted[1, 1].any()
    assert inputs.kind.tolist() == [[0.0, 0.75], [1.0, 0.25]]


def test_each_hook_sees_the_layers_it_asked_for():
    class Reader(SpeculationHook):
        def __init__(self, *layers):
            self.feature_layers = layers

        def keep(self, survivor):
            self.seen = survivor.features[0, :, 0].tolist()

    first, second = Reader(2, 5), Reader(1)
    hooks = HookList([first, second])
    features = torch.tensor([10.0, 20.0, 50.0])[None, :, None]  # of layers 1, 2, 5
    hooks.keep(Survivor(torch.zeros(1, 2), torch.tensor([2]), torch.ones(1, 2), torch.zeros(1), features))
    assert (first.seen, second.seen) == ([20.0, 50.0], [10.0])


def test_hooks_see_fresh_drafts_only_if_they_want_to(target, draft):
    class Keeper(SpeculationHook):
        def __init__(self, fresh):
            self.fresh_drafts, self.seen = fresh, []

        def keep(self, survivor):
            self.seen.append(survivor.fresh)

    for wants in (False, True):
        hook = Keeper(wants)
        attached(target).generate(
            **prompt(), max_new_tokens=24, assistant_model=draft, specbranch=config(), speculation_hooks=[hook]
        )
        assert any(seen is not None and bool(seen.any()) for seen in hook.seen) == wants


# ---- collecting


def test_labels_are_what_the_text_says(data):
    manifest, samples = read_samples(data)
    assert manifest.complete and manifest.samples == len(samples["accepted"]) > 50
    assert {shard["temperature"] for shard in manifest.shards} == {0.0, 0.8}
    assert (samples["accepted"] <= samples["length"]).all()
    truth = labels(samples)
    assert set(truth.tolist()) == {0, 1, 2}
    assert ((truth == 2) == (samples["accepted"] == samples["length"])).all()
    assert manifest.target.architecture == "LlamaForCausalLM" and len(manifest.tokenizer_hash) == 64


def test_collecting_is_repeatable_and_resumes(data, tmp_path, target, draft, tokenizer):
    class Stopped(Exception):
        pass

    manifest, whole = read_samples(data)
    calls = []

    def stop_at_third(module, *_):
        calls.append(module)
        if len(list(tmp_path.glob("shard-*"))) == 2:
            raise Stopped

    handle = draft.register_forward_pre_hook(stop_at_third)
    with pytest.raises(Stopped):
        collect(target, draft, tokenizer, PROMPTS, data / "prompts.jsonl", tmp_path, SETTINGS, progress=False)
    handle.remove()
    assert not Manifest.read(tmp_path).complete
    collect(target, draft, tokenizer, PROMPTS, data / "prompts.jsonl", tmp_path, SETTINGS, progress=False)
    again, samples = read_samples(tmp_path)
    assert again == manifest
    assert all(torch.equal(samples[name], whole[name]) for name in whole)
    assert not list(tmp_path.glob(".*"))


def test_collecting_with_other_settings_is_refused(data, target, draft, tokenizer):
    other = CollectSettings(**{**SETTINGS.__dict__, "gamma": 5})
    with pytest.raises(ValueError, match=r"holds drafts collected with other settings \(gamma: there 4, here 5\)"):
        collect(target, draft, tokenizer, PROMPTS, data / "prompts.jsonl", data, other, progress=False)


def test_progress_of_collecting_ends_at_its_total(tmp_path, target, draft, tokenizer, capsys):
    for name, most in (("all prompts", 1_000_000), ("ten drafts", 10)):
        settings = CollectSettings(**{**SETTINGS.__dict__, "max_samples": most, "max_new_tokens": 8})
        manifest = collect(target, draft, tokenizer, PROMPTS, tmp_path / "p", tmp_path / name, settings)
        last = capsys.readouterr().err.split("\r")[-1]
        count = len(manifest.shards)
        assert f" {count}/{count} " in last and f"drafts={manifest.samples}" in last


def test_number_of_drafts_is_bounded(tmp_path, target, draft, tokenizer):
    few = CollectSettings(**{**SETTINGS.__dict__, "max_samples": 30})
    manifest = collect(target, draft, tokenizer, PROMPTS, tmp_path / "p", tmp_path / "out", few, progress=False)
    assert manifest.samples == 30


def test_damaged_data_is_refused(data, tmp_path):
    for file in data.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = tmp_path / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ValueError, match="shard-00001.safetensors is truncated or damaged"):
        read_samples(tmp_path)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match="shard-00001.safetensors of the manifest is missing"):
        read_samples(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a manifest of collected drafts"):
        read_samples(tmp_path)
    with pytest.raises(FileNotFoundError, match="give the folder that `head collect` wrote"):
        read_samples(tmp_path / "nowhere")


# ---- training


def test_the_same_seed_gives_the_same_head(data):
    settings = TrainSettings(epochs=3, layer_sizes=(16, 8), match_size=4)
    one, two = (train(data, settings, progress=False) for _ in range(2))
    other = train(data, TrainSettings(epochs=3, layer_sizes=(16, 8), match_size=4, seed=1), progress=False)
    assert one.head.config == two.head.config
    states = [fitted.head.state_dict() for fitted in (one, two, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_training_learns_what_can_be_learnt(data):
    fitted = train(data, TrainSettings(epochs=30, layer_sizes=(32, 16), match_size=8), progress=False)
    assert fitted.report["macro_f1"]["head"] > fitted.report["macro_f1"]["majority"]
    assert fitted.history[-1]["loss"] < fitted.history[0]["loss"]
    assert int(fitted.confusion.sum()) == fitted.report["held_out_lines"]


def test_training_says_that_a_head_never_decides(tmp_path, target, tokenizer):
    """A model that drafts for itself is always right: there is no rollback to avoid."""
    settings = CollectSettings(**{**SETTINGS.__dict__, "temperatures": (0.0,)})
    collect(target, target, tokenizer, PROMPTS, tmp_path / "p", tmp_path / "drafts", settings, progress=False)
    words = ["--data", str(tmp_path / "drafts"), "--out", str(tmp_path / "head"), "--epochs", "1", "--no-pictures"]
    done = CliRunner().invoke(app, ["head", "train", *words])
    assert done.exit_code == 0, done.output
    assert not LengthHead.from_pretrained(tmp_path / "head").config.acts
    assert "this head never decides anything" in done.stderr
    assert "this head never decides anything" in (tmp_path / "head" / "README.md").read_text()


def test_pictures_of_a_head_are_centred(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    history = [{"loss": 1.0, "held_out_loss": 1.1, "held_out_macro_f1": 0.4}]
    metrics.save_pictures(history, torch.tensor([[5, 1, 0], [2, 9, 3], [0, 1, 4]]), 0.5, tmp_path)
    for name in ("learning_curve.png", "confusion_matrix.png"):
        drawn = torch.tensor(image.imread(tmp_path / name)[..., :3]).amin(2) < 0.9
        columns, rows = drawn.any(0).nonzero()[:, 0], drawn.any(1).nonzero()[:, 0]
        margins = [columns[0], drawn.shape[1] - 1 - columns[-1], rows[0], drawn.shape[0] - 1 - rows[-1]]
        assert 5 <= min(margins) and max(margins) <= 20, (name, margins)


def test_no_prompt_is_on_both_sides_of_the_split():
    numbers = torch.arange(10).repeat_interleave(7)
    fit, held = split_by_prompt(numbers, 0.2, seed=3)
    assert len(fit) + len(held) == 70 and len(held) == 14
    assert not set(numbers[fit].tolist()) & set(numbers[held].tolist())
    with pytest.raises(ValueError, match="at least 2 are needed"):
        split_by_prompt(torch.zeros(5, dtype=torch.long), 0.2, seed=0)


def test_macro_f1_by_hand():
    truth, prediction = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 1, 1, 0, 2])
    assert metrics.macro_f1(truth, prediction) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)


def test_offsets_raise_the_macro_f1():
    torch.manual_seed(0)
    truth = torch.multinomial(torch.tensor([0.2, 0.6, 0.2]), 2000, replacement=True)
    logits = torch.nn.functional.one_hot(truth, 3) + torch.randn(2000, 3) + torch.tensor([0.5, 0.0, 0.3])
    better = logits + best_offsets(logits, truth)
    assert metrics.macro_f1(truth, better.argmax(-1)) > metrics.macro_f1(truth, logits.argmax(-1)) + 0.01
    assert not best_offsets(10.0 * torch.nn.functional.one_hot(truth, 3), truth).any()


def test_thresholds_keep_the_tokens_and_cut_the_rollback():
    torch.manual_seed(0)
    bad = torch.rand(400) < 0.5
    samples = {
        "confidence": torch.full((400, 4), 0.9),
        "length": torch.full((400,), 4),
        "accepted": torch.where(bad, 0, 4),
        "kind": torch.zeros(400, 2),
    }
    sure = torch.where(bad, 0.9, 0.05)
    probabilities = torch.stack([sure, 1 - sure, torch.zeros(400)], dim=1)
    none, everything = metrics.choose_thresholds(probabilities, samples, epsilon=0.4, max_token_loss=0.0)
    prediction = metrics.prediction_by_thresholds(probabilities, none, everything)
    assert torch.equal(prediction == 0, bad)
    assert metrics.effect(samples, prediction, 0.4).rollback_tokens == 0


# ---- saving and loading


def test_a_saved_head_comes_back_the_same(target, draft, tmp_path):
    head = random_head(target, draft)
    folder = head.save_pretrained(tmp_path / "a" / "head")
    twin = LengthHead.from_pretrained(folder)
    features = torch.randn(6, head.config.input_size)
    assert torch.equal(twin(features), head(features)) and not twin.training
    assert twin.config == LengthHeadConfig.from_dict({**head.config.to_dict(), "library_version": "0.1.0"})
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert json.loads(weights.metadata()["config"]) == json.loads((folder / "config.json").read_text())
    card = (folder / "README.md").read_text()
    assert "library_name: hf_specbranch" in card and "- specbranch\n- speculative-decoding" in card


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("model.safetensors", lambda content: content[:-20], "is truncated or no safetensors file"),
        ("model.safetensors", lambda content: content[:4], "is truncated or no safetensors file"),
        ("model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]), "was altered"),
        ("model.safetensors", lambda content: None, "no model.safetensors in"),
        ("config.json", lambda content: content[:50], "is not JSON"),
        ("config.json", lambda content: b"[]", "holds a JSON list"),
        ("config.json", lambda content: b"{}", "does not describe a length head"),
        ("config.json", lambda content: content.replace(b'"gamma": 4', b'"gamma": 5'), "and the config inside"),
        ("config.json", lambda content: content.replace(b'"dropout"', b'"dropped"'), "unknown fields"),
        ("config.json", lambda content: content.replace(b'version": 1', b'version": 2'), "format_version=2"),
        ("config.json", lambda content: None, "no config.json in"),
    ],
)
def test_a_damaged_head_is_refused(target, draft, tmp_path, file, damage, message):
    folder = random_head(target, draft).save_pretrained(tmp_path)
    content = damage((folder / file).read_bytes())
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=message):
        LengthHead.from_pretrained(folder)


def test_caches_drop_the_least_recently_used_entry():
    made, cache = [], LeastRecentlyUsed(limit=2)
    for key in "abacab":
        assert cache.get(key, lambda key: made.append(key) or key) == key
    assert made == ["a", "b", "c", "b"] and cache.keys() == ["a", "b"]
    assert cache.get("a", str.upper, is_current=lambda value: False) == "A"


def test_weak_cache_lets_go_of_its_keys(target, draft):
    cache = LeastRecentlyUsed(limit=4, weak_keys=True)
    head = random_head(target, draft)
    assert cache.get(head, lambda head: 1) == 1 and len(cache.keys()) == 1
    del head
    gc.collect()
    assert not cache.keys()


def test_a_head_with_wrong_settings_is_refused(target, draft):
    with pytest.raises(ValueError, match=r"features=\['magic'\]: expected some of"):
        random_head(target, draft, features=("magic",))
    with pytest.raises(ValueError, match="num_layers=9: the target has 2 layers"):
        random_head(target, draft, num_layers=9)


# ---- the pair it belongs to


def test_a_pair_it_was_not_made_for_is_refused_by_field(target, draft):
    head = random_head(target, draft)
    head.check_pair(target, draft)
    wider = llama(seed=0, hidden=48, layers=3)
    with pytest.raises(ValueError, match="target hidden_size: head 32, given 48; target num_layers: head 2, given 3"):
        head.check_pair(wider, draft)
    with pytest.raises(ValueError, match="draft vocab_size: head 48, given 60"):
        head.check_pair(target, llama(seed=1, vocabulary=60))
    with pytest.raises(ValueError, match="tokenizer hash: head"):
        head.check_pair(target, draft, letter_tokenizer(40))


def test_head_for_another_pair_is_refused_before_any_work(target, draft):
    model = attached(target)
    model.register_forward_pre_hook(lambda *_: pytest.fail("worked before refusing"))
    head = random_head(llama(seed=0, hidden=48), draft)
    with pytest.raises(ValueError, match="the length head does not fit this pair"):
        model.generate(**prompt(), max_new_tokens=3, assistant_model=draft, length_head=head)


def test_another_revision_is_a_warning(target, draft):
    model = attached(target)
    model.config._commit_hash = "a" * 40
    head = random_head(model, draft)
    model.config._commit_hash = "b" * 40
    with pytest.warns(UserWarning, match=f"target revision: head {'a' * 40}, given {'b' * 40}"):
        head.check_pair(model, draft)


@pytest.mark.parametrize("name", ["good", "weak"])
def test_the_embedded_pair_comes_with_a_head(name):
    target, draft, tokenizer, head = load_demo_pair(name, head=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head.check_pair(target, draft, tokenizer)
    assert sum(parameter.numel() * 4 for parameter in head.parameters()) <= 2e6
    _, other, _ = load_demo_pair("weak" if name == "good" else "good")
    with pytest.raises(ValueError, match="draft hidden_size"):
        head.check_pair(target, other)


def test_auto_takes_the_head_that_comes_with_the_package(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    target, draft, tokenizer = load_demo_pair("weak")
    inputs = tokenizer("def add(a, b):\n", return_tensors="pt")
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    model = attached(target)
    assert torch.equal(
        model.generate(**inputs, do_sample=False, max_new_tokens=24, assistant_model=draft, length_head="auto"), plain
    )


# ---- evaluation and the command


def test_evaluation_measures_every_method(target, draft, tokenizer, data):
    head = train(data, TrainSettings(epochs=3, layer_sizes=(16, 8), match_size=4), progress=False).head
    unseen = [Prompt("x", "zyxwvu"), Prompt("y", "ponmlk")]
    settings = EvalSettings(max_new_tokens=8, batch_size=2)
    result = evaluate(head, target, draft, tokenizer, unseen, data / "unseen.jsonl", settings, progress=False)
    assert [run["method"] for run in result["runs"][:5]] == [
        "vanilla, fixed length",
        "vanilla",
        "pearl",
        "specbranch",
        "specbranch + head",
    ]
    assert {run["temperature"] for run in result["runs"]} == {0.0, 0.8}
    assert all(run["tokens_per_pass"] >= 1 and 0 <= run["rollback_rate"] <= 1 for run in result["runs"])
    assert set(result["predictions"]) >= {"head", "confidence", "first_confidence", "majority"}
    json.dumps(result)
    with pytest.raises(ValueError, match="the head was trained on"):
        evaluate(head, target, draft, tokenizer, PROMPTS, data / "prompts.jsonl", settings, progress=False)


@pytest.mark.slow
def test_commands_train_and_measure_a_head(prompt_file, tmp_path):
    pytest.importorskip("matplotlib")
    run, drafts, head = CliRunner(), str(tmp_path / "drafts"), str(tmp_path / "head")
    common = ["--draft", "weak", "--max-new-tokens", "24", "--batch-size", "4", "--threads", "1", "--json"]
    done = run.invoke(app, ["head", "collect", "--prompts", str(prompt_file), "--out", drafts, *common])
    assert done.exit_code == 0 and json.loads(done.stdout)["samples"] > 20, done.output
    done = run.invoke(app, ["head", "train", "--data", drafts, "--out", head, "--epochs", "2"])
    assert done.exit_code == 0 and "macro-F1 on held-out prompts" in done.stdout, done.output
    assert {path.name for path in (tmp_path / "head").iterdir()} >= {"learning_curve.png", "confusion_matrix.png"}
    never = not LengthHead.from_pretrained(head).config.acts
    assert ("this head never decides anything" in done.stderr) == never
    assert ("this head never decides anything" in (tmp_path / "head" / "README.md").read_text()) == never
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"id": "1", "prompt": "while True:\n"}) + "\n")
    done = run.invoke(app, ["head", "eval", "--head", head, "--prompts", str(other), "--into-card", *common[:-1]])
    assert done.exit_code == 0 and "specbranch + head" in done.stdout, done.output
    assert "## Measured" in (tmp_path / "head" / "README.md").read_text()
    assert LengthHead.from_pretrained(head).config.training["measured"]["max_new_tokens"] == 24


@pytest.mark.slow
def test_embedded_head_can_be_evaluated():
    few = ["--draft", "weak", "--max-new-tokens", "6", "--temperatures", "0", "--json"]
    done = CliRunner().invoke(app, ["head", "eval", "--head", "embedded", *few])
    assert done.exit_code == 0 and "specbranch + head" in done.stdout
    done = CliRunner().invoke(app, ["head", "eval", "--head", "embedded", "--into-card", *few])
    assert "--into-card with --head embedded" in str(done.exception)


@pytest.mark.parametrize("command", ["collect", "train", "eval", "push", "search"])
def test_every_command_explains_itself_with_an_example(command):
    done = CliRunner().invoke(app, ["head", command, "--help"])
    assert done.exit_code == 0 and "Example: hf-specbranch head" in done.stdout
