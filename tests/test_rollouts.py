"""`generate()` inside a training loop: it follows the weights, and training goes on as if it had not been called."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist

from hf_specbranch import specbranch

from .models import config, llama, noisy_copy, prompt
from .parallel import HEADS, Processes

GREEDY = {"do_sample": False, "max_new_tokens": 12}


def step(model, optimizer, texts):
    """One step of training on texts; returns the gradients."""
    model.train()
    model(input_ids=texts, labels=texts).loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return gradients


def check_loop(model, plain, inputs, **arguments):
    """Train two twins, of which one generates by speculation, and compare their texts and gradients."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, plain)]
    seen = set()
    for round in range(3):
        expected = plain.generate(**inputs, **GREEDY)
        assert torch.equal(model.generate(**inputs, **GREEDY, **arguments), expected), round
        assert model.specbranch_stats is not None
        seen.add(str(expected.tolist()))
        ours, theirs = (step(each, optimizer, expected) for each, optimizer in zip((model, plain), optimizers))
        assert all(map(torch.equal, ours, theirs)), round
    assert len(seen) == 3  # the steps change the texts


def test_texts_follow_weights_that_are_trained(target, draft):
    model = specbranch(copy.deepcopy(target), draft=draft, policy="specbranch")
    check_loop(model, copy.deepcopy(target), prompt(2))


def test_texts_follow_weights_in_captured_stages(graph_runners, target, draft):
    """With kernels, which join weights, and prompts that begin like the last text."""
    model = specbranch(copy.deepcopy(target))
    settings = config("specbranch", kernels=True, prefix_reuse=True)
    check_loop(model, copy.deepcopy(target), prompt(1), assistant_model=draft, specbranch=settings)


def test_draft_that_is_trained_too(target):
    """A copy of a draft, here one with a shortlist of tokens, follows the draft: it learns the text by heart."""
    draft = llama(seed=7)
    model = specbranch(copy.deepcopy(target), draft=draft, policy="vanilla", draft_shortlist=40)
    optimizer, accepted = torch.optim.AdamW(draft.parameters(), lr=0.02), []
    for _ in range(8):
        expected = target.generate(**prompt(1), **GREEDY)
        assert torch.equal(model.generate(**prompt(1), **GREEDY), expected)
        accepted.append(model.specbranch_stats.draft_acceptance_rate)
        for _ in range(5):
            step(draft, optimizer, expected)
    assert accepted[0] < 0.5 < accepted[-1], accepted


def test_weights_that_are_replaced(graph_runners, target, draft):
    model, settings = specbranch(copy.deepcopy(target)), config("specbranch", kernels=True)
    for seed in (3, 4):
        other = llama(seed)
        model.load_state_dict(other.state_dict(), assign=True)
        got = model.generate(**prompt(2), **GREEDY, assistant_model=draft, specbranch=settings)
        assert torch.equal(got, other.generate(**prompt(2), **GREEDY))


def test_groups_of_samples(target, draft):
    """Each row of a group is a sample of its own, and a seed repeats them all."""
    model = specbranch(copy.deepcopy(target), draft=draft)
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(model.generate(**prompt(2), do_sample=True, max_new_tokens=12, num_return_sequences=4))
    assert torch.equal(*texts) and texts[0].shape[0] == 8
    assert len({str(row.tolist()) for row in texts[0][:4]}) > 1
    assert torch.equal(texts[0][:4, :7], prompt(2)["input_ids"][:1].expand(4, -1))


def data_parallel(target, draft):
    """Two steps of training, each process on prompts of its own."""
    rank = dist.get_rank()
    model = specbranch(target, draft=draft)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for round in range(2):
        inputs = prompt(1 + rank, 5 + 3 * rank, seed=2 * round + rank)
        text = wrapped.module.generate(**inputs, do_sample=False, max_new_tokens=8 + 8 * rank)
        again = wrapped.module.generate(**inputs, do_sample=False, max_new_tokens=8 + 8 * rank, specbranch=False)
        assert torch.equal(text, again)
        wrapped(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


@pytest.mark.slow
def test_data_parallel_training(tmp_path):
    target = llama(0, **HEADS)
    draft = noisy_copy(target, noise=0.1, seed=1)
    first, second = Processes(2, tmp_path, data_parallel, target, draft).results()
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.cat([parameter.flatten() for parameter in target.parameters()]))


def fully_sharded(target, draft):
    """Texts of different lengths from a model whose every pass gathers weights from all processes."""
    from torch.distributed.fsdp import fully_shard

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hf_specbranch").addHandler(handler)
    model, rank = specbranch(target, draft=draft), dist.get_rank()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    inputs = prompt(1, 5 + rank, seed=rank)
    return model.generate(**inputs, do_sample=False, max_new_tokens=4 + 8 * rank, eos_token_id=None), messages


@pytest.mark.slow
def test_fully_sharded_models_are_left_to_transformers(tmp_path):
    target = llama(0, **HEADS)
    found = Processes(2, tmp_path, fully_sharded, target, noisy_copy(target, noise=0.1, seed=1)).results()
    for rank, (text, messages) in enumerate(found):
        arguments = {"do_sample": False, "max_new_tokens": 4 + 8 * rank, "eos_token_id": None}
        assert torch.equal(text, target.generate(**prompt(1, 5 + rank, seed=rank), **arguments))
        assert any("FSDP" in message for message in messages)
