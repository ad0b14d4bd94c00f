"""Cheaper copies of a draft: eight bits per weight, a shortlist of the vocabulary. No output token depends on them."""

import copy

import pytest
import torch
from transformers import LogitsProcessor
from typer.testing import CliRunner

from hf_specbranch import SpecBranchConfig, load_demo_pair, specbranch
from hf_specbranch.cli import app
from hf_specbranch.decoding import call_costs
from hf_specbranch.kernels.linear import Plan
from hf_specbranch.kernels.quantised import fits, quantised_linear, quantised_reference
from hf_specbranch.layers.packed_linear import PackedLinear
from hf_specbranch.layers.quantised_formats import recognise_format
from hf_specbranch.layers.shortlist import most_frequent, read_tokens
from hf_specbranch.model_state import every_parameter, state_of, weight_bytes
from hf_specbranch.planning.costs import StepCosts
from hf_specbranch.planning.draft_choice import DraftForm
from hf_specbranch.planning.sizes import size_of

from .graphs import Comparison, tokens
from .kernels import assert_close, randn, where_triton_runs
from .models import attached, config, llama, noisy_copy, prompt, slowly
from .sampling import SMALLEST_P, VOCABULARY, draw, exact_distribution, p_value

CASES = (
    ("int8", None, "eager", "vanilla"),
    slowly(None, 12, "eager", "auto"),
    ("float8", None, "graph", "vanilla"),
    ("int8", 12, "graph", "auto"),
)
SLOW_FORMS = (("int8", None), (None, 1))


@pytest.fixture(scope="module")
def pair():
    """A target, and a draft whose layers can be packed."""
    target = llama(seed=0, hidden=128)
    return target, noisy_copy(target, noise=0.2, seed=1)


@pytest.mark.parametrize(("weights", "shortlist", "runtime", "policy"), CASES)
def test_greedy_text_is_that_of_plain_generate(pair, weights, shortlist, runtime, policy, request, monkeypatch):
    # The planner drafts, however fast this machine is.
    monkeypatch.setattr(call_costs, "predicted_costs", lambda *_: StepCosts(1.0, draft_step=0.01))
    if runtime == "graph":
        request.getfixturevalue("graph_runners")
    compare = Comparison(*pair, new_tokens=12, runtime=runtime, draft_weights=weights, draft_shortlist=shortlist)
    for each, rows in (("specbranch", 3), (policy, 1)):
        compare(tokens(9, rows=rows), {"policy": each})
        stats = compare.stats
        assert stats.draft_weights == (weights or "") and stats.draft_shortlist == (24 if shortlist else 0)
        assert stats.num_accepted_tokens > 0


def test_draft_is_left_as_it_is_and_shares_its_memory(pair):
    target, original = pair
    draft = copy.deepcopy(original)
    before = {name: weight.clone() for name, weight in draft.state_dict().items()}
    modules = dict(draft.named_modules())
    settings = config("vanilla", draft_weights="int8")
    attached(target).generate(**prompt(), max_new_tokens=4, assistant_model=draft, specbranch=settings)
    assert all(torch.equal(weight, before[name]) for name, weight in draft.state_dict().items())
    assert dict(draft.named_modules()) == modules
    twin = state_of(draft).copies[DraftForm("int8")][1][0]
    shared = {id(weight) for weight in every_parameter(draft)}
    assert {id(weight) for weight in every_parameter(twin)} < shared
    assert size_of(twin).weights < 0.3 * size_of(draft).weights  # of float32
    assert weight_bytes(twin) < weight_bytes(draft)


def test_changed_draft_is_copied_again(pair):
    target, _ = pair
    draft, model = llama(seed=7, hidden=128), attached(target)
    rates = []
    for _ in range(2):
        settings = config("vanilla", epsilon=0.0, draft_weights="int8")
        model.generate(**prompt(), max_new_tokens=30, assistant_model=draft, do_sample=False, specbranch=settings)
        rates.append(model.specbranch_stats.draft_acceptance_rate)
        draft.load_state_dict(target.state_dict())
    assert rates[0] < 0.2 and rates[1] > 0.6


def test_tokens_of_the_text_are_in_the_shortlist():
    """A draft equal to its target is right as long as the text continues with tokens of the prompt."""
    target = llama(seed=3, eos=None)
    model, new = attached(target), {"max_new_tokens": 40, "do_sample": False}
    text = target.generate(tokens(8, seed=5), **new)
    settings = config("vanilla", epsilon=0.0, draft_shortlist=12)
    rolled_back = []
    for ids in (tokens(8, seed=5), text):  # the second prompt has all tokens of the text
        model.generate(ids, attention_mask=torch.ones_like(ids), **new, assistant_model=target, specbranch=settings)
        rolled_back.append(model.specbranch_stats.rollback_tokens)
    assert rolled_back[0] > rolled_back[1] == 0


class OnlyHighTokens(LogitsProcessor):
    """Forbids everything that is in the shortlist."""

    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[1]) < 40, float("-inf"))

    def fork(self):
        return self

    def rollback(self, count):
        pass


def test_processors_may_forbid_the_whole_shortlist(pair):
    target, draft = pair
    inputs, more = prompt(), {"max_new_tokens": 20, "do_sample": False, "logits_processor": [OnlyHighTokens()]}
    expected = target.generate(**inputs, **more)
    settings = config("specbranch", draft_shortlist=8)
    assert torch.equal(
        attached(target).generate(**inputs, **more, assistant_model=draft, specbranch=settings), expected
    )


@pytest.mark.parametrize("drafting", ["sample", pytest.param("greedy", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("weights", "shortlist"), [("float8", 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_FORMS)]
)
def test_sampled_texts_have_the_distribution_of_the_target(weights, shortlist, drafting):
    """The prompt has two of four tokens; with a shortlist, two are never drafted."""
    target = llama(3, vocabulary=VOCABULARY, hidden=128, layers=1, sharpness=0.1, eos=None, bos_token_id=None)
    pair = attached(target), noisy_copy(target, noise=0.5, seed=5)
    settings = config(
        "specbranch", 2, 3, 0.3, draft_sampling=drafting, draft_weights=weights, draft_shortlist=shortlist
    )
    counts = draw(settings, samples=8_000, pair=pair)
    stats = pair[0].specbranch_stats
    assert (stats.draft_weights, stats.draft_shortlist) == (weights or "", 2 if shortlist else 0)
    assert stats.num_accepted_tokens and stats.rollback_tokens
    assert p_value(counts, exact_distribution(target)) > SMALLEST_P


def test_shortlist_file_and_what_is_refused(pair, tmp_path):
    target, draft = pair
    (path := tmp_path / "tokens.json").write_text(str(most_frequent([[5, 6, 6], [7]], size=2)))
    model = attached(target)

    def generate(draft=draft, **settings):
        model.generate(**prompt(), max_new_tokens=4, assistant_model=draft, specbranch=config("vanilla", **settings))

    generate(draft_shortlist=str(path))
    assert model.specbranch_stats.draft_shortlist == 2 * 3  # two, the end of a text, and as many from the text
    with pytest.raises(ValueError, match="no such file"):
        generate(draft_shortlist=str(tmp_path / "missing.json"))
    path.write_text("{}")
    with pytest.raises(ValueError, match="expected a list of token ids"):
        generate(draft=copy.deepcopy(draft), draft_shortlist=str(path))
    with pytest.raises(ValueError, match="multiple of 128"):
        generate(draft=llama(seed=1), draft_weights="int8")
    for wrong in ({"draft_weights": "int4"}, {"draft_shortlist": 0}, {"draft_shortlist": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SpecBranchConfig(**wrong)


def test_copies_go_with_their_draft(pair):
    target, draft = pair[0], copy.deepcopy(pair[1])
    settings = config("vanilla", draft_weights="int8", draft_shortlist=12)
    attached(target).generate(**prompt(), max_new_tokens=4, assistant_model=draft, specbranch=settings)
    twin = state_of(draft).copies[DraftForm("int8", 12)][1][0]
    assert state_of(twin).original() is draft
    del draft
    assert state_of(twin).original() is None


class Meanwhile:
    """A streamer that does something each time a text grows."""

    def __init__(self, work):
        self.work = work

    def put(self, tokens):
        self.work()

    def end(self):
        pass


def test_calls_at_a_time_have_shortlists_of_their_own(pair):
    """A seeded text does not depend on what other calls of the same draft do meanwhile."""
    model, draft = attached(pair[0]), copy.deepcopy(pair[1])
    settings = config("vanilla", draft_sampling="sample", draft_weights="int8", draft_shortlist=6)

    def generate(seed, meanwhile=lambda: None, new_tokens=16):
        more = {"do_sample": True, "top_k": 0, "temperature": 4.0, "max_new_tokens": new_tokens}
        return model.generate(
            **prompt(seed=seed), **more, assistant_model=draft, specbranch=settings,
            generator=torch.Generator().manual_seed(seed), streamer=Meanwhile(meanwhile),
        )  # fmt: skip

    assert torch.equal(generate(1), generate(1, lambda: generate(2, new_tokens=4)))
    first, second = state_of(draft).copies[DraftForm("int8", 6)][1]
    layers = [each.model.layers[0].mlp.up_proj for each in (first, second)]
    assert layers[0] is not layers[1] and layers[0].weight is layers[1].weight


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_run_in_captured_stages(dtype):
    target, draft, tokenizer = load_demo_pair()
    target, draft = specbranch(target.to("cuda", dtype)), draft.to("cuda", dtype)
    inputs = tokenizer("def add(a, b):", return_tensors="pt").to("cuda")
    texts, rates = [], []
    for weights, shortlist in ((None, None), ("int8", None), ("float8", 2048)):
        settings = config("vanilla", draft_weights=weights, draft_shortlist=shortlist)
        more = {"assistant_model": draft, "max_new_tokens": 64, "do_sample": False, "specbranch": settings}
        texts.append(target.generate(**inputs, **more).tolist())
        stats = target.specbranch_stats
        assert stats.runtime == "graph" and not stats.slowed_by and stats.draft_weights == (weights or "")
        rates.append(stats.draft_acceptance_rate)
    assert min(rates) > 0.8 * rates[0]
    if dtype == torch.float32:
        assert texts[0] == texts[1] == texts[2]


def test_shortlist_is_counted_from_a_corpus(tmp_path):
    load_demo_pair()[2].save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "code.txt").write_text("def add(a, b):\n    return a + b\n" * 20)
    (tmp_path / "texts.jsonl").write_text('{"text": "return a"}\n\n{"prompt": "return b"}\n')
    files, out = [str(tmp_path / name) for name in ("code.txt", "texts.jsonl")], tmp_path / "tokens.json"
    command = ["shortlist", *files, "--tokenizer", str(tmp_path / "tokenizer"), "--size", "8", "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "8 tokens of 3 texts" in done.output, done.output
    assert len(set(read_tokens(out))) == 8
    command = [
        "generate",
        "def add(",
        "--max-new-tokens",
        "4",
        "--draft-shortlist",
        str(out),
        "--draft-weights",
        "none",
    ]
    assert CliRunner().invoke(app, command).exit_code == 0


@where_triton_runs
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_kernel_reads_packed_layers(kind):
    """As a layer of a copy has them: a scale for 128 elements of each row."""
    layer = PackedLinear(randn(72, 256, dtype=torch.float16), randn(72, dtype=torch.float16), kind)
    packed, x = recognise_format(layer)(layer), randn(3, 256, dtype=torch.float16)
    plan = Plan(1, 3, 64)
    assert fits(x, packed, layer.bias, plan)
    expected = quantised_reference(x, packed, layer.bias)
    assert_close(quantised_linear(x, [packed], [layer.bias], plan), expected)
    torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-2)
