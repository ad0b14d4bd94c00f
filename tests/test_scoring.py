"""Processors applied to many positions at once say what they say one by one."""

import pytest
import torch
from transformers.generation import logits_process as lp

from hf_specbranch.decoding.scoring import POINTWISE, PREFIX, Guide, is_opaque, score_positions

PROCESSORS = [
    lp.TemperatureLogitsWarper(0.7),
    lp.TopKLogitsWarper(5),
    lp.TopPLogitsWarper(0.8),
    lp.TopHLogitsWarper(0.5),
    lp.MinPLogitsWarper(0.1),
    lp.TypicalLogitsWarper(0.8),
    lp.EpsilonLogitsWarper(0.05),
    lp.EtaLogitsWarper(0.05),
    lp.InfNanRemoveLogitsProcessor(),
    lp.LogitNormalization(),
    lp.SuppressTokensLogitsProcessor([3, 5]),
    lp.MinLengthLogitsProcessor(9, 2),
    lp.MinNewTokensLengthLogitsProcessor(6, 3, 2),
    lp.RepetitionPenaltyLogitsProcessor(1.5),
    lp.NoRepeatNGramLogitsProcessor(2),
    lp.SequenceBiasLogitsProcessor([[[4], 3.0], [[5, 6], -3.0]]),
    lp.NoBadWordsLogitsProcessor([[7], [1, 2]], eos_token_id=2),
    lp.ForcedBOSTokenLogitsProcessor(3),
    lp.ForcedEOSTokenLogitsProcessor(9, 2),
    lp.ExponentialDecayLengthPenalty((2, 1.2), 2, 6),
    lp.SuppressTokensAtBeginLogitsProcessor([4], 6),
]


def test_every_processor_known_to_be_stateless_is_tested_here():
    assert {type(processor) for processor in PROCESSORS} == {*POINTWISE, *PREFIX}


@pytest.mark.compat
@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: type(processor).__name__)
def test_many_positions_are_scored_as_one_by_one(processor):
    torch.manual_seed(0)
    rows, positions = 3, 4
    logits = 3 * torch.randn((rows, positions, 12))
    text = torch.randint(0, 12, (rows, 12))
    starts = [5, 7, 6]  # rows of different length
    prefixes = [[text[b : b + 1, : starts[b] + j] for j in range(positions)] for b in range(rows)]
    before = logits.clone()
    scores = score_positions([processor], prefixes, logits)
    assert torch.equal(logits, before)
    for b in range(rows):
        for j in range(positions):
            torch.testing.assert_close(scores[b, j], processor(prefixes[b][j], logits[b, j : j + 1].clone())[0])


def test_a_subclass_may_have_state_and_is_not_trusted():
    class Mine(lp.TemperatureLogitsWarper):
        pass

    assert is_opaque(Mine(0.5)) and not is_opaque(lp.TemperatureLogitsWarper(0.5))


class Tape:
    """Remembers what it was shown."""

    def __init__(self, shown=()):
        self.shown = list(shown)

    def __call__(self, input_ids, scores):
        self.shown.append(input_ids.shape[1])
        return scores

    def fork(self):
        return Tape(self.shown)

    def rollback(self, n):
        del self.shown[len(self.shown) - n :]


def test_a_guide_shows_each_prefix_once_and_rewinds():
    guide = Guide.for_draft([Tape()], 3, frozenset(), torch.device("cpu"))
    text, logits = torch.zeros((1, 9), dtype=torch.long), torch.zeros((1, 5))
    for length in (3, 4, 5, 6):
        guide.score(text[:, :length], logits)
    branch = guide.fork()
    branch.rewind(4)
    assert branch.processors[0].shown == [3, 4] and guide.processors[0].shown == [3, 4, 5, 6]
    branch.score(text[:, :5], logits)
    assert branch.processors[0].shown == [3, 4, 5]
    guide.rewind(8)  # nothing longer was seen
    assert guide.seen == 7
