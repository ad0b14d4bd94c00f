"""On a GPU: a running batch on captured stages gives the tokens of `generate()`, and captures nothing on a takeover."""

import copy

import pytest
import torch

from hf_specbranch import specbranch
from hf_specbranch.runtime import idle_runners
from hf_specbranch.serving.engine import Engine
from hf_specbranch.serving.row_sampling import Sampling

from .models import config, llama, noisy_copy
from .test_running_batch import Answers, some_prompts

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_idle_runners():
    idle_runners.free_all(GPU)


@pytest.fixture(scope="module")
def pair():
    target = llama(seed=0, max_position_embeddings=4096).to(GPU)
    return target, noisy_copy(target, noise=0.1, seed=1)


class GpuAnswers(Answers):
    def expected(self, prompt, count):
        ids = torch.tensor([prompt], device=GPU)
        out = self.plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kernels", [True, False], ids=["spans", "masks"])
@pytest.mark.parametrize("policy", ["vanilla", "specbranch", "pearl", "autoregressive"])
def test_answers_are_those_of_generate_alone(policy, kernels, pair):
    answers = GpuAnswers(*pair, rows=5, policy=policy, kernels=kernels, runtime="graph")
    with answers.engine:
        answers.compare([*some_prompts(16), *some_prompts(4, seed=2, longest=1500)])
    assert answers.engine.stats.runtime == "graph" and not answers.engine.stats.slowed_by


def test_second_round_of_answers_captures_nothing(pair):
    answers = GpuAnswers(*pair, policy="vanilla", kernels=True, runtime="graph")
    answers.engine.sizes = [4]
    with answers.engine:
        answers.compare(some_prompts(10))
    assert answers.engine.stats.graphs_captured > 0
    again = Engine(answers.engine.settings.model, None, 4, settings=answers.engine.settings.config)
    answers.engine, again.sizes = again, [4]
    with again:
        answers.compare(some_prompts(10, seed=7))
    assert again.stats.graphs_captured == 0


def test_seeded_answers_are_those_of_a_cpu(pair):
    """The noise is the same on every device; in float32 so are the tokens."""
    prompts, texts = some_prompts(8, seed=3), []
    for place in (GPU, torch.device("cpu")):
        target, draft = (copy.deepcopy(model).to(place) for model in pair)
        engine = Engine(specbranch(target, draft), None, 4, settings=config("vanilla", kernels="auto"))
        answers = GpuAnswers(*pair)
        answers.engine = engine
        with engine:
            found = [answers.ask(prompts, sampling=Sampling(0.8, top_p, 1)) for top_p in (1.0, 0.9)]
        texts.append([[answer.tokens for answer in each] for each in found])
    assert texts[0] == texts[1]
