"""What the planner has learned of a pair is kept on disk, and only what makes sense is read."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_specbranch import machine
from hf_specbranch.model_state import state_of
from hf_specbranch.planning import store
from hf_specbranch.planning.knowledge import Knowledge, Situation, knowledge_of

from .models import attached, llama, noisy_copy, prompt, slowly

RUN = {"max_new_tokens": 120, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(machine.VARIABLE, str(tmp_path))
    return tmp_path / "plans"


def model_pair(seed=0):
    target = llama(seed=seed)
    return attached(target), noisy_copy(target, noise=0.25, seed=seed + 1)


def learn(model, draft, texts=3):
    for seed in range(texts):
        model.generate(**prompt(seed=seed), **RUN, assistant_model=draft)
    (known,) = state_of(model).pairs[draft].values()
    return known


def test_new_process_plans_as_the_last_one_did(folder):
    model, draft = model_pair()
    known = learn(model, draft, texts=6)
    assert len(list(folder.iterdir())) == 1
    model, draft = model_pair()  # the same weights in new objects, as in another process
    read = knowledge_of(model, draft)
    assert read.choices.keys() == known.choices.keys() and read.factors.keys() == known.factors.keys()
    assert [text.rank for text in read.texts.all()] and read.generations > 0
    model.generate(**prompt(seed=9), **RUN, assistant_model=draft)
    first, *others = model.specbranch_stats.plans
    assert first["predicted_tokens_per_second"] is not None
    assert all(segment["predicted_tokens_per_second"] is not None for segment in others)  # nothing is measured again


@pytest.mark.slow
def test_another_process_reads_it(folder):
    model, draft = model_pair()
    known = learn(model, draft)
    code = (
        "import torch; torch.set_num_threads(1); from tests.test_plan_store import *; model, draft = model_pair(); "
        "print(len(knowledge_of(model, draft).texts.all()))"
    )
    environment = {**os.environ, machine.VARIABLE: str(folder.parent)}
    # tests/conftest.py is not imported there.
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) == len(known.texts.all()) > 0


def test_choices_and_texts_survive_unchanged(folder):
    model, draft = model_pair()
    known = learn(model, draft)
    read = Knowledge()
    read.update(json.loads(json.dumps(known.to_dict())))
    assert read.choices == known.choices and read.factors == known.factors and read.ratios == known.ratios
    for before, after in zip(known.texts.all(), read.texts.all()):
        assert after.rank == before.rank and after.candidates == before.candidates
        assert after.confidence == pytest.approx(before.confidence, abs=1e-3)


def test_fine_tunes_share_costs_only(folder):
    model, draft = model_pair(seed=0)
    known = learn(model, draft)
    other, small = model_pair(seed=5)
    read = knowledge_of(other, small)
    assert read.factors == known.factors and not read.choices and not read.texts.all()
    learn(other, small)
    (file,) = folder.iterdir()
    assert len(json.loads(file.read_text())["pairs"]) == 2


def test_other_shapes_have_a_file_of_their_own(folder):
    learn(*model_pair())
    model, _ = model_pair()
    draft = llama(seed=3).to(torch.float64)
    assert not knowledge_of(model, draft).factors


@pytest.mark.parametrize(
    "content",
    [
        slowly(""), "{", slowly("[]"), "null", '{"machine": 1}', '{"machine": MACHINE, "costs": 3, "pairs": {}}',
        slowly('{"machine": MACHINE, "costs": {}, "pairs": {"WEIGHTS": 5}}'),
        slowly('{"machine": MACHINE, "costs": {"[1]": {}}, "pairs": {}}'),
        '{"machine": MACHINE, "costs": {"[1, \\"eager\\", false, 1]": {"speed": [NaN], "draft": [], "passes": {}, '
        '"hidden": []}}, "pairs": {}}',
        slowly(
            '{"machine": MACHINE, "costs": {"[1, \\"eager\\", false, 1]": {"speed": [-1], "draft": [], "passes": {}, '
            '"hidden": []}}, "pairs": {}}'
        ),
        slowly('{"machine": MACHINE, "costs": {}, "pairs": {"WEIGHTS": {"choices": [[1, 2, 3]]}}}'),
        '{"machine": MACHINE, "costs": {}, "pairs": {"WEIGHTS": {"choices": [[{"policy": "nonsense"}, [1, "eager", '
        'false, 1], {}, 1, 1]]}}}',
        '{"machine": MACHINE, "costs": {}, "pairs": {"WEIGHTS": {"texts": [{"rank": [0], "chances": []}]}}}',
    ],
)  # fmt: skip
def test_damaged_file_is_ignored_and_replaced(folder, content):
    model, draft = model_pair()
    file = store.file_of(model, draft)
    folder.mkdir()
    file.path.write_text(content.replace("MACHINE", json.dumps(file.machine)).replace("WEIGHTS", file.weights))
    known = knowledge_of(model, draft)
    assert not known.choices and not known.factors and not known.texts.all()
    model.generate(**prompt(), **RUN, assistant_model=draft)
    assert file.load()["choices"]


def test_file_of_another_version_is_ignored(folder, monkeypatch):
    learn(*model_pair())
    model, draft = model_pair()
    monkeypatch.setattr(store, "FORMAT", store.FORMAT + 1)
    assert not knowledge_of(model, draft).factors


def test_folder_that_cannot_be_written_is_silent(tmp_path, monkeypatch, recwarn):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(machine.VARIABLE, str(tmp_path / "file" / "plans"))
    model, draft = model_pair()
    expected = llama(seed=0).generate(**prompt(), **RUN)
    assert torch.equal(model.generate(**prompt(), **RUN, assistant_model=draft), expected)
    assert not recwarn.list


@pytest.mark.parametrize("value", ["off", slowly("0"), slowly("")])
def test_nothing_is_kept_when_switched_off(monkeypatch, value):
    monkeypatch.setenv(machine.VARIABLE, value)
    model, draft = model_pair()
    assert learn(model, draft).file is None


def test_concurrent_writers_leave_a_whole_file(folder):
    """The last one wins, for its own weights; what others have learned of other batch sizes stays."""
    files = [store.PairFile(folder, {"device": "here"}, f"weights {each % 2}") for each in range(8)]

    def write(number):
        for step in range(20):
            files[number].save({"costs": {str(number): step}, "plans": [number] * 200})
            plans = files[number].load().get("plans", [0] * 200)  # others may have replaced the file
            assert len(plans) == 200 and len(set(plans)) == 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_saving_takes_over_what_others_wrote(folder):
    first, second = (store.PairFile(folder, {"device": "here"}, name) for name in ("one", "two"))
    first.save({"costs": {"1 row": 1}, "plans": [1]})
    second.save({"costs": {"2 rows": 2}, "plans": [2]})
    assert first.load() == {"costs": {"1 row": 1, "2 rows": 2}, "plans": [1]}


def test_most_generations_write_nothing(folder, monkeypatch):
    model, draft = model_pair()
    saved, save = [], store.PairFile.save
    monkeypatch.setattr(store.PairFile, "save", lambda self, entries: saved.append(1) or save(self, entries))
    counts = []
    for seed in range(18):
        model.generate(**prompt(seed=seed % 2), **RUN, assistant_model=draft)
        counts.append(len(saved))
    assert 0 < counts[-1] < 16 and counts[-1] - counts[10] <= 5


def test_sampled_text_does_not_depend_on_what_is_on_disk(folder):
    texts = []
    for _ in range(2):
        model, draft = model_pair()
        torch.manual_seed(5)
        texts.append(model.generate(**prompt(), max_new_tokens=100, do_sample=True, assistant_model=draft))
        known = learn(model, draft)
        (key,) = known.choices
        known.choices[key] = known.choices[key]._replace(plan=next(iter(known.choices))[0].decided())
        known.save()
    assert torch.equal(*texts)


def test_nearest_batch_size_is_taken():
    known = Knowledge()
    for rows, factor in ((1, 1.0), (16, 4.0)):
        known.factors_in(Situation(rows)).draft[:] = [factor]
    assert known.factors_in(Situation(8)).draft == [4.0] and known.factors_in(Situation(2)).draft == [1.0]
