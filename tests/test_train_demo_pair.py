"""The recipe, run whole in its tiny form, and the pieces that decide what the models learn."""

import json
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_demo_pair  # noqa: E402
from demo_pair import corpus, evaluation, training  # noqa: E402


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished tiny run on the CPU."""
    work = tmp_path_factory.mktemp("pair")
    train_demo_pair.main(["--work", str(work), "--tiny", "--device", "cpu"])
    return work


def test_the_tiny_recipe_trains_stores_and_measures_three_models(tiny_run: Path) -> None:
    report = json.loads((tiny_run / "report.json").read_text())
    for name in ("target", "draft", "weak"):
        assert (tiny_run / name / "model.safetensors").exists()
        assert 0 < report[name]["bits_per_byte"] < 8  # an untrained model of 512 tokens needs more
    assert report["target_outputs"]["prompts"] == 40


def test_the_loss_falls_and_its_curve_is_kept(tiny_run: Path) -> None:
    curve = json.loads((tiny_run / "losses.json").read_text())["target_base"]
    assert curve[-1][1] < curve[0][1] - 0.5


def test_the_loss_curve_is_drawn(tiny_run: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (tiny_run / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_sources_and_their_licences_are_listed(tiny_run: Path) -> None:
    sources = json.loads((tiny_run / "sources.json").read_text())["megabytes"]
    assert any("PSF-2.0" in source for source in sources)


def test_resume_keeps_finished_stages(tiny_run: Path) -> None:
    before = (tiny_run / "target" / "model.safetensors").stat().st_mtime_ns
    train_demo_pair.main(["--work", str(tiny_run), "--tiny", "--device", "cpu", "--resume"])
    assert (tiny_run / "target" / "model.safetensors").stat().st_mtime_ns == before


def small_model() -> "training.LlamaForCausalLM":
    torch.manual_seed(0)
    config = train_demo_pair.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1
    )
    return training.LlamaForCausalLM(config)


def test_an_interrupted_stage_resumes_to_the_same_weights(tmp_path: Path) -> None:
    tokens = torch.arange(4000) % 31
    stage = training.Stage("base", steps=8, batch=2, learning_rate=1e-2)

    def losses(model: "training.LlamaForCausalLM", stop_at: int = 99) -> training.Loss:
        def loss_of(step: int) -> torch.Tensor:
            if step == stop_at:
                raise KeyboardInterrupt
            return training.next_token_loss(model, training.windows(tokens, 2, 17, seed=step))

        return loss_of

    whole, broken, resumed = small_model(), small_model(), small_model()
    training.fit(stage, whole, losses(whole), tmp_path / "..", resume=False, save_every=2)
    with pytest.raises(KeyboardInterrupt):
        training.fit(stage, broken, losses(broken, stop_at=5), tmp_path, resume=False, save_every=2)
    training.fit(stage, resumed, losses(resumed), tmp_path, resume=True, save_every=2)
    for ours, theirs in zip(whole.parameters(), resumed.parameters()):
        torch.testing.assert_close(ours, theirs)


class Distribution:
    """Just the metadata of an installed distribution."""

    def __init__(self, **fields: str | list[str]) -> None:
        from email.message import Message

        self.metadata = Message()
        for name, value in fields.items():
            for entry in [value] if isinstance(value, str) else value:
                self.metadata[name.replace("_", "-")] = entry


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License_Expression": "BSD-3-Clause"}, "BSD-3-Clause"),
        ({"Classifier": ["License :: OSI Approved :: MIT License"]}, "MIT License"),
        ({"License": "Apache 2.0\n\nthe whole text"}, "Apache 2.0"),
        ({"License_Expression": "MIT OR GPL-2.0"}, None),
        ({"Classifier": ["License :: OSI Approved :: GNU General Public License v3 (GPLv3)"]}, None),
        ({"License": "MIT", "Classifier": ["License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"]}, None),
        ({"License": "UNKNOWN"}, None),
        ({}, None),
    ],
)
def test_only_distributions_that_name_a_permissive_licence_are_read(fields: dict[str, str], licence: str) -> None:
    assert corpus.permissive_licence(Distribution(**fields)) == licence  # type: ignore[arg-type]


def test_files_that_share_a_line_with_a_prompt_are_left_out() -> None:
    line = '    """Return the largest even number of the given list."""'
    quoted, other = corpus.Document("a", "MIT", f"x = 1\n{line}\n"), corpus.Document("b", "MIT", "y = 2\n")
    assert corpus.without_prompts([quoted, other], [f"def f():\n{line}\n"]) == [other]


def test_the_held_out_files_do_not_depend_on_what_else_is_there() -> None:
    documents = [corpus.Document("s", "MIT", f"value_{i} = {i}\n") for i in range(400)]
    _, held_out = corpus.split(documents, held_out=0.1)
    _, fewer = corpus.split(documents[:200], held_out=0.1)
    assert set(fewer) == set(held_out) & set(documents[:200])
    assert 20 <= len(held_out) <= 60


def test_a_text_that_ends_in_three_copies_of_a_pattern_is_a_loop() -> None:
    assert evaluation.in_loop(list(range(100, 150)) + list(range(20)) * 3)
    assert evaluation.in_loop([7] * 60)


def test_a_short_or_broken_off_repetition_is_no_loop() -> None:
    assert not evaluation.in_loop(list(range(200)))
    assert not evaluation.in_loop(list(range(50)) + [1, 2, 3] * 10)
    assert not evaluation.in_loop(list(range(20)) * 3 + [99])


def test_python_is_told_from_what_only_resembles_it() -> None:
    assert evaluation.is_python("def f(x):\n    return x\n\n\ndef g(")
    assert not evaluation.is_python("def f(x)\n    return x\n" + "y = 1\n" * 10)


def test_looping_rows_repeat_what_ends_the_context_with_the_period_they_name() -> None:
    tokens = torch.arange(5000) % 997
    line_ends = torch.arange(9, 5000, 10)  # a newline after every ten tokens
    ids, periods = training.looping_rows(tokens, line_ends, rows=8, length=300, seed=3)
    for row, period in zip(ids, periods.flatten().tolist()):
        second = row[training.LOOP_CONTEXT :]
        assert torch.equal(second, row[training.LOOP_CONTEXT - period : -period])
    assert all(period % 10 == 0 for period in periods[2:])  # whole lines, but for the first quarter
    assert all(2 <= period <= 12 for period in periods[:2])


def test_the_repetition_loss_teaches_a_model_that_has_learnt_a_loop_to_leave_it() -> None:
    model = small_model()
    loop = (torch.arange(300) % 10)[None]  # [1, 300]
    period = torch.tensor([[10]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def sureness() -> float:
        with torch.no_grad():
            return float(torch.exp(-training.next_token_loss(model, loop)))

    def train(loss: training.Loss) -> float:
        for step in range(40):
            loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return sureness()

    learnt = train(lambda step: training.next_token_loss(model, loop))
    left = train(lambda step: training.repetition_loss(model, loop, period))
    assert learnt > 0.9
    assert left < 0.5
