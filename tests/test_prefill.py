"""Where stages are captured, a replay prefills short prompts. The output stays the same."""

import copy

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_specbranch import SpecBranchConfig, specbranch
from hf_specbranch.decoding import assembly as assembly_module
from hf_specbranch.decoding import target as target_module
from hf_specbranch.decoding.assembly import Assembly
from hf_specbranch.decoding.target import Target
from hf_specbranch.model_state import state_of
from hf_specbranch.runtime import prefill
from hf_specbranch.runtime.cuda_graph import MOST_QUERIES
from hf_specbranch.runtime.eager import EagerRunner, round_up
from hf_specbranch.runtime.mask_probe import mask_maker_for
from hf_specbranch.runtime.selection import SPARE_SLOTS

from . import sampling
from .models import EOS, PAD, VOCABULARY, attached, config, llama, noisy_copy, pairs, slowly
from .sampling import SMALLEST_P, draw, exact_distribution, p_value, sampling_pair

ROOM = 640  # positions of the models here


@pytest.fixture
def static_stages(static_stages, monkeypatch):
    """Static stages, and as much room in the KV cache as where they are captured."""
    reserve = EagerRunner.reserve
    monkeypatch.setattr(EagerRunner, "reserve", lambda self, rows, slots: reserve(self, rows, round_up(slots)))


@pytest.fixture
def read(monkeypatch, static_stages):
    """The lengths of prompts that a target has prefilled through a captured pass, in order, with shorter steps."""
    monkeypatch.setattr(prefill, "STEP", 64)
    monkeypatch.setattr(prefill, "MOST", 512)
    lengths, original = [], target_module.prefill

    def observer(runner, tokens, *more):
        lengths.append(tokens.shape[1])
        return original(runner, tokens, *more)

    monkeypatch.setattr(target_module, "prefill", observer)
    return lengths


@pytest.fixture(scope="module")
def pair():
    target = llama(seed=0, max_position_embeddings=ROOM)
    return target, noisy_copy(target, noise=0.25, seed=1)


def tokens(length, rows=1):
    torch.manual_seed(length)
    return torch.randint(3, VOCABULARY, (rows, length))


def run(ids, **more):
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, **more}


def sharpened(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.eval()


def test_sizes_allow_capture():
    assert prefill.MOST <= MOST_QUERIES and prefill.MOST % prefill.STEP == 0 and prefill.STEP <= SPARE_SLOTS


@pytest.mark.parametrize(
    ("rows", "length", "captured"),
    [(1, 2400, {512, 1024}), (2, 300, {512}), (2, 4581, set()), (8, 65, {128}), (8, 300, set()), (16, 60, {64})],
)
def test_prompts_of_any_length_need_few_captured_sizes(rows, length, captured):
    """The end of a long text is not captured in a size of its own."""
    sizes = {size for size, _ in prefill.passes(rows, length, takes_spans=True)}
    assert sizes & set(prefill.captured_sizes(rows, takes_spans=True)) == captured
    assert sum(count for _, count in prefill.passes(rows, length, takes_spans=True)) == length


LIMITS = [(1, 512), (3, 128), (9, 32)]


@pytest.mark.parametrize(
    ("length", "limit"),
    [
        *pairs([1, 64, 65, 513], LIMITS),
        *(slowly(length, limit) for length in (2, 63, 130, 512) for limit in LIMITS),
    ],
)
def test_greedy_output_equals_plain_generate(length, limit, read, pair):
    """Only short prompts take the captured path. The limit counts all rows."""
    rows, most = limit
    target, draft = pair
    kwargs = run(tokens(length, rows))
    model = attached(target)
    settings = config(gamma=3, max_rejection_branches=2, tree_leaves=2)
    assert torch.equal(model.generate(**kwargs, assistant_model=draft, specbranch=settings), target.generate(**kwargs))
    assert not model.specbranch_stats.slowed_by
    assert read == ([length] if length <= most else [])


@pytest.mark.parametrize("policy", [*map(slowly, ("autoregressive", "vanilla", "pearl")), "specbranch"])
def test_every_policy_continues_after_captured_prefill(policy, read, pair):
    target, draft = pair
    kwargs = run(tokens(70, rows=2), max_new_tokens=40, eos_token_id=[EOS, *range(10, 14)])
    out = attached(target).generate(**kwargs, assistant_model=draft, specbranch=config(policy, tree_leaves=3))
    assert torch.equal(out, target.generate(**kwargs)) and read == [70]


@pytest.mark.parametrize("length", [slowly(3), 100])
def test_keys_and_values_equal_ordinary_prefill(length, read, pair):
    target, draft = pair
    kwargs = run(tokens(length, rows=2), return_dict_in_generate=True, min_new_tokens=12)
    ours = attached(target).generate(**kwargs, assistant_model=draft, specbranch=config(gamma=2, tree_leaves=2))
    theirs = target.generate(**kwargs)
    assert torch.equal(ours.sequences, theirs.sequences) and read == [length]
    for mine, other in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.values, other.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [*map(slowly, (5, 130)), 65])
def test_sliding_window(length, read):
    torch.manual_seed(0)
    settings = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=20, max_position_embeddings=ROOM, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    target = sharpened(MistralForCausalLM(MistralConfig(**settings)))
    kwargs = run(tokens(length), max_new_tokens=40)
    out = attached(target).generate(**kwargs, assistant_model=noisy_copy(target, 0.1, 1), specbranch=config())
    assert torch.equal(out, target.generate(**kwargs)) and read == [length]


@pytest.mark.parametrize(("length", "most"), [(65, 35), (98, 2), (70, 400)])
def test_padding_stays_within_learned_positions(length, most, read):
    """Also if `max_new_tokens` exceeds the positions: the text may end earlier, and here it does."""
    torch.manual_seed(0)
    settings = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=100)
    target = sharpened(GPT2LMHeadModel(GPT2Config(**settings, eos_token_id=EOS, bos_token_id=1, pad_token_id=PAD)))
    kwargs = run(tokens(length), max_new_tokens=most)
    if most > 100:
        kwargs["eos_token_id"] = int(target.generate(**{**kwargs, "max_new_tokens": 3})[0, -1])
    out = attached(target).generate(**kwargs, assistant_model=noisy_copy(target, 0.1, 1), specbranch=config())
    assert torch.equal(out, target.generate(**kwargs)) and out.shape[1] <= 100 and read == [length]


class AllLogits(LlamaForCausalLM):
    """Returns logits after every token, and has no `logits_to_keep`."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, AllLogits])
def test_only_last_logits_are_computed(kind, read, pair, monkeypatch):
    target, draft = (copy.deepcopy(model) for model in pair)
    target.__class__ = draft.__class__ = kind
    shapes, forward = [], EagerRunner.forward

    def observer(self, tokens, *args, **kwargs):
        step = forward(self, tokens, *args, **kwargs)
        if tokens.shape[1] == 128:
            shapes.append(step.logits.shape)
        return step

    monkeypatch.setattr(EagerRunner, "forward", observer)
    kwargs = run(tokens(100))
    out = attached(target).generate(**kwargs, assistant_model=draft, specbranch=config("vanilla"))
    assert torch.equal(out, pair[0].generate(**kwargs)) and read == [100]
    assert shapes == [(1, 1 if kind is LlamaForCausalLM else 128, VOCABULARY)] * 2


@pytest.mark.parametrize(("length", "last"), [(1, 1), (40, 3), (64, 64), (65, 2), (150, 87)])
def test_reading_in_spare_slots_keeps_the_cache(length, last, read, pair, monkeypatch):
    _, draft = pair
    text = tokens(200)
    runner = EagerRunner(draft, mask_maker_for(draft, "draft"))
    first = torch.zeros((1, 1), dtype=torch.long)
    prefill.prefill(runner, text, torch.arange(200)[None], first)  # padding has no positions of its own
    runner.reserve(1, 512)
    before = [layer.keys[:, :, :200].clone() for layer in runner.cache.layers]
    other, needed = tokens(length), prefill.spare_slots(1, length)
    assert [prefill.can_read_in_spare_slots(runner, 1, length, 512 - needed + more) for more in (0, 1)] == [True, False]
    with torch.no_grad():
        found, expected = prefill.read_in_spare_slots(runner, other, 1, last), draft(other).logits[:, -last:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(prefill, "MOST_SPARE", 3 * needed)
    assert [prefill.can_read_in_spare_slots(runner, rows, length, 0) for rows in (3, 4)] == [True, False]
    assert all(torch.equal(layer.keys[:, :, :200], keys) for layer, keys in zip(runner.cache.layers, before))


def test_planner_reads_in_spare_slots(pair, static_stages, monkeypatch):
    """The planner finds the same agreement there as with an ordinary pass of the draft."""
    target, draft = pair
    reserve = EagerRunner.reserve
    monkeypatch.setattr(EagerRunner, "reserve", lambda self, rows, slots: reserve(self, rows, max(slots, 2048)))
    monkeypatch.setitem(assembly_module.CONTEXT, False, assembly_module.CONTEXT[True])
    found, agreements = [], Assembly.agreements

    def observer(self, text):
        found.extend(agreements(self, text))
        self.static_shapes = False
        assert agreements(self, text)[0].rank == found[-1].rank
        self.static_shapes = True
        return found[-1:]

    monkeypatch.setattr(Assembly, "agreements", observer)
    texts = []
    monkeypatch.setattr(
        assembly_module,
        "read_in_spare_slots",
        lambda runner, text, rows, last: (texts.append(text), prefill.read_in_spare_slots(runner, text, rows, last))[1],
    )
    kwargs = run(tokens(300), max_new_tokens=200, eos_token_id=None)  # longer than one pass
    out = attached(target).generate(**kwargs, assistant_model=draft, specbranch=SpecBranchConfig())
    assert torch.equal(out, target.generate(**kwargs)) and len(found) == len(texts) > 0


def test_planner_reads_less_of_a_text_of_many_rows(pair, static_stages, monkeypatch):
    """In captured passes, for which there are not more slots; the whole context would be read kernel by kernel."""
    target, draft = pair
    reserve, read, texts = EagerRunner.reserve, prefill.read_in_spare_slots, []
    monkeypatch.setattr(EagerRunner, "reserve", lambda self, rows, slots: reserve(self, rows, max(slots, 2048)))

    def noted(runner, text, rows, last):
        texts.append(text.shape[1])
        return read(runner, text, rows, last)

    monkeypatch.setattr(assembly_module, "read_in_spare_slots", noted)
    monkeypatch.setattr(assembly_module, "read_agreement", lambda *given: pytest.fail("it was read uncaptured"))
    kwargs = run(tokens(600).repeat(12, 1), max_new_tokens=40, eos_token_id=None)
    attached(target).generate(**kwargs, assistant_model=draft, specbranch=SpecBranchConfig())
    assert set(texts) == {256}


@pytest.mark.slow
def test_samples_follow_the_targets_distribution(read, monkeypatch):
    monkeypatch.setattr(prefill, "MOST", 64 * sampling.ROWS)
    model, _ = sampling_pair()
    settings = config(gamma=2, k=3, epsilon=0.2, draft_sampling="sample", max_rejection_branches=3, tree_leaves=3)
    assert p_value(draw(settings, samples=3_000), exact_distribution(model)) > SMALLEST_P
    assert read == [sampling.PROMPT.shape[1]] * 3


@pytest.mark.parametrize("whole", [slowly(True), False])
def test_chat_continues_from_cache(whole, read, pair):
    """The first turn takes the captured path. Later turns start after the cached text, passed again or not."""
    target, draft = pair
    texts = []
    for speaker, extra in ((target, {}), (attached(target), {"assistant_model": draft, "specbranch": config()})):
        cache, text = DynamicCache(config=target.config), tokens(70)
        ids = text
        for turn in range(3):
            kwargs = run(ids, attention_mask=torch.ones_like(text), past_key_values=cache, min_new_tokens=12)
            answer = speaker.generate(**kwargs, **extra)[:, ids.shape[1] :]
            text = torch.cat([text, answer, tokens(5 + turn)], dim=1)
            ids = text if whole else text[:, cache.get_seq_length() :]
        texts.append(text)
    assert torch.equal(*texts) and read == [70]


def embedded(target, ids):
    return {"input_ids": ids[:, :0], "inputs_embeds": target.get_input_embeddings()(ids)}


def embedded_with_tokens(target, ids):
    return {"inputs_embeds": target.get_input_embeddings()(ids.flip(1))}


def padded(target, ids):
    return {"attention_mask": torch.ones_like(ids).index_fill_(1, torch.arange(3), 0)}


def hidden_in_part(target, ids):
    return {**padded(target, ids), "position_ids": torch.arange(ids.shape[1])[None]}


def shifted(target, ids):
    return {"position_ids": torch.arange(ids.shape[1])[None] + 4}


def stretched(target, ids):
    positions = torch.arange(ids.shape[1])[None].clone()
    positions[:, :20] = 0
    return {"position_ids": positions}


SPECIAL = (embedded, embedded_with_tokens, padded, hidden_in_part, shifted, stretched)


@pytest.mark.parametrize(
    "special",
    [slowly(each) if each in (embedded_with_tokens, hidden_in_part, stretched) else each for each in SPECIAL],
    ids=lambda special: special.__name__,
)
def test_special_prompts_take_the_ordinary_path(special, read, pair):
    target, draft = pair
    ids = tokens(70)
    kwargs = run(ids) | special(target, ids)
    out = attached(target).generate(**kwargs, assistant_model=draft, specbranch=config())
    assert torch.equal(out, target.generate(**kwargs)) and not read


class FlipsPrompts(LlamaForCausalLM):
    """Changes a prompt before it is read."""

    def prepare_inputs_for_generation(self, input_ids, *args, is_first_iteration=False, **kwargs):
        inputs = super().prepare_inputs_for_generation(
            input_ids, *args, is_first_iteration=is_first_iteration, **kwargs
        )
        if is_first_iteration:
            inputs["input_ids"] = inputs["input_ids"].flip(1)
        return inputs


def test_custom_prompt_preparation_is_kept(read, pair):
    target, draft = copy.deepcopy(pair[0]), pair[1]
    target.__class__ = FlipsPrompts
    kwargs = run(tokens(70))
    out = attached(target).generate(**kwargs, assistant_model=draft, specbranch=config())
    assert torch.equal(out, target.generate(**kwargs)) and not read


@pytest.mark.parametrize("policy", ["autoregressive", "vanilla"])
@pytest.mark.gpu
def test_prefill_is_one_replay(policy, pair, monkeypatch):
    target, draft = (copy.deepcopy(model).to("cuda") for model in pair)
    model, replays = specbranch(copy.deepcopy(target)), []
    replay, read_prompt = torch.cuda.CUDAGraph.replay, Target._read_prompt

    def count(graph):
        replays.append(1)
        replay(graph)

    def counting_reading(self):
        replays.clear()
        step = read_prompt(self)
        counts.append(len(replays))
        return step

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count)
    monkeypatch.setattr(Target, "_read_prompt", counting_reading)
    for kernels in (False, True):
        counts = []
        for length in (100, 100, 300, 590, 30):
            kwargs = {**run(tokens(length).to("cuda")), "max_new_tokens": 40}
            settings = config(policy, runtime="graph", kernels=kernels)
            got = model.generate(**kwargs, assistant_model=draft, specbranch=settings)
            assert torch.equal(got, target.generate(**kwargs)) and not model.specbranch_stats.slowed_by
        graphs = 2 if kernels else 1  # see `layers.base.split_graph`
        assert counts == [graphs] * 5


def test_planner_records_with_the_prompt(static_stages):
    """A copy of the target agrees with every token; without the prompt of 300 tokens it would not."""
    target = llama(seed=0, max_position_embeddings=1024)
    model, draft = attached(target), copy.deepcopy(target)
    model.generate(**run(tokens(300), max_new_tokens=80, eos_token_id=None), assistant_model=draft)
    (known,) = state_of(model).pairs[draft].values()
    assert known.texts.all() and all(text.rate == 1.0 for text in known.texts.all())
