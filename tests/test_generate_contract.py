"""An attached model keeps the contract of `generate()`: what transformers accepts works, alone and in nested calls."""

import copy
import logging

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, QuantizedCache, StoppingCriteria, cache_utils

from hf_specbranch import SpecBranchConfig, specbranch

from .models import config, llama, noisy_copy, pairs, prompt, slowly

pytestmark = pytest.mark.compat
GREEDY = {"max_new_tokens": 14, "do_sample": False}
SAMPLED = {"max_new_tokens": 14, "do_sample": True, "top_k": 0}


@pytest.fixture
def model(target, draft):
    """Remembers its draft."""
    return specbranch(copy.deepcopy(target), draft=draft)


def warnings_of(caplog):
    return [record.message for record in caplog.records if record.name.startswith("hf_specbranch")]


# ---- stopping criteria that return a bool


class StopAt(StoppingCriteria):
    def __init__(self, length, answer=bool):
        self.length, self.answer = length, answer

    def __call__(self, input_ids, scores, **kwargs):
        return self.answer(input_ids.shape[1] >= self.length)


@pytest.mark.parametrize(("answer", "rows"), pairs([bool, lambda ends: torch.tensor([ends]), torch.tensor], [1, 3]))
def test_a_criterion_may_return_one_answer_for_all_rows(rows, answer, target, model):
    kwargs = {**prompt(rows), **GREEDY, "stopping_criteria": [StopAt(12, answer)]}
    got = model.generate(**kwargs, specbranch={"policy": "vanilla"})
    assert torch.equal(got, target.generate(**kwargs)) and got.shape[1] == 12
    assert model.specbranch_stats.num_draft_tokens > 0


# ---- an attached model as transformers' own assistant


@pytest.mark.parametrize("remembers", [True, False])
def test_an_attached_model_may_assist_another(remembers, target, draft, stranger):
    assistant = specbranch(copy.deepcopy(draft), draft=stranger if remembers else None)
    got = target.generate(**prompt(), **GREEDY, assistant_model=assistant)
    assert torch.equal(got, target.generate(**prompt(), **GREEDY))


def test_attached_model_may_assist_itself(target, model):
    got = model.generate(**prompt(), **GREEDY, assistant_model=model, specbranch=False)
    assert torch.equal(got, target.generate(**prompt(), **GREEDY)) and model.specbranch_stats is None


# ---- nested calls


class Nested(LogitsProcessor):
    """Calls `generate()` of another model, or of the same, at every token."""

    def __init__(self, call):
        self.call, self.outputs = call, []

    def __call__(self, input_ids, scores):
        self.outputs.append(self.call())
        return scores


class NestedCriterion(Nested, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.outputs.append(self.call())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


NESTED = {
    "plain": {"specbranch": False},
    "plain with an assistant": {"specbranch": False, "assistant": True},
    "no draft": {},
    "with an assistant": {"assistant": True},
    "with settings": {"assistant": True, "specbranch": SpecBranchConfig(policy="vanilla", max_draft_length=2)},
    "beams": {"num_beams": 3},
}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "inside"),
    [
        *pairs(["plain", "plain with an assistant", "beams", "with an assistant"], ["processor", "criterion"]),
        *(slowly(name, inside) for name in ("no draft", "with settings") for inside in ("processor", "criterion")),
    ],
)
def test_nested_calls_know_nothing_of_the_outer_call(name, inside, target, model, draft, stranger):
    other, asked = specbranch(copy.deepcopy(stranger)), dict(NESTED[name])
    policies = {"no draft": "autoregressive", "with an assistant": "auto", "with settings": "vanilla"}
    inner = {**prompt(seed=3), "max_new_tokens": 4, "do_sample": False}
    expected = stranger.generate(**inner, num_beams=asked.get("num_beams", 1))
    if asked.pop("assistant", False):
        asked["assistant_model"] = draft
    seen = []

    def call():
        out = other.generate(**inner, **asked)
        seen.append(other.specbranch_stats and other.specbranch_stats.policy)
        return out

    kind, argument = (Nested, "logits_processor") if inside == "processor" else (NestedCriterion, "stopping_criteria")
    nested = kind(call)
    got = model.generate(**prompt(), **GREEDY, **{argument: [nested]}, specbranch=config("specbranch"))
    assert torch.equal(got, target.generate(**prompt(), **GREEDY))
    assert nested.outputs and all(torch.equal(out, expected) for out in nested.outputs)
    assert set(seen) == {policies.get(name)}
    assert model.specbranch_stats.policy == "specbranch"


@pytest.mark.matrix
def test_a_model_may_be_called_within_its_own_generation(target, model):
    inner = {**prompt(seed=3), "max_new_tokens": 4, "do_sample": False}
    nested = Nested(lambda: model.generate(**inner))
    got = model.generate(**prompt(), **GREEDY, logits_processor=[nested], specbranch=config("vanilla"))
    assert torch.equal(got, target.generate(**prompt(), **GREEDY))
    assert all(torch.equal(out, target.generate(**inner)) for out in nested.outputs)
    assert model.specbranch_stats.policy == "vanilla"
    model.generate(**prompt(), **GREEDY, logits_processor=[nested], specbranch=False)
    assert model.specbranch_stats is None


# ---- settings of transformers' assisted decoding


@pytest.mark.parametrize(("where", "length"), pairs(["argument", "passed", "target", "draft"], [3, 20]))
def test_num_assistant_tokens_is_honoured(where, length, model, target):
    draft, asked = copy.deepcopy(target), {}  # always right
    if where == "argument":
        asked = {"num_assistant_tokens": length}
    elif where == "passed":
        asked = {"generation_config": GenerationConfig(num_assistant_tokens=length)}
    else:
        {"target": model, "draft": draft}[where].generation_config.num_assistant_tokens = length
    settings = {"policy": "vanilla", "confidence_threshold": 0.0}
    model.generate(
        **prompt(), max_new_tokens=60, assistant_model=draft, specbranch=settings, eos_token_id=None, **asked
    )
    assert len(model.specbranch_stats.acceptance_histogram) <= length + 1
    drafted = model.specbranch_stats.num_draft_tokens / model.specbranch_stats.num_drafts
    assert drafted > 0.75 * length


@pytest.mark.matrix
@pytest.mark.parametrize("where", ["argument", *map(slowly, ("passed", "target")), "draft"])
def test_assistant_confidence_threshold_is_honoured(where, model, draft):
    draft, drafted = copy.deepcopy(draft), []
    for threshold in (0.0, 0.4, 0.99):
        asked = {}
        if where == "argument":
            asked = {"assistant_confidence_threshold": threshold}
        elif where == "passed":
            asked = {"generation_config": GenerationConfig(assistant_confidence_threshold=threshold)}
        else:
            {"target": model, "draft": draft}[where].generation_config.assistant_confidence_threshold = threshold
        model.generate(
            **prompt(), max_new_tokens=30, assistant_model=draft, specbranch={"policy": "vanilla"}, **asked
        )  # fmt: skip
        stats = model.specbranch_stats
        drafted.append(stats.num_draft_tokens / max(1, stats.num_drafts))
    assert drafted[0] > 1.2 * drafted[1] > 1.2 * 1.2 * drafted[2]


def test_settings_of_our_own_win_over_those_of_transformers(model):
    asked = {"num_assistant_tokens": 2, "assistant_confidence_threshold": 0.99}
    settings = config("vanilla", gamma=6, epsilon=0.0)
    model.generate(**prompt(), max_new_tokens=40, specbranch=settings, eos_token_id=None, **asked)
    assert model.specbranch_stats.num_draft_tokens / model.specbranch_stats.num_drafts > 4


LOOKUP, EARLY_EXIT = {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}


@pytest.mark.parametrize(("source", "where"), [(LOOKUP, "argument"), (LOOKUP, "target"), (EARLY_EXIT, "argument")])
def test_other_candidate_sources_win_over_the_attached_draft(source, where, target, draft):
    calls, draft = [], copy.deepcopy(draft)
    draft.register_forward_pre_hook(lambda *_: calls.append(1))
    model = specbranch(copy.deepcopy(target), draft=draft)
    expected = target.generate(**prompt(), **GREEDY)
    named = source if where == "argument" else {}
    if where == "target":
        model.generation_config.update(**source)
    assert torch.equal(model.generate(**prompt(), **GREEDY, **named), expected)
    assert not calls and (model.specbranch_stats is None) == (source == EARLY_EXIT)


# ---- randomness and statistics under transformers' own decoding


@pytest.mark.parametrize("asked", [{"specbranch": False}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_a_generator_seeds_transformers_own_decoding(asked, model):
    def sampled(seed):
        torch.manual_seed(torch.seed())  # the global generator stands anywhere
        generator = torch.Generator().manual_seed(seed)
        return [model.generate(**prompt(), **SAMPLED, **asked, generator=generator).tolist() for _ in range(2)]

    assert sampled(1) == sampled(1) != sampled(2)
    first, second = sampled(1)
    assert first != second


def test_a_generator_leaves_the_global_one_alone(model):
    inputs = prompt()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    model.generate(**inputs, **SAMPLED, specbranch=False, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("asked", [{"specbranch": False}, {"num_beams": 2}, EARLY_EXIT], ids=str)
def test_statistics_belong_to_the_last_call(asked, model):
    model.generate(**prompt(), **GREEDY)
    assert model.specbranch_stats is not None
    model.generate(**prompt(), **GREEDY, **asked)
    assert model.specbranch_stats is None


# ---- what falls back to transformers' own decoding

MODES = {
    "beams": ({"num_beams": 4}, "not beam search"),
    "beam sampling": ({"num_beams": 3, "do_sample": True}, "not beam sample"),
    "no cache": ({"use_cache": False}, "needs the cache"),
}


@pytest.mark.parametrize(("name", "where"), pairs(MODES, ["argument", "passed", "target"]))
def test_unsupported_calls_fall_back_with_one_warning(name, where, target, model, caplog):
    asked, reason = MODES[name]
    kwargs = {**GREEDY, **asked}
    if where == "passed":
        kwargs = {"generation_config": GenerationConfig(**kwargs)}
    elif where == "target":
        model.generation_config.update(**kwargs)
        target = copy.deepcopy(target)
        target.generation_config.update(**kwargs)
        kwargs = {}
    with caplog.at_level(logging.WARNING):
        for seed in (1, 2):
            torch.manual_seed(seed)
            got = model.generate(**prompt(2), **kwargs)
            torch.manual_seed(seed)
            assert torch.equal(got, target.generate(**prompt(2), **kwargs))
    assert len(warnings_of(caplog)) == 1
    assert "falls back to transformers' own decoding: SpecBranch" in warnings_of(caplog)[0]
    assert reason in warnings_of(caplog)[0] and model.specbranch_stats is None


def test_models_that_must_stay_in_step_fall_back(target, model, caplog):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        got = model.generate(**prompt(2), **GREEDY, synced_gpus=True)
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(got, target.generate(**prompt(2), **GREEDY))
    assert len(warnings_of(caplog)) == 1 and "ZeRO-3 or FSDP" in warnings_of(caplog)[0]


def test_each_reason_and_each_model_has_its_own_warning(target, draft, caplog):
    models = [specbranch(copy.deepcopy(target), draft=draft) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        for model in models:
            for asked in ({"num_beams": 2}, {"use_cache": False}) * 2:
                model.generate(**prompt(), **GREEDY, **asked)
    assert len(warnings_of(caplog)) == 4


@pytest.mark.parametrize("explicit", ["settings", "true", "assistant"])
def test_explicit_settings_fall_back_too(explicit, target, model, draft, caplog):
    asked = {
        "settings": {"specbranch": config()},
        "true": {"specbranch": True},
        "assistant": {"assistant_model": draft},
    }
    got = model.generate(**prompt(2), **GREEDY, num_beams=3, **asked[explicit])
    assert torch.equal(got, target.generate(**prompt(2), **GREEDY, num_beams=3))
    assert len(warnings_of(caplog)) == 1


def test_assistant_is_refused_where_transformers_refuses_it(model, draft):
    with pytest.raises(ValueError, match="needs the cache.*refuses it too: leave out use_cache=False"):
        model.generate(**prompt(), **GREEDY, use_cache=False, assistant_model=draft)


@pytest.mark.parametrize(
    "asked",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 4, "force_words_ids": [[5]]},
    ],
    ids=["contrastive", "dola", "group beams", "constrained"],
)
def test_modes_on_the_hub_are_left_to_transformers(asked, model, caplog):
    with pytest.raises(ValueError, match="requires `trust_remote_code=True`"):
        model.generate(**prompt(), **GREEDY, **asked)
    assert len(warnings_of(caplog)) == 1


def test_callable_custom_generate_is_left_to_transformers(target, model):
    def first_token(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        return input_ids[:, :1]

    assert model.generate(**prompt(), **GREEDY, custom_generate=first_token).shape == (1, 1)


# ---- training and caches


@pytest.mark.parametrize(("role", "rows"), pairs(["target", "draft", "both"], [1, 2]))
def test_gradient_checkpointing_falls_back(rows, role, target, draft, caplog):
    plain, draft = copy.deepcopy(target), copy.deepcopy(draft)
    for model in {"target": [plain], "draft": [draft], "both": [plain, draft]}[role]:
        new = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23 on
        (new or model.gradient_checkpointing_enable)()
        model.train()
    expected = plain.generate(**prompt(rows), **GREEDY)
    model = specbranch(copy.deepcopy(plain), draft=draft)
    assert torch.equal(model.generate(**prompt(rows), **GREEDY), expected)
    assert "gradient checkpointing" in " ".join(warnings_of(caplog))
    for each in (model, draft):
        each.eval()
    assert torch.equal(model.generate(**prompt(rows), **GREEDY), target.generate(**prompt(rows), **GREEDY))
    assert model.specbranch_stats.num_draft_tokens > 0


class RoundedLayer(cache_utils.QuantizedLayer):
    """Quantized layers need packages that may be missing; this one rounds coarsely."""

    def _quantize(self, tensor, axis):
        return tensor.round()

    def _dequantize(self, quantized):
        return quantized


class RoundedCache(QuantizedCache):
    def __init__(self, layers=2):
        cache_utils.Cache.__init__(self, layers=[RoundedLayer(residual_length=4) for _ in range(layers)])


def test_quantized_cache_over_several_turns(caplog):
    target = llama(seed=0, eos=None)
    model = specbranch(copy.deepcopy(target), draft=noisy_copy(target, 0.1, 1))
    texts = []
    for speaker in (target, model):
        cache, ids = RoundedCache(), prompt()["input_ids"]
        for _ in range(3):
            out = speaker.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=16, do_sample=False
            )
            ids = torch.cat([out, torch.tensor([[5, 6]])], dim=1)
        texts.append(ids)
    assert torch.equal(*texts)
    exact = target.generate(**prompt(), max_new_tokens=16, do_sample=False)
    assert not torch.equal(texts[0][:, : exact.shape[1]], exact)  # rounding is seen in the text
    assert len(warnings_of(caplog)) == 1 and "RoundedLayer" in warnings_of(caplog)[0]


def test_returned_quantized_cache_is_accepted(target, model, caplog):
    if not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this transformers has no cache quantized to float8")
    asked = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}, "return_dict_in_generate": True}
    texts = []
    for speaker in (target, model):
        first = speaker.generate(**prompt(), **GREEDY, **asked)
        ids = torch.cat([first.sequences, torch.tensor([[5, 6]])], dim=1)
        cache = first.past_key_values
        texts.append(speaker.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY))
    assert torch.equal(*texts) and len(warnings_of(caplog)) == 2  # one for each reason


class DoublingCache(DynamicCache):
    """Stores something else than it is given."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return super().update(key_states, 2 * value_states, layer_idx, *args, **kwargs)


def test_custom_cache_is_left_to_transformers(target, model):
    texts = [
        speaker.generate(**prompt(), **GREEDY, past_key_values=DoublingCache(config=target.config))
        for speaker in (target, model)
    ]
    assert torch.equal(*texts) and not torch.equal(texts[0], target.generate(**prompt(), **GREEDY))
