"""On a GPU: the same tokens, two streams, two devices."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from hf_specbranch import load_demo_pair, specbranch
from hf_specbranch.bench import python_prompts
from hf_specbranch.kernels import parallel_build
from hf_specbranch.kernels.parallel_build import ParallelBuilder

from .families import FAMILIES, make
from .models import POLICIES, assert_counts_add_up, attached, config, llama, noisy_copy, prompt
from .sampling import SMALLEST_P, draw, exact_distribution, p_value, sampling_pair

pytestmark = pytest.mark.gpu


def on_gpu(model):
    return copy.deepcopy(model).to("cuda")


def to_gpu(inputs):
    return {name: tensor.to("cuda") for name, tensor in inputs.items()}


@pytest.mark.parametrize("runtime", ["eager", "graph"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_output_equals_plain_generate(policy, overlap, rows, runtime, target, draft):
    plain, model, draft = on_gpu(target), specbranch(on_gpu(target)), on_gpu(draft)
    settings = config(policy, overlap=overlap, runtime=runtime)
    for seed in range(3):  # the second and third reuse caches and graphs
        kwargs = {**to_gpu(prompt(rows, length=7 + 5 * seed, seed=seed)), "max_new_tokens": 40, "do_sample": False}
        got = model.generate(**kwargs, assistant_model=draft, specbranch=settings)
        assert torch.equal(got, plain.generate(**kwargs))
        assert_counts_add_up(model.specbranch_stats)


@pytest.mark.parametrize("settings", [{"runtime": "eager"}, {"runtime": "graph"}, {"kernels": True}], ids=str)
def test_real_text_equals_plain_generate(settings):
    target, draft, tokenizer = load_demo_pair(device="cuda")
    model = specbranch(target)
    for item in python_prompts()[:6]:
        inputs = tokenizer(item.prompt, return_tensors="pt").to("cuda")
        kwargs = {**inputs, "max_new_tokens": 64, "do_sample": False}
        got = model.generate(**kwargs, assistant_model=draft, specbranch=settings)
        assert torch.equal(got, model.generate(**kwargs))


def test_captured_graphs_are_counted(target, draft):
    model, draft = specbranch(on_gpu(target)), on_gpu(draft)
    kwargs = {**to_gpu(prompt()), "max_new_tokens": 24, "do_sample": False, "assistant_model": draft}
    counts = []
    for _ in range(3):
        model.generate(**kwargs, specbranch=config(runtime="graph"))
        counts.append(model.specbranch_stats.graphs_captured)
    assert counts[0] >= 3 and counts[2] == 0  # a pass, a draft, a verdict


@pytest.mark.parametrize("policy", [*POLICIES, "auto"])
def test_stages_after_a_dry_run_give_the_same_tokens(policy, monkeypatch):
    """On a machine that seems to have no kernels on disk, for a greedy text and for a sampled one.

    Where all seem to be on disk, only the first kernel of each model is built in a dry run.
    """
    target, draft, tokenizer = load_demo_pair(device="cuda")
    inputs = tokenizer(python_prompts()[0].prompt, return_tensors="pt").to("cuda")
    settings = config(policy, max_rejection_branches=4 if policy == "specbranch" else 0, tree_leaves=3, kernels=True)
    drawn = {**inputs, "max_new_tokens": 32, "do_sample": True, "top_k": 0}
    built, drawn_texts = [], []
    build = ParallelBuilder.build
    for on_disk in (True, False):
        built.clear()
        monkeypatch.setattr(parallel_build.build_state, "on_disk", None if on_disk else False)
        monkeypatch.setattr(parallel_build, "LONG_BUILD", 60.0)  # whatever is built within that was on disk
        monkeypatch.setattr(
            ParallelBuilder, "build", lambda self, *args: (self.detects and built.append(args[0]), build(self, *args))
        )  # without those that are built in the background
        model = specbranch(on_gpu(target))
        kwargs = {**inputs, "max_new_tokens": 48, "do_sample": False}
        got = model.generate(**kwargs, assistant_model=on_gpu(draft), specbranch=settings)
        assert torch.equal(got, target.generate(**kwargs)) and built and (len(built) > 2) != on_disk
        torch.manual_seed(5)
        drawn_texts.append(model.generate(**drawn, assistant_model=on_gpu(draft), specbranch=settings))
    assert torch.equal(*drawn_texts)


@pytest.mark.slow
def test_fifty_prompts_give_the_same_tokens_whatever_runs_them():
    """128 tokens each in float32, in batches of five: plain `generate()`, and every runtime."""
    target, draft, tokenizer = load_demo_pair(device="cuda")
    model = specbranch(target)
    settings = [
        {"runtime": "eager"},
        {"runtime": "graph"},
        {"runtime": "graph", "kernels": True},
    ]
    prompts = [prompt for item in python_prompts() for prompt in (item.prompt, item.prompt + "\n    # ")][:50]
    differing = [0] * len(settings)
    for first in range(0, 50, 5):
        inputs = tokenizer(prompts[first : first + 5], return_tensors="pt", padding=True).to("cuda")
        kwargs = {**inputs, "max_new_tokens": 128, "do_sample": False}
        expected = model.generate(**kwargs)
        for index, choice in enumerate(settings):
            got = model.generate(**kwargs, assistant_model=draft, specbranch=choice)
            differing[index] += sum(not torch.equal(one, other) for one, other in zip(got, expected))
    assert len(prompts) == 50 and differing == [0] * len(settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_under_graphs_or_falls_back(family):
    target = make(family)
    draft, inputs = on_gpu(noisy_copy(target, 0.1, 1)), to_gpu(prompt(2, length=9, vocabulary=64))
    plain, model = on_gpu(target), specbranch(on_gpu(target))
    kwargs = {**inputs, "max_new_tokens": 24, "do_sample": False}
    got = model.generate(**kwargs, assistant_model=draft, specbranch=config(epsilon=0.05, runtime="graph"))
    assert torch.equal(got, plain.generate(**kwargs))
    torch.rand(1, device="cuda")  # an attempt to capture must leave the random state usable


@pytest.mark.parametrize("policy", POLICIES)
def test_a_warm_round_waits_for_the_device_once(policy, target, draft, monkeypatch):
    from hf_specbranch.decoding import engine
    from hf_specbranch.runtime.static_buffers import HostCopies

    model, draft, waits = specbranch(on_gpu(target)), on_gpu(draft), []
    kwargs = {**to_gpu(prompt()), "max_new_tokens": 40, "do_sample": False, "assistant_model": draft}
    settings = config(policy, epsilon=0.05, runtime="graph")  # drafts run in one stage
    for _ in range(2):  # first stages are captured, then some that the first text did not need
        model.generate(**kwargs, specbranch=settings)
    read_prompt, read = engine.read_prompt, HostCopies.read

    def then_forbid_waiting(*given, **named):
        feedback = read_prompt(*given, **named)
        waits.clear()
        torch.cuda.set_sync_debug_mode("error")
        return feedback

    def count(self):
        waits.append(1)
        return read(self)

    monkeypatch.setattr(engine, "read_prompt", then_forbid_waiting)
    monkeypatch.setattr(HostCopies, "read", count)
    try:
        model.generate(**kwargs, specbranch=settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Once per round after the first. The copy of the prompt is read at the end, or where a draft reads the prompt.
    assert len(waits) == model.specbranch_stats.target_forwards - 1 + (policy == "autoregressive")


@pytest.mark.parametrize(
    "extra",
    [
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 20, "eos_token_id": list(range(8, 30))},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "do_sample": True},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_common_processors_run_inside_captured_stages(extra, target, draft):
    plain, model, draft = on_gpu(target), specbranch(on_gpu(target)), on_gpu(draft)
    kwargs = {"max_new_tokens": 40, "do_sample": False, **extra}
    for seed in range(2):
        inputs = to_gpu(prompt(2, length=6 + 3 * seed, seed=seed))
        torch.manual_seed(seed)
        got = model.generate(**inputs, **kwargs, assistant_model=draft, specbranch=config(runtime="graph"))
        assert not model.specbranch_stats.slowed_by
        if not kwargs["do_sample"]:
            assert torch.equal(got, plain.generate(**inputs, **kwargs))
            continue
        torch.manual_seed(seed)  # warm graphs give the same text as those just captured
        again = model.generate(**inputs, **kwargs, assistant_model=draft, specbranch=config(runtime="graph"))
        assert torch.equal(got, again)


def test_a_cache_that_outgrows_its_graphs_captures_them_again():
    target = llama(seed=0, max_position_embeddings=2048)
    plain, model = on_gpu(target), specbranch(on_gpu(target))
    draft = on_gpu(noisy_copy(target, 0.1, 1))
    for length in (20, 400, 30):
        kwargs = {**to_gpu(prompt(1, length=length)), "max_new_tokens": 150, "do_sample": False}
        got = model.generate(**kwargs, assistant_model=draft, specbranch=config(runtime="graph"))
        assert torch.equal(got, plain.generate(**kwargs))


def test_a_second_turn_under_graphs_continues_from_the_cache(target, draft):
    plain, model, draft = on_gpu(target), specbranch(on_gpu(target)), on_gpu(draft)
    texts = []
    for speaker, extra in ((plain, {}), (model, {"assistant_model": draft, "specbranch": config(runtime="graph")})):
        cache, ids = DynamicCache(config=target.config), prompt()["input_ids"].to("cuda")
        for _ in range(3):
            ids = speaker.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=10, min_new_tokens=10,
                do_sample=False, **extra,
            )  # fmt: skip
        texts.append(ids)
    assert torch.equal(*texts)


def test_forward_hooks_are_called_at_every_pass(target, draft):
    model, draft, calls = specbranch(on_gpu(target)), on_gpu(draft), []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    model.generate(**to_gpu(prompt()), max_new_tokens=30, do_sample=False, assistant_model=draft)
    assert len(calls) >= model.specbranch_stats.target_forwards


def test_weights_replaced_between_calls_are_used(target, draft, stranger):
    model, draft = specbranch(on_gpu(target)), on_gpu(draft)
    kwargs = {**to_gpu(prompt()), "max_new_tokens": 30, "do_sample": False}
    model.generate(**kwargs, assistant_model=draft)
    model.load_state_dict(stranger.state_dict(), assign=True)
    model.to("cuda")
    assert torch.equal(model.generate(**kwargs, assistant_model=draft), on_gpu(stranger).generate(**kwargs))


def test_hidden_states_are_captured_too(target, draft):
    plain, model, draft = on_gpu(target), specbranch(on_gpu(target)), on_gpu(draft)
    kwargs = dict(**to_gpu(prompt()), max_new_tokens=20, min_new_tokens=20, do_sample=False)
    wanted = dict(return_dict_in_generate=True, output_hidden_states=True, output_scores=True)
    theirs = plain.generate(**kwargs, **wanted)
    ours = model.generate(**kwargs, **wanted, assistant_model=draft, specbranch=config(runtime="graph"))
    assert torch.equal(ours.sequences, theirs.sequences)
    for mine, other in zip(ours.hidden_states, theirs.hidden_states):
        for one, two in zip(mine, other):
            torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)


def test_the_draft_may_live_on_another_device(target, draft):
    settings = {"max_new_tokens": 40, "min_new_tokens": 30, "bad_words_ids": [[5], [7, 8]], "do_sample": False}
    kwargs = {**prompt(2), **settings}
    expected = target.generate(**kwargs)
    on_cuda = specbranch(on_gpu(target))
    got = on_cuda.generate(**to_gpu(prompt(2)), **settings, assistant_model=draft)
    assert torch.equal(got.cpu(), expected)
    got = attached(target).generate(**kwargs, assistant_model=on_gpu(draft))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_target_and_draft_on_two_devices_overlap(place):
    """The draft works while the target runs, and times are those of the devices, not of the launches."""
    target = llama(seed=3, hidden=256, layers=8)
    draft = noisy_copy(target, 0.01, 1)  # a branch survives only if all tokens before it are accepted
    settings = config("specbranch", gamma=2, epsilon=0.0, overlap=True)
    kwargs = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False}
    alone = specbranch(copy.deepcopy(target))
    alone.generate(**prompt(1), **kwargs, assistant_model=draft, specbranch=replace(settings, overlap=False))
    other = "cuda" if place == "cpu" else "cpu"
    model, draft = specbranch(target.to(place)), draft.to(other)
    inputs = {name: each.to(place) for name, each in prompt(1).items()}
    expected = model.generate(**inputs, **kwargs, specbranch=False)
    model.generate(**inputs, **kwargs, assistant_model=draft, specbranch=settings)  # captures
    got = model.generate(**inputs, **kwargs, assistant_model=draft, specbranch=settings)
    stats = model.specbranch_stats
    assert torch.equal(got, expected)
    assert stats.branch_hits > alone.specbranch_stats.branch_hits / 2 > 2, stats  # drafted as on one device
    assert stats.hidden_fraction > 0.1, stats


@pytest.mark.parametrize("drafting", ["greedy", "sample"])
def test_samples_follow_the_targets_distribution(drafting, monkeypatch):
    from . import sampling

    model, draft = sampling_pair()
    expected = exact_distribution(model)
    monkeypatch.setattr(sampling, "sampling_pair", lambda: (specbranch(on_gpu(model)), on_gpu(draft)))
    monkeypatch.setattr(sampling, "PROMPT", sampling.PROMPT.to("cuda"))
    settings = config("specbranch", gamma=2, k=3, epsilon=0.5, draft_sampling=drafting)
    assert p_value(draw(settings, samples=20_000), expected) > SMALLEST_P


def test_drafting_is_measured_by_device_events(target, draft):
    model = specbranch(on_gpu(target))
    model.generate(
        **to_gpu(prompt()), max_new_tokens=40, do_sample=False, assistant_model=on_gpu(draft), specbranch=config()
    )
    assert model.specbranch_stats.draft_seconds > 0
    assert 0 <= model.specbranch_stats.hidden_fraction <= 1


def test_bfloat16_models_generate():
    target, draft, tokenizer = load_demo_pair(device="cuda", dtype=torch.bfloat16)
    inputs = tokenizer("def add(a, b):", return_tensors="pt").to("cuda")
    out = specbranch(target).generate(**inputs, max_new_tokens=64, do_sample=False, assistant_model=draft)
    assert out.shape[1] > inputs["input_ids"].shape[1]


def test_garbage_graphs_do_not_end_a_capture():
    """A graph in a reference cycle is destroyed when Python collects garbage, which it must not do in a capture."""
    from hf_specbranch.runtime.static_buffers import GraphMemory

    memory, numbers = GraphMemory(torch.device("cuda", 0)), torch.zeros(8, device="cuda")
    with memory.capturing():
        cycle = {"graphs": memory.record(numbers.zero_)}
    cycle["itself"] = cycle
    del cycle

    def stage():
        kept = [[] for _ in range(1_000_000)]  # more than any threshold of the collector
        numbers.add_(len(kept))

    with memory.capturing():
        (graph,) = memory.record(stage)
    graph.replay()
    assert numbers.tolist() == [1e6] * 8


def test_capture_streams_are_not_the_side_streams_of_threads():
    """torch has 32 streams, which it hands out in turn."""
    from hf_specbranch.runtime.static_buffers import GraphMemory
    from hf_specbranch.runtime.streams import side_stream

    device = torch.device("cuda", 0)
    side = side_stream(device)
    assert all(GraphMemory(device).stream.cuda_stream != side.cuda_stream for _ in range(40))
