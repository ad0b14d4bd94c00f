"""Random greedy generations, compared with plain `generate()`.

Each case follows from a seed and a number, so that it can be repeated:

    python -m tests.fuzz --cases 10000 --seed 0
    python -m tests.fuzz --seed 0 --case 1234
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from hf_specbranch import SpecBranchConfig, specbranch
from hf_specbranch.families.tiny import PAD, TEXT_TOKENS, VOCABULARY, language_models, noisy_copy

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "opt", "falcon", "phi3",
    "mixtral", "gpt_oss", "deepseek_v3", "cohere2", "olmo2",
)  # fmt: skip
RECURRENT = (
    "qwen3_next", "qwen3_5_text", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2", "bamba", "jamba", "zamba2",
    "olmo_hybrid", "kimi_linear", "mamba", "mamba2", "falcon_mamba",
)  # fmt: skip
POLICIES = ("auto", "autoregressive", "vanilla", "vanilla", "pearl", "specbranch", "specbranch", "specbranch")
DRAFTS = {"equal": 0.0, "close": 0.03, "near": 0.1, "far": 0.5}
NEAR = 1e-4


@dataclass
class Turn:
    """One call of `generate()`: new prompt tokens and everything that both sides are given."""

    prompt: torch.Tensor  # [B, L]
    arguments: dict[str, Any]


@dataclass
class FuzzCase:
    """A pair, the settings of our side, and one or more turns of a conversation."""

    family: str
    draft: str
    settings: SpecBranchConfig
    mask: torch.Tensor  # [B, L] of the first prompt
    turns: list[Turn]
    eos: Any = None
    notes: list[str] = field(default_factory=list)


@functools.cache
def families() -> dict[str, Any]:
    return {family.name: family for family in language_models()}


@functools.cache
def pair(family: str, draft: str) -> tuple[Any, Any, Any]:
    """(plain target, attached target, draft)"""
    plain = families()[family].build()
    small = pair("gpt2", "near")[0] if draft == "stranger" else noisy_copy(plain, DRAFTS[draft])
    return plain, specbranch(copy.deepcopy(plain)), small


class Favourite(transformers.LogitsProcessor):
    """A user's processor: prefers a token that follows from the text so far."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = (input_ids.sum(1) % (VOCABULARY - 3) + 3)[:, None]
        return scores.scatter_add(1, chosen, torch.full_like(chosen, self.strength, dtype=scores.dtype))


class StopAt(transformers.StoppingCriteria):
    """A user's criterion: ends a row at a token that is divisible by a number."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % self.divisor == 0


def make_case(seed: int, number: int, families: tuple[str, ...] = FAMILIES) -> FuzzCase:
    """The case of this number."""
    draw = random.Random(f"{seed}:{number}")
    rows = draw.choice((1, 1, 1, 2, 3, 4))
    length = draw.randint(1, 12)
    chat = draw.random() < 0.15
    settings = SpecBranchConfig(
        policy=draw.choice(POLICIES),
        max_draft_length=draw.choice(("auto", 1, 2, 3, 4, 5, 9)),
        confidence_threshold=draw.choice(("auto", 0.0, 0.05, 0.2, 0.5, 0.9, 1.0)),
        max_branches=draw.randint(1, 6),
        max_rejection_branches=draw.choice(("auto", 0, 0, 1, 3, 9)),
        tree_leaves=draw.choice(("auto", 0, 0, 1, 3, 8)),
        overlap=draw.random() < 0.5,
        draft_sampling=draw.choice(("auto", "greedy", "sample")),
    )
    mask = torch.ones((rows, length), dtype=torch.long)
    for row in range(rows):
        mask[row, : draw.randint(0, length - 1) if row and not chat else 0] = 0
    case = FuzzCase(draw.choice(families), draw.choice((*DRAFTS, "stranger")), settings, mask, [])
    case.eos = None if chat else draw.choice((None, _token(draw), [_token(draw), _token(draw)], list(range(3, 9))))
    for _ in range(draw.randint(2, 3) if chat else 1):
        prompt = torch.tensor([[_token(draw) for _ in range(length)] for _ in range(rows)])
        case.turns.append(Turn(prompt, _arguments(draw, case.eos, chat)))
        length = draw.randint(1, 5)
    case.turns[0].prompt.masked_fill_(mask == 0, PAD)
    return case


def _token(draw: random.Random) -> int:
    return draw.choice(TEXT_TOKENS)


def _arguments(draw: random.Random, eos: Any, chat: bool) -> dict[str, Any]:
    new = draw.choice((1, 2, 5, 12, 20, 30))
    arguments: dict[str, Any] = {"do_sample": False, "eos_token_id": eos, "pad_token_id": PAD}
    arguments["max_new_tokens"] = new
    options: dict[str, Any] = {
        "repetition_penalty": draw.choice((0.8, 1.2, 2.0)),
        "no_repeat_ngram_size": draw.randint(1, 4),
        "bad_words_ids": [[_token(draw)], [_token(draw), _token(draw)], [_token(draw) for _ in range(3)]],
        "suppress_tokens": [_token(draw) for _ in range(4)],
        "begin_suppress_tokens": [_token(draw) for _ in range(8)],
        "sequence_bias": [[[_token(draw)], 2.0], [[_token(draw), _token(draw)], 5.0], [[_token(draw)], -3.0]],
        "logits_processor": transformers.LogitsProcessorList([Favourite(draw.choice((1.0, 4.0)))]),
        "remove_invalid_values": True,
        "renormalize_logits": True,
    }
    if eos is not None:
        options["min_new_tokens"] = draw.randint(1, new)
        options["forced_eos_token_id"] = eos
        options["exponential_decay_length_penalty"] = (draw.randint(1, new), 1.05)
    if not chat:
        options["stopping_criteria"] = transformers.StoppingCriteriaList([StopAt(draw.randint(7, 20))])
    for name in draw.sample(sorted(options), draw.choice((0, 0, 1, 1, 2, 3))):
        arguments[name] = options[name]
    if chat or draw.random() < 0.2:
        arguments |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": draw.random() < 0.5}
    return arguments


def run_case(case: FuzzCase) -> str:
    """Compare both sides; "" if they are equal, else what differs. A near tie is noted in the case."""
    plain, model, draft = pair(case.family, case.draft)
    ours = {"assistant_model": draft, "specbranch": case.settings}
    mask = case.mask
    texts: dict[Any, Any] = {plain: None, model: None}
    caches: dict[Any, Any] = {plain: None, model: None}
    for number, turn in enumerate(case.turns):
        outputs: dict[Any, Any] = {}
        raised: list[str] = []
        if number:
            mask = torch.ones((len(mask), texts[plain].shape[1] + turn.prompt.shape[1]), dtype=torch.long)
        for side, more in ((plain, {}), (model, ours)):
            ids = turn.prompt if not number else torch.cat([texts[side], turn.prompt], 1)
            arguments = {**copy.deepcopy(turn.arguments), **more, "input_ids": ids, "attention_mask": mask}
            if caches[side] is not None:
                arguments["past_key_values"] = caches[side]
            try:
                output = side.generate(**arguments)
            except ValueError as error:
                if side is model and plain in outputs:
                    raise
                raised.append(str(error))
                continue
            outputs[side] = output
            is_tensor = isinstance(output, torch.Tensor)
            texts[side] = output if is_tensor else output.sequences
            caches[side] = None if is_tensor else output.past_key_values
        if raised:  # plain refuses these arguments
            return "" if raised == raised[:1] * 2 else f"turn {number}: raised {raised}"
        expected, got = texts[plain], texts[model]
        if expected.shape != got.shape or not torch.equal(expected, got):
            if _near_tie(plain, turn, expected, got, mask, case):
                return ""
            return f"turn {number}: expected {expected.tolist()}, got {got.tolist()}"
        if different := _compare_scores(outputs[plain], outputs[model], mask.shape[1], case):
            return f"turn {number}: {different}"
    return ""


def _near_tie(plain: Any, turn: Turn, expected: Any, got: Any, mask: Any, case: FuzzCase) -> bool:
    """Whether the first difference is between two scores that rounding may exchange."""
    width = min(expected.shape[1], got.shape[1])
    differs = (expected[:, :width] != got[:, :width]).any(0).nonzero()
    if len(differs) == 0:
        return False
    step = int(differs[0])
    row = int((expected[:, step] != got[:, step]).nonzero()[0])
    arguments = copy.deepcopy(turn.arguments) | {"return_dict_in_generate": True, "output_scores": True}
    start = mask.shape[1]
    again = plain.generate(input_ids=expected[:, :start], attention_mask=mask, **arguments)
    first, second = again.scores[step - start][row].topk(2).values.tolist()
    if first - second < NEAR:
        case.notes.append(f"near tie at new token {step - start}")
    return first - second < NEAR


def _compare_scores(expected: Any, got: Any, start: int, case: FuzzCase) -> str:
    if isinstance(expected, torch.Tensor):
        return ""
    ends = [case.eos] if isinstance(case.eos, int) else case.eos or []
    for name in ("scores", "logits"):
        one, other = getattr(expected, name), getattr(got, name)
        if (one is None) != (other is None) or len(one or ()) != len(other or ()):
            return f"{name}: {one and len(one)} expected, got {other and len(other)}"
        for row, text in enumerate(expected.sequences[:, start:].tolist()):
            last = next((step for step, token in enumerate(text) if token in ends), len(text))
            for step in range(min(last + 1, len(one or ()))):
                if not torch.allclose(one[step][row], other[step][row], rtol=1e-3, atol=1e-3, equal_nan=True):
                    return f"{name} of row {row}, step {step} differ"
    return ""


def describe(case: FuzzCase) -> str:
    turns = [{**turn.arguments, "prompt": turn.prompt.tolist()} for turn in case.turns]
    return f"{case.family}, draft {case.draft}, {case.settings}, mask {case.mask.tolist()}, turns {turns}"


def check(seed: int, number: int, families: tuple[str, ...] = FAMILIES) -> tuple[str, list[str]]:
    """What is different in a case, an exception included, and its notes."""
    case = make_case(seed, number, families)
    try:
        different = run_case(case)
    except Exception:
        different = traceback.format_exc(limit=-4)
    return (f"{different}\n{describe(case)}" if different else ""), case.notes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="only the case of this number")
    parser.add_argument("--recurrent", action="store_true", help="models with recurrent layers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    numbers = [given.case] if given.case is not None else range(given.start, given.start + given.cases)
    failed, ties, start = 0, 0, time.perf_counter()
    for done, number in enumerate(numbers, 1):
        different, notes = check(given.seed, number, RECURRENT if given.recurrent else FAMILIES)
        failed, ties = failed + bool(different), ties + bool(notes)
        if different:
            print(f"--seed {given.seed} --case {number}: {different}\n", flush=True)
        if done % 500 == 0:
            print(f"{done} cases, {failed} different, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"{len(numbers)} cases, {failed} different, {ties} near ties")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
