"""Doctor and tune: what they measure, predict and recommend."""

import importlib.util
import io
import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from hf_specbranch import SpecBranchConfig, specbranch
from hf_specbranch.checks import FAILED, WARNING
from hf_specbranch.cli import app
from hf_specbranch.cli.progress import showing_progress
from hf_specbranch.doctor import examination_generations, examine
from hf_specbranch.families.tiny import language_models
from hf_specbranch.other_tokenizer import METHODS
from hf_specbranch.pair_checks import check_everything
from hf_specbranch.planning.measure import TimedRounds, fit_costs
from hf_specbranch.planning.simulate import ABSENT, Agreement, StepCosts, record_agreement, replay
from hf_specbranch.planning.tune import POLICIES, rank, tune, tuning_generations
from hf_specbranch.progress import Progress

from .models import VOCABULARY, attached, llama, prompt
from .tokens import letter_tokenizer
from .two_tokenizers import pair

PROMPT = "abcdefg"
COSTS = StepCosts(target_pass=0.010, target_token=0.0002, draft_step=0.001, draft_branch=0.0002, hidden=0.8)


class RecordedProgress(Progress):
    """Keeps what it is told."""

    def __init__(self):
        self.shown, self.advances = [], 0

    def doing(self, what):
        self.shown.append(what)

    def advance(self):
        self.advances += 1


def states(checks):
    return {check.name: check.state for check in checks}


# ---- fitted costs


@pytest.mark.parametrize("hidden", [0.0, 0.35, 1.0])
def test_fit_recovers_costs(hidden):
    torch.manual_seed(0)
    sure = torch.rand(200)
    rank = torch.where(torch.rand(200) < sure, 0, torch.randint(-1, 4, (200,)))
    agreement = Agreement(tuple(sure.tolist()), tuple(rank.tolist()), candidates=4)
    costs = StepCosts(target_pass=0.010, target_token=0.0002, draft_step=0.001, draft_branch=0.0003, hidden=hidden)
    runs = []
    for policy in ("autoregressive", "vanilla", "pearl", "specbranch"):
        for gamma in (2, 8):
            for overlap in (True, False):
                rounds = replay(agreement, SpecBranchConfig(policy=policy, max_draft_length=gamma))
                runs.append(TimedRounds(rounds, costs.seconds(rounds, overlap), overlap))
    found = fit_costs(runs)
    for name in ("target_pass", "target_token", "draft_step", "draft_branch", "hidden"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), rel=1e-4)


# ---- ranking


def test_hopeless_draft_gets_the_shortest_length():
    hopeless = Agreement((0.9,) * 60, (ABSENT,) * 60, candidates=8)
    best = rank([hopeless], COSTS, ["vanilla"])[0]
    assert best.config.max_draft_length == 1 and best.prediction.speedup < 1


def test_perfect_draft_gets_a_long_hidden_length():
    perfect = Agreement((0.95,) * 200, (0,) * 200, candidates=8)
    best = rank([perfect], COSTS.on_gpus(2))[0]
    assert best.config.draft_length >= 8 and best.prediction.speedup > 5 and best.config.overlap


def test_overlap_is_off_where_it_hides_nothing():
    some = Agreement((0.5,) * 60, (0, 0, ABSENT) * 20, candidates=8)
    ranked = rank([some], StepCosts(target_pass=0.01, draft_step=0.001, hidden=0.0))
    assert not any(each.config.overlap for each in ranked)
    assert {each.config.policy for each in ranked} == set(POLICIES)


# ---- the doctor


@pytest.fixture(scope="module")
def report(target, draft):
    tokenizer, progress = letter_tokenizer(VOCABULARY), RecordedProgress()
    found = examine(attached(target), draft, tokenizer, tokenizer, [PROMPT], 10, repeats=1, progress=progress)
    assert progress.advances == examination_generations(1, repeats=1) == len(progress.shown)
    assert progress.shown[0] == "recording text 1 of 1" and "timing pearl on text 1 of 1" in progress.shown
    return found


def test_doctor_measures_and_predicts_every_policy(report):
    assert report.usable and set(states(report.checks)) == {
        "versions", "models", "vocabulary", "tokenizers", "devices", "memory", "capture", "attention",
    }  # fmt: skip
    names = [row.name for row in report.policies]
    assert names[:4] == ["autoregressive", "vanilla", "pearl", "specbranch"] and "specbranch, best" in names
    assert all(row.predicted > 0 and row.ratio > 0 for row in report.policies)
    assert all(row.measured > 0 for row in report.policies[:4])
    assert report.costs["target_pass_ms"] > 0 and 0 <= report.costs["hidden"] <= 1
    json.dumps(report.to_dict())


def test_doctor_reports_the_plan_of_auto(report):
    speed = {row.name: row.predicted for row in report.policies}
    assert report.planned.split(",")[0] in ("autoregressive", "vanilla", "specbranch")
    assert speed["auto"] >= speed["autoregressive"] * 0.999 and report.to_dict()["planned"] == report.planned


def test_best_settings_are_not_slower_than_defaults(report):
    speed = {row.name: row.predicted for row in report.policies}
    assert speed["vanilla, best"] >= speed["vanilla"] * 0.999


@pytest.mark.slow
def test_doctor_says_when_speculation_is_slower(target, stranger):
    tokenizer = letter_tokenizer(VOCABULARY)
    report = examine(attached(target), stranger, tokenizer, tokenizer, [PROMPT], 8, repeats=1)
    assert report.recommended is None and report.verdict.startswith("Not worth it here: speculation would be slower")


def test_other_vocabulary_cannot_be_used(target):
    foreign = llama(seed=1, vocabulary=64)
    report = examine(attached(target), foreign, letter_tokenizer(VOCABULARY), None, [PROMPT])
    assert not report.usable and "This pair cannot be used: " in report.verdict and not report.policies


def test_different_tokenizers_are_a_warning(target, draft):
    ours = letter_tokenizer(VOCABULARY)
    theirs = letter_tokenizer(VOCABULARY)
    theirs.add_tokens(["extra"])
    assert states(check_everything(target, draft, ours, theirs))["tokenizers"] == WARNING


def test_doctor_says_what_two_vocabularies_share():
    target, draft, *both = pair()
    report = examine(attached(target), draft, *both, ["The quick", "def area"], 12, repeats=1)
    words = {check.name: check.found for check in report.checks}["tokenizers"]
    assert report.usable and f"they differ: {report.sharing['tokens']} tokens are shared, " in words
    assert 0.5 < report.sharing["of_target"] < 1.0 < report.sharing["draft_tokens_per_token"]
    assert {row.name for row in report.policies} == set(METHODS) and all(row.measured > 0 for row in report.policies)
    assert "of the tokens in these texts" in report.explained
    json.dumps(report.to_dict())


def test_attention_without_masks_fails_the_check(target, draft):
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)).eval()
    tokenizer = letter_tokenizer(VOCABULARY)
    assert states(check_everything(bloom, draft, tokenizer, tokenizer))["attention"] == FAILED


@pytest.fixture(scope="module")
def rwkv():
    from transformers import RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    return RwkvForCausalLM(RwkvConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)).eval()


def test_recurrent_draft_cannot_be_used(target, rwkv):
    tokenizer = letter_tokenizer(VOCABULARY)
    report = examine(attached(target), rwkv, tokenizer, tokenizer, [PROMPT])
    assert states(report.checks)["models"] == FAILED and not report.policies
    assert report.verdict.startswith("This pair cannot be used: the draft RwkvForCausalLM keeps a recurrent state")


def test_doctor_measures_a_mamba_draft(target):
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4))
    tokenizer = letter_tokenizer(VOCABULARY)
    report = examine(attached(target), mamba.eval(), tokenizer, tokenizer, [PROMPT], 8, repeats=1)
    assert report.usable and all(row.predicted > 0 for row in report.policies)


def test_tune_refuses_a_recurrent_draft_before_any_work(target, rwkv):
    progress = RecordedProgress()
    with pytest.raises(ValueError, match="the draft RwkvForCausalLM keeps a recurrent state"):
        tune(attached(target), rwkv, [prompt()], progress=progress)
    assert not progress.shown


def test_doctor_checks_layers_of_different_sizes(target):
    families = [each for each in language_models() if each.name == "gemma4_text"]
    if not families:
        pytest.skip("needs a newer transformers")
    tokenizer = letter_tokenizer(VOCABULARY)
    found = {check.name: check.found for check in check_everything(target, families[0].build(), tokenizer, tokenizer)}
    assert "GiB" in found["memory"] and "KV caches" not in found["memory"]


def test_doctor_command_shows_progress_and_checks_first(folders, rwkv, tmp_path):
    rwkv.save_pretrained(tmp_path)
    letter_tokenizer(VOCABULARY).save_pretrained(tmp_path)
    said = CliRunner().invoke(app, ["doctor", "--target", str(folders / "target"), "--draft", str(tmp_path)])
    assert said.stderr.splitlines()[0] == "importing torch and transformers"
    lines = said.stdout.splitlines()
    assert said.exit_code == 1 and lines[0].startswith("ok    versions    Python 3") and "Traceback" not in said.output
    flat = " ".join(said.stdout.split())
    assert "FAIL models the draft RwkvForCausalLM keeps a recurrent state outside of its cache" in flat


def test_progress_in_a_log_is_a_line_now_and_then(capsys, monkeypatch):
    seconds = iter([100.0, 101.0, 104.0])
    monkeypatch.setattr("hf_specbranch.cli.progress.time.monotonic", lambda: next(seconds))
    with showing_progress(9) as progress:
        for what in ("first", "too soon", "later"):
            progress.doing(what)
            progress.advance()
    with showing_progress(9, quiet=True) as progress:
        progress.doing("nothing")
    assert capsys.readouterr().err == "0 of 9 runs done; first\n2 of 9 runs done; later\n"


def test_progress_at_a_terminal_is_a_bar(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with showing_progress(2) as progress:
        progress.doing("timing vanilla")
        progress.advance()
        progress.say("a line")
    shown = terminal.getvalue()
    assert "timing vanilla" in shown and "1/2" in shown and "a line" in shown


# ---- tune


@pytest.mark.slow
def test_tune_measures_each_policy_and_the_defaults(target, draft):
    progress = RecordedProgress()
    model = attached(target)
    found = tune(model, draft, [prompt()], 12, finalists=3, repeats=1, progress=progress)
    assert {trial.config.policy for trial in found.trials} == set(POLICIES)
    assert {SpecBranchConfig(policy) for policy in POLICIES} <= {trial.config for trial in found.trials}
    assert found.auto > 0 and found.plain > 0
    assert found.best == max(found.trials, key=lambda trial: trial.measured).config
    assert "measuring auto, warm-up" in progress.shown and "measuring plain generate(), run 1 of 1" in progress.shown
    assert len(progress.shown) == progress.advances <= tuning_generations(1, finalists=3, repeats=1, policies=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, target, draft):
    """The small pair on disk, as commands want it."""
    where = tmp_path_factory.mktemp("pair")
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(where / name)
        letter_tokenizer(VOCABULARY).save_pretrained(where / name)
    (where / "prompts.jsonl").write_text('{"id": "1", "prompt": "abcdefg"}\n')
    return where


def run(folders, command, *more):
    pair = ["--target", folders / "target", "--draft", folders / "draft", "--prompts", folders / "prompts.jsonl"]
    arguments = [command, *pair, "--max-new-tokens", 8, *more]
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_tune_command_writes_loadable_settings(folders, tmp_path, target, draft):
    out = tmp_path / "tuned.json"
    quick = ["--policy", "vanilla", "--finalists", 1, "--repeat", 1, "--json"]
    picture = ["--png", tmp_path / "tuned.png"] if importlib.util.find_spec("matplotlib") else []
    said = run(folders, "tune", "--out", out, *quick, *picture)
    answer = json.loads(said.stdout)
    assert not picture or picture[1].read_bytes().startswith(b"\x89PNG")
    best = SpecBranchConfig.from_json_file(out)
    assert answer["best"] == best.to_dict() and best.policy == "vanilla" and answer["auto"] > 0
    errors = sorted(abs(each["predicted"] / each["measured"] - 1) for each in answer["trials"])
    assert errors[0] <= answer["prediction_error"] <= errors[-1]
    model = attached(target)
    model.generate(**prompt(), max_new_tokens=4, do_sample=False, assistant_model=draft, specbranch=out)
    assert model.specbranch_stats.policy == "vanilla"
    pair = ["--target", str(folders / "target"), "--draft", str(folders / "draft")]
    arguments = ["generate", "abc", *pair, "--config", str(out), "--max-new-tokens", "4", "--json"]
    assert json.loads(CliRunner().invoke(app, arguments).stdout)["stats"]["policy"] == "vanilla"


@pytest.mark.slow
def test_doctor_command_prints_and_sets_the_exit_code(folders, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    said = run(folders, "doctor", "--repeat", 1)
    worth = "Worth it" in said.stdout or "Hardly worth it" in said.stdout
    assert said.exit_code == (0 if worth else 3)
    assert max(map(len, said.stdout.splitlines())) <= 60
    for expected in ("plain generate()", "specbranch, best", "first choice", "target pass takes", "plans for itself"):
        assert expected in " ".join(said.stdout.split())


@pytest.mark.slow
def test_doctor_command_prints_json(folders):
    said = run(folders, "doctor", "--repeat", 1, "--json")
    answer = json.loads(said.stdout)
    assert answer["usable"] and said.exit_code == (3 if answer["recommended"] is None else 0)


def test_recording_an_attached_model(target, draft):
    alone = record_agreement(target, draft, prompt(), 10)
    assert record_agreement(specbranch(attached(target), draft=draft), draft, prompt(), 10) == alone


def test_prompts_that_end_at_once_are_refused(target, draft):
    mute = attached(target)
    mute.generation_config.eos_token_id = list(range(VOCABULARY))
    tokenizer = letter_tokenizer(VOCABULARY)
    report = examine(mute, draft, tokenizer, tokenizer, [PROMPT])
    assert not report.usable and "ends every text after one token" in report.verdict
    with pytest.raises(ValueError, match="ends every text after one token"):
        tune(mute, draft, [prompt()])
