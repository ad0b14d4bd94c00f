"""Whatever `generate()` can do, it can do with SpecBranch, and ends up with the same tokens."""

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StaticCache,
    StoppingCriteria,
    TextStreamer,
)

from .models import (
    EOS,
    PAD,
    POLICIES,
    VOCABULARY,
    assert_counts_add_up,
    attached,
    config,
    llama,
    noisy_copy,
    pairs,
    prompt,
    slowly,
)
from .tokens import letter_tokenizer

SPECULATIVE = [policy for policy in POLICIES if policy != "autoregressive"]


@pytest.fixture(scope="module")
def model(target):
    return attached(target)


def both(target, model, draft, inputs, policy="specbranch", **kwargs):
    """Plain and speculative output for the same arguments."""
    kwargs = {"max_new_tokens": 16, "do_sample": False, **kwargs}
    expected = target.generate(**inputs, **copy.deepcopy(kwargs))
    got = model.generate(**inputs, **copy.deepcopy(kwargs), assistant_model=draft, specbranch=config(policy))
    assert_counts_add_up(model.specbranch_stats)
    return expected, got


# ---- processors

PROCESSING = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_length": {"min_length": 20},
    "min_new_tokens": {"min_new_tokens": 14},
    "bad_words": {"bad_words_ids": [[5], [6, 7], [9, 10, 11]]},
    "forced_eos": {"forced_eos_token_id": EOS},
    "forced_bos": {"forced_bos_token_id": 11},
    "suppress": {"suppress_tokens": [4, 8, 15]},
    "suppress_at_begin": {"begin_suppress_tokens": [4, 8, 15]},
    "sequence_bias": {"sequence_bias": [[[5], 8.0], [[6, 7], -9.0]]},
    "exponential_decay": {"exponential_decay_length_penalty": (5, 1.3)},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "encoder_repetition": {"encoder_repetition_penalty": 1.4},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(VOCABULARY) if (t + row) % 3]},
    "guidance": {"guidance_scale": 1.5},
    "top_k_of_one": {"do_sample": True, "top_k": 1},
    "nearly_zero_temperature": {"do_sample": True, "temperature": 1e-4, "top_k": 0},
}


# Processors that do more than look at single tokens; the others are alike in all releases.
OF_RELEASE = ("no_repeat_ngram", "bad_words", "forced_eos", "exponential_decay", "encoder_repetition", "guidance")


# These change scores of single tokens as others do.
LIKE_OTHERS = ("min_length", "suppress", "suppress_at_begin", "renormalize", "forced_bos", "nearly_zero_temperature")


def processing(name):
    if name in OF_RELEASE:
        return pytest.param(name, marks=pytest.mark.compat)
    return slowly(name) if name in LIKE_OTHERS else name


@pytest.mark.parametrize("rows", [slowly(1), 3])
@pytest.mark.parametrize("name", [processing(name) for name in PROCESSING])
def test_processing_gives_the_tokens_of_plain_generate(name, rows, target, model, draft):
    expected, got = both(target, model, draft, prompt(rows), **PROCESSING[name])
    assert torch.equal(got, expected)


@pytest.mark.parametrize("policy", SPECULATIVE)
def test_every_policy_obeys_processors(policy, target, model, draft):
    expected, got = both(target, model, draft, prompt(2), policy, repetition_penalty=1.3, no_repeat_ngram_size=3)
    assert torch.equal(got, expected)


class Witness(LogitsProcessor):
    """Writes down every prefix it is shown, and lets its own history change the scores."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores):
        self.shown.append(input_ids.tolist())
        banned = (len(self.shown) * 5) % VOCABULARY
        scores = scores.clone()
        scores[:, banned] = float("-inf")
        return scores


@pytest.mark.compat
@pytest.mark.matrix
@pytest.mark.parametrize(("policy", "rows"), pairs(POLICIES, [1, 3]))
def test_stateful_processor_sees_plain_prefixes(policy, rows, target, model, draft):
    ours, plain = Witness(), Witness()
    kwargs = {**prompt(rows), "max_new_tokens": 25, "do_sample": False}
    expected = target.generate(**kwargs, logits_processor=[plain])
    got = model.generate(**kwargs, logits_processor=[ours], assistant_model=draft, specbranch=config(policy))
    assert torch.equal(got, expected)
    assert ours.shown == plain.shown
    assert model.specbranch_stats.target_forwards <= len(plain.shown)


class Counter(LogitsProcessor):
    """Allows token classes in turn; offers the fork and rollback protocol."""

    def __init__(self, calls=0):
        self.calls = calls

    def __call__(self, input_ids, scores):
        allowed = torch.arange(scores.shape[-1]) % 4 == self.calls % 4
        self.calls += 1
        return scores.masked_fill(~allowed, float("-inf"))

    def fork(self):
        return Counter(self.calls)

    def rollback(self, n):
        self.calls -= n


class SilentCounter(Counter):
    fork = rollback = None


@pytest.mark.parametrize("policy", [*map(slowly, ("vanilla", "pearl")), "specbranch"])
def test_a_processor_that_can_fork_guides_the_draft_too(policy, target, model, draft):
    inputs, rates = prompt(), {}
    expected = target.generate(**inputs, max_new_tokens=24, do_sample=False, logits_processor=[Counter()])
    for kind in (Counter, SilentCounter):
        got = model.generate(
            **inputs, max_new_tokens=24, do_sample=False, logits_processor=[kind()], assistant_model=draft,
            specbranch=config(policy, epsilon=0.0),
        )  # fmt: skip
        assert torch.equal(got, expected)
        rates[kind] = model.specbranch_stats.mean_acceptance_length
    assert rates[Counter] > rates[SilentCounter]


# ---- stopping


@pytest.mark.parametrize("policy", [*map(slowly, ("autoregressive", "pearl")), "vanilla", "specbranch"])
def test_any_eos_token_ends_a_row_within_a_draft(policy, target, model, draft):
    plain = target.generate(**prompt(), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    for position in (3, 14):
        ends = [int(plain[0, 7 + position]), VOCABULARY - 1]
        expected, got = both(target, model, draft, prompt(3), policy, eos_token_id=ends, pad_token_id=PAD)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("length", [8, 9, 12, 13, 14, 19, *map(slowly, (10, 11, 15, 16, 17, 18))])
def test_max_length_is_exact(length, target, model, draft):
    expected, got = both(target, model, draft, prompt(2), max_new_tokens=None, max_length=length)
    assert torch.equal(got, expected)


def test_max_time_ends_generation(target, model, draft):
    _, got = both(target, model, draft, prompt(), max_time=0.0, max_new_tokens=200)
    assert got.shape[1] == 8


class AfterTokens(StoppingCriteria):
    """Fires for a row once it has gained its own number of tokens, and remembers every call."""

    def __init__(self, start, *limits):
        self.start, self.limits, self.calls = start, limits, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.tolist())
        return torch.tensor([input_ids.shape[1] - self.start >= limit for limit in self.limits])


@pytest.mark.compat
@pytest.mark.parametrize(("limits", "eos"), pairs([(1,), (2,), (9,), (13,), (3, 9), (9, 3, 17)], [EOS, None]))
def test_a_users_criterion_fires_at_exactly_its_token(limits, eos, target, model, draft):
    inputs, ours, plain = prompt(len(limits)), AfterTokens(7, *limits), AfterTokens(7, *limits)
    kwargs = {**inputs, "max_new_tokens": 30, "do_sample": False, "eos_token_id": eos, "pad_token_id": PAD}
    expected = target.generate(**kwargs, stopping_criteria=[plain])
    got = model.generate(**kwargs, stopping_criteria=[ours], assistant_model=draft, specbranch=config())
    assert torch.equal(got, expected)
    assert ours.calls == plain.calls


@pytest.mark.compat
@pytest.mark.parametrize(("rows", "eos"), pairs([1, 3], [EOS, None]))
def test_stop_strings_end_where_plain_generate_ends(rows, eos, target, model, draft):
    tokenizer = letter_tokenizer(VOCABULARY)
    plain = target.generate(**prompt(), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    stop = [tokenizer.convert_ids_to_tokens(int(plain[0, 7 + position])) for position in (11, 17)]
    kwargs = {"stop_strings": stop, "tokenizer": tokenizer, "eos_token_id": eos, "pad_token_id": PAD}
    expected, got = both(target, model, draft, prompt(rows), **kwargs)
    assert torch.equal(got, expected)
    assert rows > 1 or got.shape[1] < 7 + 30


# ---- streaming


class Listener(TextStreamer):
    def __init__(self):
        self.heard, self.ended = [], 0

    def put(self, value):
        self.heard.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize(
    ("policy", "rows"),
    [*pairs(["vanilla", "specbranch"], [1, 3]), *(slowly(each, 3) for each in ("autoregressive", "pearl"))],
)
def test_a_streamer_hears_every_token_once_and_in_order(policy, rows, target, model, draft):
    plain, ours = Listener(), Listener()
    kwargs = {**prompt(rows), "max_new_tokens": 30, "do_sample": False}
    target.generate(**kwargs, streamer=plain)
    model.generate(**kwargs, streamer=ours, assistant_model=draft, specbranch=config(policy))
    assert ours.heard == plain.heard
    assert ours.ended == 1


# ---- outputs


@pytest.mark.compat
@pytest.mark.parametrize("rows", [1, 2])
def test_output_fields_are_those_of_plain_generate(rows, draft):
    target = llama(seed=0, attn_implementation="eager")
    kwargs = dict(
        **prompt(rows),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
    )
    plain = target.generate(**kwargs)
    ours = attached(target).generate(**kwargs, assistant_model=draft, specbranch=config())
    assert torch.equal(ours.sequences, plain.sequences)
    assert isinstance(ours, type(plain)) and ours.stats.new_tokens == 12 * rows
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(plain[name]) == 12
        for mine, theirs in zip(ours[name], plain[name]):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    for name in ("hidden_states", "attentions"):
        assert len(ours[name]) == len(plain[name]) == 12
        for mine, theirs in zip(ours[name], plain[name]):
            assert len(mine) == len(theirs)
            for one, other in zip(mine, theirs):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_transition_scores_can_be_computed(target, model, draft):
    kwargs = dict(**prompt(), max_new_tokens=9, do_sample=False, return_dict_in_generate=True, output_scores=True)
    ours = model.generate(**kwargs, assistant_model=draft)
    plain = target.generate(**kwargs)
    computed = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    torch.testing.assert_close(
        computed, target.compute_transition_scores(plain.sequences, plain.scores, normalize_logits=True)
    )


# ---- caches


@pytest.mark.compat
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("window", [None, 5])
def test_returned_cache_is_that_of_plain_generate(rows, window, draft):
    target = window_model(window)
    kwargs = dict(**prompt(rows), max_new_tokens=14, min_new_tokens=14, do_sample=False, return_dict_in_generate=True)
    plain = target.generate(**kwargs).past_key_values
    ours = attached(target).generate(**kwargs, assistant_model=draft).past_key_values
    assert ours.get_seq_length() == plain.get_seq_length() == 7 + 13
    for mine, theirs in zip(ours.layers, plain.layers):
        assert type(mine) is type(theirs)
        torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values, theirs.values, atol=1e-4, rtol=1e-4)


def window_model(window):
    if window is None:
        return llama(seed=0)
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    settings = llama(seed=0).config.to_dict() | {"sliding_window": window, "head_dim": 8}
    settings = {k: v for k, v in settings.items() if k not in ("model_type", "architectures", "transformers_version")}
    return MistralForCausalLM(MistralConfig(**settings)).eval()


@pytest.mark.compat
@pytest.mark.parametrize(("window", "whole_text"), pairs([None, 5], [True, False]))
def test_a_second_turn_continues_from_the_first_turns_cache(whole_text, window, draft):
    target = window_model(window)
    model, caches, texts = attached(target), [], []
    for speaker, extra in ((target, {}), (model, {"assistant_model": draft, "specbranch": config()})):
        cache = DynamicCache(config=target.config)
        ids = prompt()["input_ids"]
        for _ in range(3):
            asked = ids if whole_text else ids[:, cache.get_seq_length() :]
            out = speaker.generate(
                asked,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=10,
                min_new_tokens=10,
                do_sample=False,
                **extra,
            )
            ids = torch.cat([ids, out[:, asked.shape[1] :], torch.tensor([[5, 6]])], dim=1)
        caches.append(cache)
        texts.append(ids)
    assert torch.equal(texts[0], texts[1])
    assert caches[0].get_seq_length() == caches[1].get_seq_length()


def test_a_static_cache_passed_in_is_filled(target, model, draft):
    inputs = prompt()
    kwargs = dict(**inputs, max_new_tokens=10, min_new_tokens=10, do_sample=False)
    caches = [StaticCache(config=target.config, max_cache_len=64) for _ in range(2)]
    expected = target.generate(**kwargs, past_key_values=caches[0])
    got = model.generate(**kwargs, past_key_values=caches[1], assistant_model=draft)
    assert torch.equal(got, expected)
    follow_up = torch.cat([got, torch.tensor([[9, 9]])], dim=1)
    again = dict(attention_mask=torch.ones_like(follow_up), max_new_tokens=8, do_sample=False)
    assert torch.equal(
        model.generate(follow_up, past_key_values=caches[1], assistant_model=draft, **again),
        target.generate(follow_up, **again),
    )


def test_a_static_cache_may_be_asked_for(target, model, draft):
    expected, got = both(target, model, draft, prompt(2), cache_implementation="static")
    assert torch.equal(got, expected)


def test_a_long_prompt_may_be_read_in_chunks(target, model, draft):
    expected, got = both(target, model, draft, prompt(length=20), prefill_chunk_size=8)
    assert torch.equal(got, expected)


def test_embedded_inputs_are_continued(target, model, draft):
    embedded = {"inputs_embeds": target.get_input_embeddings()(prompt()["input_ids"]).detach()}
    expected, got = both(target, model, draft, embedded)
    assert torch.equal(got, expected)


# ---- modes of the calling thread


@pytest.mark.parametrize("overlap", [False, True])
def test_inference_mode_is_inherited(overlap, target, model, draft):
    ids = torch.cat([prompt()["input_ids"], torch.tensor([[5, 6]])], dim=1)
    outs = []
    with torch.inference_mode():
        for speaker, extra in (
            (target, {}),
            (model, {"assistant_model": draft, "specbranch": config(overlap=overlap)}),
        ):
            cache = DynamicCache(config=target.config)
            speaker(input_ids=ids[:, :5], past_key_values=cache)
            kwargs = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
            outs.append(speaker.generate(ids, past_key_values=cache, **kwargs, **extra))
    assert torch.equal(*outs)


@pytest.mark.parametrize("overlap", [False, True])
def test_autocast_is_inherited(overlap, target, draft, monkeypatch):
    from hf_specbranch.decoding.verifier import Verifier

    seen, verify = [], Verifier.verify

    def observed(self, step, *drafted):
        seen.append(step.logits.dtype)
        return verify(self, step, *drafted)

    monkeypatch.setattr(Verifier, "verify", observed)
    model = attached(target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        settings = config(overlap=overlap)
        model.generate(**prompt(), max_new_tokens=9, do_sample=False, assistant_model=draft, specbranch=settings)
    assert set(seen) == {torch.bfloat16}


# ---- settings


def test_settings_may_live_in_the_models_generation_config(target, draft):
    model = attached(target)
    model.generation_config.specbranch = config("pearl", gamma=3).to_dict()
    model.generate(**prompt(), max_new_tokens=5, do_sample=False, assistant_model=draft)
    assert model.specbranch_stats.policy == "pearl"


def test_settings_may_be_passed_in_a_generation_config(target, model, draft):
    plan = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=EOS, pad_token_id=PAD)
    expected = target.generate(**prompt(), generation_config=plan)
    plan.specbranch = config("vanilla").to_dict()
    got = model.generate(**prompt(), generation_config=plan, assistant_model=draft)
    assert torch.equal(got, expected)
    assert model.specbranch_stats.policy == "vanilla"


def test_settings_survive_saving_the_generation_config(tmp_path):
    plan = GenerationConfig(max_new_tokens=9, specbranch=config("pearl", gamma=3).to_dict())
    plan.save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).specbranch == config("pearl", gamma=3).to_dict()


def test_settings_may_come_from_a_json_file(tmp_path, model, draft):
    config("pearl").to_json_file(tmp_path / "settings.json")
    model.generate(
        **prompt(), max_new_tokens=5, assistant_model=draft, do_sample=False, specbranch=tmp_path / "settings.json"
    )
    assert model.specbranch_stats.policy == "pearl"


def test_num_assistant_tokens_sets_the_draft_length(target, model):
    model.generate(
        **prompt(), max_new_tokens=21, min_new_tokens=21, do_sample=False, assistant_model=target,
        num_assistant_tokens=3, specbranch={"policy": "vanilla", "confidence_threshold": 0.0},
    )  # fmt: skip
    assert model.specbranch_stats.acceptance_histogram == [0, 0, 0, 5]
    once = GenerationConfig(max_new_tokens=21, min_new_tokens=21, do_sample=False, num_assistant_tokens=4)
    settings = {"policy": "vanilla", "confidence_threshold": 0.0}
    model.generate(**prompt(), generation_config=once, assistant_model=target, specbranch=settings)
    assert model.specbranch_stats.acceptance_histogram == [0, 0, 0, 0, 4]


def test_a_generator_decides_the_draws(model, draft):
    def run(seed):
        rng = torch.Generator().manual_seed(seed)
        return model.generate(**prompt(), max_new_tokens=20, do_sample=True, assistant_model=draft, generator=rng)

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


def test_several_samples_of_one_prompt_differ(model, draft):
    out = model.generate(
        **prompt(), max_new_tokens=20, do_sample=True, top_k=0, temperature=2.0, num_return_sequences=4,
        assistant_model=draft,
    )  # fmt: skip
    assert out.shape[0] == 4 and len({tuple(row) for row in out.tolist()}) > 1


def test_greedy_decoding_uses_no_randomness(model, draft):
    inputs = prompt()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    model.generate(**inputs, max_new_tokens=20, do_sample=False, assistant_model=draft)
    assert torch.equal(torch.rand(1), expected)


# ---- pairs


@pytest.mark.parametrize(("drafting", "sizes"), pairs(["greedy", "sample"], [(1000, 1008), (1008, 1000)]))
def test_padded_vocabularies_of_one_tokenizer_work(sizes, drafting):
    target, draft = (llama(seed=0, vocabulary=size) for size in sizes)
    inputs = prompt(2, vocabulary=1000)
    model = attached(target)
    expected, got = both(target, model, draft, inputs)
    assert torch.equal(got, expected)
    settings = config(draft_sampling=drafting)
    sampled = model.generate(**inputs, max_new_tokens=20, do_sample=True, assistant_model=draft, specbranch=settings)
    assert sampled.shape[0] == 2


@pytest.mark.parametrize("dtype", [slowly(torch.bfloat16), torch.float64])
def test_the_draft_may_have_another_dtype(dtype, target, model, draft):
    expected, got = both(target, model, copy.deepcopy(draft).to(dtype), prompt(2))
    assert torch.equal(got, expected)


def test_a_draft_with_a_shorter_context_only_drafts_worse(target, model):
    short = llama(seed=0, max_position_embeddings=16)
    expected, got = both(target, model, short, prompt(), max_new_tokens=60, min_new_tokens=60)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("sample", [False, True])
def test_embeddings_may_be_wider_than_the_config_says(sample):
    target = llama(seed=0, vocabulary=64)
    target.config.vocab_size = 48
    draft = noisy_copy(target, noise=0.1, seed=1)
    model = attached(target)
    arguments = dict(**prompt(2), max_new_tokens=20, do_sample=sample)
    for policy in ("vanilla", "specbranch"):
        torch.manual_seed(0)
        got = model.generate(**arguments, assistant_model=draft, specbranch=config(policy))
        assert sample or torch.equal(got, target.generate(**arguments))


def test_learned_positions_are_used_to_the_last():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    settings = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, eos_token_id=None, bos_token_id=1
    )
    target = GPT2LMHeadModel(settings).eval()
    inputs = prompt(2)
    kwargs = dict(max_new_tokens=None, max_length=32, pad_token_id=PAD)
    expected, got = both(target, attached(target), noisy_copy(target, 0.1, 1), inputs, **kwargs)
    assert torch.equal(got, expected) and got.shape[1] == 32
