"""A prompt that begins like the last text is not read again, unless anything has changed."""

import copy
import gc
import random
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specbranch import specbranch
from hf_specbranch.decoding import assembly, engine
from hf_specbranch.model_state import state_of
from hf_specbranch.planning import online
from hf_specbranch.runtime import idle_runners, prefill, prefix_reuse
from hf_specbranch.runtime.cuda_graph import GraphRunner
from hf_specbranch.runtime.eager import EagerRunner, Remembered
from hf_specbranch.runtime.prefill import SIZES, passes

from .graphs import CHANGES, Comparison, tokens
from .models import config, llama, noisy_copy, slowly

SHORTEST_TEXT, FEWEST_TOKENS = 60, 40  # in place of lengths that take long on a CPU
NEW = 12  # tokens of each call
LIKE_OTHERS = (  # found like others
    *("scaled_in_place", "scaled_through_data", "one_element_through_data", "loaded_state"),
    "to_half_precision_and_back",
)


@pytest.fixture(scope="module")
def pair():
    target = llama(seed=0, max_position_embeddings=1024)
    return target, noisy_copy(target, noise=0.25, seed=1)


@pytest.fixture(scope="module")
def attached_target(pair):
    """What is found out about a model on first use is kept with it, so most tests share one."""
    return specbranch(copy.deepcopy(pair[0]))


@pytest.fixture
def compare(pair, attached_target, graph_runners, monkeypatch):
    """A pair of tiny models, of which every call is compared with plain `generate()`."""
    monkeypatch.setattr(prefix_reuse, "SHORTEST_TEXT", SHORTEST_TEXT)
    monkeypatch.setattr(prefix_reuse, "FEWEST_TOKENS", FEWEST_TOKENS)
    monkeypatch.setattr(prefill, "SIZES", (16, 32, 64))
    for model in (attached_target, pair[1]):
        idle_runners.drop(model)
    return Comparison(*pair, NEW, attached_target, policy="vanilla", gamma=3)


@pytest.fixture
def changeable(compare):
    """The same with models of its own."""
    target = copy.deepcopy(compare.plain)
    compare.plain, compare.model = target, specbranch(copy.deepcopy(target))
    return compare


def after(text, more=5):
    """The text, as the beginning of the next prompt."""
    return torch.cat([text, tokens(more, seed=text.shape[1], rows=text.shape[0])], dim=1)


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_common_prefix_excludes_the_last_token(text, prompt):
    common = Remembered(text).common_prefix(prompt)
    assert text[:common] == prompt[:common] and common <= max(0, len(prompt) - 1)
    longer = common + 1
    assert longer > len(text) or longer > len(prompt) - 1 or text[:longer] != prompt[:longer]


@given(st.integers(1, 5000))
def test_passes_read_every_token_once(count):
    sizes, counts = zip(*passes(1, count, takes_spans=True))
    assert sum(counts) == count and set(sizes) <= set(SIZES)
    assert sizes[1:] == counts[1:] and counts[0] <= sizes[0]  # only the first has padding
    assert not any(counts[0] <= size < sizes[0] for size in SIZES)  # and no more of it than necessary


def test_growing_chat_reads_what_is_new(compare):
    text = compare(tokens(50))
    for _ in range(3):
        known = text.shape[1]
        text = compare(after(text))
        assert compare.stats.reused_tokens == known - 2


@pytest.mark.parametrize("shared", [FEWEST_TOKENS - 1, FEWEST_TOKENS, slowly(73)])
def test_common_beginning_must_be_long(shared, compare):
    text = compare(tokens(70))
    prompt = torch.cat([text[:, :shared], (text[:, shared : shared + 1] - 2) % 40 + 3, tokens(9)], dim=1)
    assert compare.reused(prompt) == (shared if shared >= FEWEST_TOKENS else 0)


def test_same_prompt_again(compare):
    compare(tokens(70))
    assert compare.reused(tokens(70)) == 69  # the last token is read for its logits


def test_short_texts_are_not_remembered(compare):
    text = compare(tokens(SHORTEST_TEXT - NEW + 1))  # without the last two, it is one token too short
    assert compare.reused(after(text, more=30)) == 0
    text = compare(tokens(SHORTEST_TEXT - NEW + 2, seed=1))
    assert compare.reused(after(text, more=30)) == SHORTEST_TEXT


@pytest.mark.parametrize(
    "change",
    [slowly(each) if each.__name__ in LIKE_OTHERS else each for each in CHANGES],
    ids=lambda change: change.__name__,
)
def test_changed_model_reads_everything(change, changeable):
    """The prompt is the text of the old model. What follows it is that of the new one."""
    text = changeable(tokens(60))
    for model in (changeable.plain, changeable.model):
        change(model)
    assert changeable.reused(after(text)) == 0
    text = changeable(after(text))
    assert changeable.reused(after(text)) == text.shape[1] - 2  # the changed model can reuse its own text


def test_reuse_can_be_switched_off(compare):
    text = compare(tokens(60))
    assert compare.reused(after(text), {"prefix_reuse": False}) == 0
    assert compare.reused(after(text)) == 0  # nothing was kept either


def another_prompt(compare, text):
    compare(tokens(80, seed=5))


def short_prompt(compare, text):
    compare(tokens(4, seed=5))


def scores_returned(compare, text):
    compare(tokens(80, seed=5), output_scores=True, return_dict_in_generate=True)


def cache_given(compare, text):
    compare(tokens(80, seed=5), cached=60)


def holes_in_the_mask(compare, text):
    mask = torch.ones_like(text)
    mask[:, 10:13] = 0
    compare(text, attention_mask=mask)


def left_padding(compare, text):
    mask = torch.ones_like(text)
    mask[:, :3] = 0
    compare(text, attention_mask=mask)


def embedded_prompt(compare, text):
    compare(text, inputs_embeds=compare.plain.get_input_embeddings()(text.flip(1)))


def other_rows(compare, text):
    compare(tokens(80, seed=5, rows=2))


def other_layers(compare, text):
    compare(tokens(80, seed=5), {"kernels": False})


def other_runtime(compare, text):
    compare(tokens(80, seed=5), {"runtime": "eager"})


BETWEEN = {  # and whether the text before is still there afterwards
    another_prompt: False, short_prompt: False, scores_returned: False, cache_given: False, holes_in_the_mask: False,
    left_padding: False, embedded_prompt: False, other_rows: True, other_layers: True, other_runtime: True,
}  # fmt: skip


@pytest.mark.parametrize(
    "between",
    [
        *(cache_given, holes_in_the_mask, other_layers),
        *map(
            slowly,
            (another_prompt, other_rows, short_prompt, scores_returned, left_padding, embedded_prompt, other_runtime),
        ),
    ],
    ids=lambda between: between.__name__,
)
def test_call_in_between(between, compare):
    text = compare(tokens(60))
    between(compare, text)
    reused = compare.reused(after(text))
    assert reused == (text.shape[1] - 2 if BETWEEN[between] else 0)


def test_given_cache_is_not_remembered(compare):
    """Nobody knows which weights computed it."""
    text = compare(tokens(80), cached=60)
    assert compare.reused(after(text)) == 0


def test_padded_text_is_not_remembered(compare):
    """Neither are its keys those of the same tokens without padding, nor the other way round."""
    ids = tokens(80)
    mask = torch.ones_like(ids)
    mask[:, :30] = 0
    text = compare(ids, attention_mask=mask)
    assert compare.reused(after(text)) == 0
    assert compare.reused(ids, attention_mask=mask) == 0


def test_model_that_was_a_draft_meanwhile(compare):
    text = compare(tokens(60))
    other = Comparison(llama(seed=3, max_position_embeddings=1024), compare.model, NEW, policy="vanilla")
    other(tokens(80, seed=5))
    assert compare.reused(after(text)) == 0
    text = compare(after(text))
    other(text)  # its draft has read this text, but nobody knows with which weights
    assert compare.reused(after(text)) == 0


def test_released_cache_is_not_reused(compare):
    text = compare(tokens(60))
    idle_runners.keep_within(torch.device("cpu"), 0)
    assert compare.reused(after(text)) == 0


def test_batches_reuse_nothing(compare):
    text = compare(tokens(60, rows=2))
    assert compare.reused(after(text)) == 0


def test_sampled_text_after_a_reused_prefix(compare):
    """The same seed gives the same text, whether the prompt was read or not."""
    text, drawn = compare(tokens(60)), []
    for settings in ({}, {"prefix_reuse": False}):
        torch.manual_seed(3)
        ids = after(text)
        drawn.append(
            compare.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=NEW,
                assistant_model=compare.draft,
                specbranch=config(kernels=True, draft_sampling="greedy", **settings),
            )  # fmt: skip
        )
        assert (compare.stats.reused_tokens > 0) == (not settings)
    assert torch.equal(*drawn)


@pytest.mark.parametrize("policy", [*map(slowly, ("autoregressive", "vanilla", "pearl")), "specbranch", "auto"])
def test_every_policy_leaves_the_right_keys(policy, compare):
    """Also where the text ends inside a draft or at a tree leaf."""
    compare.settings |= {"policy": policy, "tree_leaves": 4}
    if policy == "auto":
        compare.settings |= {"gamma": "auto", "epsilon": "auto", "tree_leaves": "auto"}
    text = compare(tokens(60))
    for new in (1, 2, 5, 11, 16):
        compare.kwargs |= {"max_new_tokens": new, "min_new_tokens": new}
        known, text = text.shape[1], compare(after(text))
        assert compare.stats.reused_tokens == known - 2


@pytest.mark.parametrize("seed", [0, *map(slowly, range(1, 12))])
def test_calls_in_random_order(seed, changeable):
    """Every text is right, whatever came before it; some of the prompts were reused."""
    dice, reused = random.Random(seed), 0
    texts = [changeable(tokens(60, seed=seed))]
    changeable.kwargs |= {"max_new_tokens": 10, "min_new_tokens": 10}
    for _ in range(10):
        known = dice.choice(texts)[:, : dice.randint(30, 300)]
        if dice.random() < 0.6:
            texts.append(changeable(after(known, dice.randint(1, 20))))
            reused += changeable.stats.reused_tokens
        elif dice.random() < 0.3:
            change = dice.choice(CHANGES[:3])
            for model in (changeable.plain, changeable.model):
                change(model)
        else:
            dice.choice(list(BETWEEN))(changeable, known)
    assert reused > 0


class Marked(torch.nn.Parameter):
    """A kind of parameter of which nobody knows how its bits are stored."""


def test_weights_of_unknown_kind_are_not_checked(changeable):
    for model in (changeable.plain, changeable.model):
        model.model.norm.weight = Marked(model.model.norm.weight.data)
    text = changeable(tokens(60))
    assert changeable.reused(after(text)) == 0


# ---- drafts


@pytest.fixture
def tokens_read(monkeypatch):
    """How many tokens each forward of each model reads, in order."""
    counts = {}
    for method in ("prefill", "forward_uncaptured"):
        original = getattr(EagerRunner, method)

        def count(self, ids, *args, original=original, **more):
            counts.setdefault(id(self.model), []).append(ids.shape[1])
            return original(self, ids, *args, **more)

        monkeypatch.setattr(EagerRunner, method, count)
    return counts


def test_draft_reads_what_is_new_after_a_change_of_plan(target, tokens_read, monkeypatch):
    plans = [config("vanilla", gamma=3, epsilon=0.0).decided(), config("pearl", gamma=2, epsilon=0.0).decided()]

    def segments(self):
        while True:
            yield from (online.PlanSegment(plan, 1, False) for plan in plans)

    monkeypatch.setattr(online.Planner, "segments", segments)
    monkeypatch.setattr(assembly, "plans_within", lambda *_: plans)
    model, draft = specbranch(copy.deepcopy(target)), noisy_copy(target, noise=0.25, seed=1)
    ids = tokens(100)
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False}
    for _ in range(2):  # the first call also finds out about the models
        tokens_read.clear()
        assert torch.equal(model.generate(ids, **kwargs, assistant_model=draft), target.generate(ids, **kwargs))
    assert len(model.specbranch_stats.plans) > 5
    read = tokens_read[id(draft)]
    assert read[0] == 100 and max(read[1:]) < 10


def test_draft_reads_what_is_new_in_the_next_call(compare, tokens_read):
    text = compare(tokens(50))
    tokens_read.clear()
    compare(after(text))
    read = tokens_read[id(compare.draft)]
    assert read[0] == 16 and max(read) < 40  # one padded pass, then drafts


def test_rows_of_a_batch_remember_nothing(compare):
    """Neither does a row with padding."""
    for ids, hidden in ((tokens(60, rows=2), 0), (tokens(60), 4)):
        mask = torch.ones_like(ids)
        mask[:, :hidden] = 0
        compare(ids, attention_mask=mask)
        for model in (compare.model, compare.draft):
            runner = state_of(model).idle_runners[-1]
            assert runner.purpose[0] == ids.shape[0] and not runner.remembered.tokens


# ---- memory that runs out


def fail_once(monkeypatch, where, name, attempts):
    """Let a function run out of memory the first time, and note the runners that are alive at each attempt."""
    original = getattr(where, name)

    def wrapper(*args, **kwargs):
        attempts.append([runner() is not None for runner in seen])
        seen.append(weakref.ref(args[0].target.runner))
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("planted")
        return original(*args, **kwargs)

    seen = []
    monkeypatch.setattr(where, name, wrapper)


def test_call_begins_again_without_what_was_kept(compare, monkeypatch):
    compare(tokens(20))
    compare(tokens(20, rows=2))
    kept = [weakref.ref(runner) for runner in state_of(compare.model).idle_runners]
    attempts = []
    fail_once(monkeypatch, engine, "read_prompt", attempts)
    compare(tokens(30, rows=3))
    gc.collect()  # stages that are kept in place of graphs refer to their runner
    assert len(kept) == 2 and not any(runner() for runner in kept)
    assert attempts == [[], [False]]  # what the first attempt had allocated is free at the second
    assert compare.stats.new_tokens == 3 * NEW


def test_out_of_memory_reaches_the_user_if_nothing_was_kept(compare, monkeypatch):
    idle_runners.free_all(torch.device("cpu"))
    fail_once(monkeypatch, engine, "read_prompt", [])
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        compare(tokens(30))


def test_cache_that_finds_no_memory_frees_idle_runners(compare, monkeypatch):
    compare(tokens(20))
    kept = [weakref.ref(runner) for runner in state_of(compare.model).idle_runners]
    reserve, failed = EagerRunner.reserve, []

    def fail_first(self, rows, slots):
        if rows == 3 and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("planted")
        return reserve(self, rows, slots)

    monkeypatch.setattr(EagerRunner, "reserve", fail_first)
    compare(tokens(30, rows=3))
    gc.collect()
    assert failed and kept and not any(runner() for runner in kept)
    assert all(isinstance(runner, GraphRunner) for runner in state_of(compare.model).idle_runners)
