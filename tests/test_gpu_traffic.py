"""On a GPU: texts of all lengths, chats and batch sizes run on stages captured once, with the right tokens."""

import copy
import gc
import math
import random
import threading

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from hf_specbranch import specbranch
from hf_specbranch.decoding import loop, row_padding
from hf_specbranch.model_state import state_of
from hf_specbranch.runtime import idle_runners, prefix_reuse

from .graphs import CHANGES, Comparison, tokens
from .models import EOS, PAD, VOCABULARY, assert_counts_add_up, config, llama, noisy_copy

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
ROOM = 8192  # positions of the models here
LENGTHS = (10, 300, 700, 1500, 3000)
SPANS, MASKS = {"kernels": True}, {"kernels": "auto"}  # in float32, the latter leaves attention to sdpa


@pytest.fixture(autouse=True)
def no_idle_runners():
    idle_runners.free_all(GPU)


def pair(target=None):
    target = (llama(seed=0, max_position_embeddings=ROOM) if target is None else target).to(GPU)
    return target, noisy_copy(target, noise=0.1, seed=1)


def make(target=None, new_tokens=40, policy="vanilla", **settings):
    settings = {"runtime": "graph", "policy": policy, **settings}
    return Comparison(*pair(target), new_tokens, **settings)


def text(length, seed=0, rows=1):
    return tokens(length, seed, rows, GPU)


def layers(model):
    return [layer for runner in state_of(model).idle_runners for layer in runner.cache.layers]


# ---- lengths


@pytest.mark.parametrize("policy", ["autoregressive", "vanilla", "pearl", "specbranch"])
def test_every_length_runs_on_the_same_stages(policy):
    compare = make(policy=policy, tree_leaves=3 if policy in ("vanilla", "specbranch") else 0, **SPANS)
    for length in (200, 500, 1000):  # the three sizes of prefill passes, and no common prefix
        compare(text(length, seed=length))
    for length in (*LENGTHS, *reversed(LENGTHS)):
        compare(text(length))
        assert compare.stats.graphs_captured == 0 and compare.stats.capture_seconds == 0, length
        assert compare.stats.runtime == "graph" and not compare.stats.slowed_by


def test_every_length_under_masks():
    """The path through sdpa keeps stages of few sizes: the second time, nothing is captured."""
    compare = make(**MASKS)
    for turn in range(2):
        for length in LENGTHS:
            compare(text(length))
            assert turn == 0 or compare.stats.graphs_captured == 0, length


@pytest.mark.parametrize("settings", [SPANS, MASKS], ids=["spans", "masks"])
def test_chat_that_is_passed_whole(settings):
    compare = make(**settings)
    for length in (200, 500, 1000):  # the three sizes of prefill passes, and no common prefix
        compare(text(length, seed=length))
    chat = text(200)
    for turn in range(8):
        chat = torch.cat([compare(chat), text(150 + 37 * turn, seed=turn)], dim=1)
        if turn > 1 and settings is SPANS:
            assert compare.stats.graphs_captured == 0, turn
    assert chat.shape[1] > 2000


@pytest.mark.parametrize("settings", [SPANS, MASKS], ids=["spans", "masks"])
def test_chat_with_a_cache(settings):
    """Each turn starts after what is cached, which is another length each time."""
    target, draft = pair()
    model, texts = specbranch(copy.deepcopy(target)), []
    own = {"assistant_model": draft, "specbranch": config("vanilla", runtime="graph", **settings)}
    for speaker, extra in ((target, {}), (model, own)):
        cache, ids = DynamicCache(config=target.config), text(200)
        for turn in range(6):
            ids = speaker.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=30, min_new_tokens=30,
                do_sample=False, **extra,
            )  # fmt: skip
            if extra and turn > 1 and settings is SPANS:
                assert model.specbranch_stats.graphs_captured == 0, turn
            ids = torch.cat([ids, text(100 + 29 * turn, seed=turn)], dim=1)
        texts.append(ids)
    assert torch.equal(*texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cache_keeps_its_address(dtype):
    target, draft = (model.to(dtype) for model in pair())
    model, addresses = specbranch(target), set()
    settings = config("vanilla", runtime="graph", kernels=True)
    for length in (10, 1100, 3000, 6000, 7900, 20):
        ids = text(length)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=100, do_sample=False, assistant_model=draft,
            specbranch=settings,
        )  # fmt: skip
        addresses.add(tuple(layer.keys.data_ptr() for each in (model, draft) for layer in layers(each)))
    assert len(addresses) == 1


SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=ROOM, eos_token_id=EOS, pad_token_id=PAD, head_dim=16,
    sliding_window=300,
)  # fmt: skip


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", [MistralForCausalLM, Gemma2ForCausalLM])
def test_text_beyond_a_sliding_window(kind, rows):
    torch.manual_seed(0)
    target = kind({MistralForCausalLM: MistralConfig, Gemma2ForCausalLM: Gemma2Config}[kind](**SIZES)).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(2.0)
    compare = make(target, policy="specbranch", tree_leaves=3, **SPANS)
    for length in (10, 290, 700, 1500):
        compare(text(length, rows=rows))
        assert all(runner.takes_spans for runner in state_of(compare.model).idle_runners)


@pytest.mark.parametrize("rows", [1, 3])
def test_padding_that_spans_cannot_say(rows):
    """Calls under masks and calls with spans keep their stages side by side."""
    compare = make(**SPANS)
    for length in (200, 500):  # sizes of prefill passes; where the draft has read the prompt, it needs a short one
        compare(text(length, seed=length, rows=rows))
    ids = text(400, rows=rows)
    left, right, middle = (torch.ones_like(ids) for _ in range(3))
    for row in range(rows):
        left[row, : 5 * row], right[row, 399 - 3 * row :], middle[row, 40 : 60 + row] = 0, 0, 0
    for turn in range(2):
        for mask in (left, right, middle, torch.ones_like(ids)):
            compare(ids, attention_mask=mask)
            assert turn == 0 or compare.stats.graphs_captured == 0


# ---- batch sizes and memory


def test_batch_sizes_are_captured_once():
    compare, captured = make(**SPANS), []
    for rows in (1, 2, 5, 2, 1, 5):
        compare(text(100, rows=rows))
        captured.append(compare.stats.graphs_captured > 0)
    assert captured == [True] * 3 + [False] * 3


@pytest.mark.parametrize("settings", [SPANS, MASKS], ids=["spans", "masks"])
@pytest.mark.parametrize(
    ("policy", "leaves"), [("autoregressive", 0), ("vanilla", 0), ("vanilla", 3), ("pearl", 0), ("specbranch", 3)]
)
def test_smaller_batches_run_on_the_stages_of_a_larger_one(policy, leaves, settings, monkeypatch):
    """Rounds are in flight although padding rows are finished; some rows of the call are padded on the left."""
    monkeypatch.setattr(row_padding, "CAPTURE_SECONDS", math.inf)
    in_flight, pop = [], loop.RoundsInFlight.pop
    monkeypatch.setattr(loop.RoundsInFlight, "pop", lambda self: (in_flight.append(len(self)), pop(self))[1])
    compare = make(policy=policy, tree_leaves=leaves, **settings)
    compare(text(60, rows=8))
    same_every_round = policy in ("autoregressive", "vanilla")
    for rows in (7, 5, 4, 8):
        ids = text(60, seed=rows, rows=rows)
        mask = torch.ones_like(ids)
        mask[1, :20] = 0
        in_flight.clear()
        compare(ids, attention_mask=mask)
        assert_counts_add_up(compare.stats)
        assert compare.stats.padding_rows == 8 - rows and compare.stats.new_tokens == 40 * rows
        assert not same_every_round or compare.stats.graphs_captured == 0
        assert max(in_flight) == (2 if same_every_round and compare.stats.runtime == "graph" else 1)


@pytest.mark.parametrize("settings", [SPANS, MASKS], ids=["spans", "masks"])
def test_padded_rows_end_early(settings, monkeypatch):
    monkeypatch.setattr(row_padding, "CAPTURE_SECONDS", math.inf)
    target, draft = pair()
    model = specbranch(copy.deepcopy(target))
    own = {"assistant_model": draft, "specbranch": config("vanilla", tree_leaves=3, runtime="graph", **settings)}
    for seed, rows in enumerate((4, 3, 2, 3, 3)):
        kwargs = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": PAD, "eos_token_id": [EOS, *range(10, 14)]}
        ids = text(12, seed=seed, rows=rows)
        kwargs["attention_mask"] = torch.ones_like(ids)
        assert torch.equal(model.generate(ids, **kwargs, **own), target.generate(ids, **kwargs)), rows
        assert model.specbranch_stats.padding_rows == 4 - rows
        assert_counts_add_up(model.specbranch_stats)


@pytest.mark.parametrize(("policy", "leaves"), [("autoregressive", 0), ("vanilla", 0), ("vanilla", 3)])
def test_rows_end_while_a_round_is_in_flight(policy, leaves, monkeypatch):
    target, draft = pair()
    model, in_flight, pop, ended = specbranch(copy.deepcopy(target)), [], loop.RoundsInFlight.pop, 0
    monkeypatch.setattr(loop.RoundsInFlight, "pop", lambda self: (in_flight.append(len(self)), pop(self))[1])
    settings = config(policy, tree_leaves=leaves, runtime="graph", kernels=True)
    for seed in range(8):
        ids = text(12, seed=seed, rows=3)
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        kwargs = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}
        free = target.generate(ids, eos_token_id=None, **kwargs)[:, 12:].tolist()
        firsts = {token: min(row.index(token) for row in free if token in row) for row in free for token in row}
        ends = [token for token, first in firsts.items() if 3 <= first <= 9][:2]  # no row ends at once
        if not ends:
            continue
        plain = target.generate(ids, eos_token_id=ends, **kwargs)
        out = model.generate(ids, eos_token_id=ends, assistant_model=draft, specbranch=settings, **kwargs)
        assert torch.equal(out, plain), seed
        assert_counts_add_up(model.specbranch_stats)
        ended += bool((plain[:, 12:] == PAD).any())
    assert max(in_flight) == 2 and ended


def test_nothing_is_kept_without_a_budget():
    compare = make(memory_budget=0.0, **SPANS)
    for _ in range(2):
        compare(text(100))
        assert compare.stats.graphs_captured > 0
        assert not state_of(compare.model).idle_runners and not state_of(compare.draft).idle_runners


def test_memory_stays_flat():
    """50 calls of mixed lengths and batch sizes. KV caches are not in torch's own accounts."""
    compare = make(**SPANS)

    def one_call(turn):
        compare(text((10, 2000, 300, 5000, 900)[turn % 5], rows=1) if turn % 3 else text(120, rows=(2, 4)[turn % 2]))

    def free():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(GPU)[0]

    for turn in range(30):  # all combinations
        one_call(turn)
    before = free()
    for turn in range(50):
        one_call(turn)
        assert compare.stats.graphs_captured == 0, turn
    assert before - free() <= 64 << 20


def test_memory_that_runs_out_is_freed_and_asked_for_again():
    """Idle runners hold gigabytes while the GPU is full; a batch of another size needs them."""
    wide = llama(seed=0, hidden=1024, layers=8, max_position_embeddings=ROOM)
    compare = make(wide, new_tokens=8, **SPANS)
    compare(text(100, rows=48))
    compare(text(100, rows=40))  # kernels of this kind are built now
    held = sum(runner.num_bytes for runner in state_of(compare.model).idle_runners)
    ids = text(1500, rows=40, seed=3)
    mask = torch.ones_like(ids)
    expected = compare.plain.generate(ids, attention_mask=mask, **compare.kwargs)
    for rows in (40, 48):
        compare(text(1500, rows=rows))
    held = sum(runner.num_bytes for runner in state_of(compare.model).idle_runners)
    gc.collect()
    torch.cuda.empty_cache()
    assert held > 1 << 30
    # About as much as each of the others holds is left. A batch of 52 needs more, and cannot run on their stages.
    filler = [torch.empty(torch.cuda.mem_get_info(GPU)[0] - held // 2, dtype=torch.uint8, device=GPU)]
    try:
        got = compare.model.generate(
            ids[:, :].repeat(2, 1)[:52], attention_mask=mask.repeat(2, 1)[:52], **compare.kwargs,
            assistant_model=compare.draft, specbranch=config(**compare.settings),
        )  # fmt: skip
        assert {runner.purpose[0] for runner in state_of(compare.model).idle_runners} == {52}
    finally:
        filler.clear()
        torch.cuda.empty_cache()
    assert torch.equal(got[:40], expected)


# ---- prefix reuse


def chat_turn(ids, more=40):
    return torch.cat([ids, text(more, seed=ids.shape[1])], dim=1)


@pytest.mark.parametrize("length", [1200, 3000])
def test_prompt_that_begins_like_the_last_text(length):
    compare = make(**SPANS)
    known = compare(text(length))
    for _ in range(3):
        known, before = compare(chat_turn(known)), known.shape[1]
        assert compare.stats.reused_tokens == before - 2


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_model_reads_everything(change):
    compare = make(**SPANS)
    known = compare(text(1200))
    for model in (compare.plain, compare.model):
        change(model)
    assert compare.reused(chat_turn(known)) == 0
    known = compare(chat_turn(known))
    assert compare.reused(chat_turn(known)) == known.shape[1] - 2


BETWEEN = {  # a call in between, and whether the text before is still there afterwards
    "another prompt": (lambda compare, known: compare(text(1300, seed=5)), False),
    "short prompt": (lambda compare, known: compare(text(20, seed=5)), False),
    "switched off": (lambda compare, known: compare(known, {"prefix_reuse": False}), False),
    "cache": (lambda compare, known: compare(text(600, seed=5), cached=500), False),
    "scores": (
        lambda compare, known: compare(text(600, seed=5), output_scores=True, return_dict_in_generate=True), False,
    ),
    "holes": (
        lambda compare, known: compare(known, attention_mask=torch.ones_like(known).index_fill_(1, known[0, :2], 0)),
        False,
    ),
    "other rows": (lambda compare, known: compare(text(1300, seed=5, rows=2)), True),
    "other layers": (lambda compare, known: compare(text(600, seed=5), {"kernels": False}), True),
    "eager": (lambda compare, known: compare(text(600, seed=5), {"runtime": "eager"}), True),
}  # fmt: skip


@pytest.mark.parametrize("between", BETWEEN)
def test_call_between_two_turns(between):
    compare = make(**SPANS)
    known = compare(text(1200))
    call, stays = BETWEEN[between]
    call(compare, known)
    assert compare.reused(chat_turn(known)) == (known.shape[1] - 2 if stays else 0)


def test_few_common_tokens_are_read_again():
    compare = make(**SPANS)
    known = compare(text(1200))
    assert compare.reused(torch.cat([known[:, :100], text(700, seed=9)], dim=1)) == 0
    short = compare(text(500))
    assert short.shape[1] < prefix_reuse.SHORTEST_TEXT and compare.reused(chat_turn(short, 300)) == 0


def test_half_precision_reuses_a_prefix():
    target, draft = (model.to(torch.bfloat16) for model in pair())
    model, ids, reused = specbranch(target), text(1200), []
    for _ in range(3):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, min_new_tokens=64, do_sample=False,
            assistant_model=draft,
        )  # fmt: skip
        reused.append(model.specbranch_stats.reused_tokens > 0)
        ids = chat_turn(out)
    assert reused == [False, True, True]


# ---- threads


@pytest.mark.parametrize("settings", [SPANS, MASKS], ids=["spans", "masks"])
@pytest.mark.parametrize("targets", [1, 2])
def test_threads_from_a_cold_start(targets, settings):
    """One model, or two that share a draft; stages are captured while the other thread generates."""
    target, draft = pair()
    plain = [target, llama(seed=5, max_position_embeddings=ROOM).to(GPU)][:targets]
    models = [specbranch(copy.deepcopy(each)) for each in plain]
    kwargs = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    jobs = [[(turn % targets, text(30 + 170 * turn, seed=9 * thread + turn)) for turn in range(6)] for thread in (0, 1)]
    expected = [[plain[which].generate(ids, **kwargs) for which, ids in each] for each in jobs]
    texts, failed = [[], []], []
    together = threading.Barrier(2)

    def work(thread):
        try:
            together.wait()
            for which, ids in jobs[thread]:
                texts[thread].append(
                    models[which].generate(
                        ids, **kwargs, assistant_model=draft, specbranch=config("specbranch", **settings)
                    )
                )
        except Exception as error:  # shown by the assertion below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed
    for got, wanted in zip(texts, expected):
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    for which, model in enumerate(models):
        ids = text(50)
        out = model.generate(ids, **kwargs, assistant_model=draft, specbranch=config("specbranch", **settings))
        assert torch.equal(out, plain[which].generate(ids, **kwargs))
        assert model.specbranch_stats.runtime == "graph" and not model.specbranch_stats.slowed_by


# ---- warm-up


@pytest.mark.parametrize("settings", [SPANS, MASKS], ids=["spans", "masks"])
def test_warm_up_captures_all_that_follows(settings):
    target, draft = pair()
    model = specbranch(copy.deepcopy(target), draft)
    own = config("auto", **settings)
    done = model.warm_up_specbranch(batch_sizes=(1, 2, 4), max_length=1200, progress=False, specbranch=own)
    assert done.graphs_captured > 50 and done.memory_bytes > 0 and done.seconds > 0
    choose, used = random.Random(0), []
    for request in range(200):
        ids = text(choose.randrange(2, 1000), seed=request, rows=choose.choice((1, 2, 4)))
        mask = torch.ones_like(ids)
        if ids.shape[0] > 1 and ids.shape[1] > 8 and choose.random() < 0.5:  # rows of different lengths
            mask[0, : choose.randrange(1, ids.shape[1] - 1)] = 0
        kwargs = {"attention_mask": mask, "max_new_tokens": choose.randrange(2, 60), "do_sample": False}
        out = model.generate(ids, specbranch=own, **kwargs)
        stats = model.specbranch_stats
        assert stats.runtime == "graph" and not stats.slowed_by and stats.graphs_captured == 0, (ids.shape, stats)
        if request % 10 == 0:
            assert torch.equal(out, target.generate(ids, **kwargs))
        used.append(torch.cuda.mem_get_info(GPU)[0])
    assert used[50] - used[-1] < 256 << 20  # memory stays flat


def test_warm_up_takes_the_memory_of_the_longest_texts():
    target, draft = pair()
    model = specbranch(target, draft)
    own = config("vanilla", **SPANS)
    model.warm_up_specbranch(batch_sizes=(2,), max_length=6000, progress=False, specbranch=own)
    (runner,) = state_of(model).idle_runners
    assert runner.cache.address.capacity >= 6000


def test_warm_up_serves_the_sizes_in_between(monkeypatch):
    monkeypatch.setattr(row_padding, "CAPTURE_SECONDS", math.inf)
    target, draft = pair()
    model = specbranch(copy.deepcopy(target), draft)
    own = config("auto", **SPANS)
    model.warm_up_specbranch(batch_sizes=(1, 4, 8), max_length=1200, progress=False, specbranch=own)
    for rows in range(1, 9):
        ids = text(100 * rows, seed=rows, rows=rows)
        kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
        assert torch.equal(model.generate(ids, specbranch=own, **kwargs), target.generate(ids, **kwargs))
        stats = model.specbranch_stats
        assert stats.graphs_captured == 0 and stats.padding_rows == {2: 2, 3: 1, 5: 3, 6: 2, 7: 1}.get(rows, 0), rows
