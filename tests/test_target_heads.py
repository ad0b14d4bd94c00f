"""Drafts that read the target's hidden states: EAGLE-3 drafts in the layout of the speculators project."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM
from transformers.cache_utils import MtpCache

from hf_specbranch import SpecBranchConfig, specbranch
from hf_specbranch.decoding import target_states
from hf_specbranch.decoding.drafter import Drafter
from hf_specbranch.decoding.lookup import PassTimes
from hf_specbranch.target_heads.loading import block_draft

from . import sources
from .models import assert_counts_add_up, attached, llama, pairs, prompt, slowly
from .releases import MTP_LAYERS_FAIL
from .sampling import SMALLEST_P, sampling_pair
from .sources import DraftSourceTests, draft_is_worth
from .target_heads import (
    eagle3_config,
    random_block_draft,
    random_eagle3,
    random_mtp,
    random_weights,
    reference_block,
    reference_draft,
    small_target,
    target_and_block_draft,
    target_and_eagle3,
    target_and_mtp,
)

GREEDY = {"max_new_tokens": 40, "do_sample": False}


def settings(policy="vanilla", gamma=3, **more):
    return SpecBranchConfig(policy=policy, max_draft_length=gamma, **{"confidence_threshold": 0.0, **more})


class HeadTests(DraftSourceTests):
    """The contract of a draft source for a head of the target."""

    @staticmethod
    def pair():
        raise NotImplementedError

    @staticmethod
    def sampling_head(target):
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def pairs(self, monkeypatch):
        """The draft that these tests are given is a head."""
        monkeypatch.setattr(sources, "repetitive_pair", self.pair)
        model, _ = sampling_pair()
        head = self.sampling_head(model)
        monkeypatch.setattr(sources, "sampling_pair", lambda: (model, head))

    def arguments(self, draft):
        return {"assistant_model": draft, "specbranch": settings()}

    def sampling_p_value(self, samples=4_000):
        return super().sampling_p_value(samples)


class TestMtp(HeadTests):
    source = "MTP"
    pair = staticmethod(target_and_mtp)

    @staticmethod
    def sampling_head(target):
        target.config.num_mtp_layers = 1
        return random_mtp(target, seed=3)


class TestDFlash(HeadTests):
    source = "DFlash"
    pair = staticmethod(target_and_block_draft)

    @staticmethod
    def sampling_head(target):
        return block_draft(target, random_block_draft(target, seed=3))


class TestEagle3(HeadTests):
    source = "EAGLE-3"
    pair = staticmethod(target_and_eagle3)

    @staticmethod
    def sampling_head(target):
        return random_eagle3(target, seed=3, layers=(0,), tokens=3)

    def test_a_wrong_distribution_is_noticed(self, monkeypatch):
        """Planted fault: the head draws from another distribution than it says."""
        honest = Drafter.propose

        def dishonest(self, feedback, reached):
            drafted = honest(self, feedback, reached)
            return drafted if drafted.q is None else drafted._replace(q=drafted.q.roll(1, dims=-1))

        monkeypatch.setattr(Drafter, "propose", dishonest)
        assert self.sampling_p_value(samples=2_000) < SMALLEST_P

    def test_sampled_text_of_branches_has_the_targets_distribution(self, monkeypatch):
        """The head goes on with its own states while the target verifies."""
        branches = settings("specbranch", 2, tree_leaves=2, max_branches=2, confidence_threshold=0.4)
        monkeypatch.setattr(self, "arguments", lambda draft: {"assistant_model": draft, "specbranch": branches})
        assert self.sampling_p_value() > SMALLEST_P


BRANCHES = dict(gamma=2, tree_leaves=2, max_rejection_branches=2, max_branches=2, confidence_threshold=0.4)


@pytest.mark.parametrize(("policy", "stages"), pairs(["pearl", "specbranch", "auto"], ["eager", "static"]))
def test_every_policy_keeps_the_text(policy, stages, request):
    if stages == "static":
        request.getfixturevalue("static_stages")
    more = BRANCHES if policy == "specbranch" else {}
    target, head = target_and_eagle3()
    asked, model = {**prompt(2, 12, vocabulary=12), **GREEDY}, attached(target)
    out = model.generate(**asked, assistant_model=head, specbranch=settings(policy, **more))
    assert torch.equal(out, target.generate(**asked))
    assert_counts_add_up(model.specbranch_stats)
    assert model.specbranch_stats.sources["EAGLE-3"]["accepted"] > 0


@pytest.mark.parametrize("source", ["EAGLE-3", "MTP", "DFlash"])
def test_half_precision(source):
    """The mask probe then compares two runs, of which one has a cache that the head makes itself."""
    target, head = MAKERS[source]()
    target, head = copy.deepcopy((target, head))  # together: they share weights
    target.to(torch.bfloat16)
    head.to(torch.bfloat16)
    asked, model = {**prompt(2, 12, vocabulary=12), **GREEDY}, attached(target)
    out = model.generate(**asked, assistant_model=head, specbranch=settings())
    assert torch.equal(out, target.generate(**asked))
    assert model.specbranch_stats.sources[source]["accepted"] > 0


# ---- which states it reads


def watch_proposals(monkeypatch):
    """Return a list that every draft is added to: the text of a row before it, and its tokens."""
    found, honest = [], Drafter.propose

    def watched(self, feedback, reached):
        drafted, pending = honest(self, feedback, reached), self.round.pending
        for row, count in enumerate(drafted.length.tolist()):
            first = int((~self.model.seen[row]).sum())
            found.append(
                (pending.ids[row, first : int(pending.start[row])].tolist(), drafted.tokens[row, :count].tolist())
            )
        return drafted

    monkeypatch.setattr(Drafter, "propose", watched)
    return found


MAKERS = {"EAGLE-3": target_and_eagle3, "MTP": target_and_mtp, "DFlash": target_and_block_draft}


@pytest.mark.parametrize(
    ("kind", "leaves", "stages"),
    [
        slowly("EAGLE-3", 0, "eager"),
        ("EAGLE-3", 3, "static"),
        ("MTP", 3, "eager"),
        ("DFlash", 3, "static"),
        slowly("EAGLE-3", 0, "static"),
        slowly("EAGLE-3", 3, "eager"),
        slowly("MTP", 3, "static"),
        slowly("DFlash", 3, "eager"),
    ],
)
def test_drafts_are_those_of_the_head_alone(kind, leaves, stages, request, monkeypatch):
    """Also after rejections, accepted leaves and padding: up to the end of the text every state is the target's."""
    if stages == "static":
        request.getfixturevalue("static_stages")
    target, head = MAKERS[kind]()
    proposals = watch_proposals(monkeypatch)
    model = attached(target)
    model.generate(
        **prompt(3, 12, vocabulary=12), **GREEDY, assistant_model=head, specbranch=settings(tree_leaves=leaves)
    )
    assert len(proposals) > 20 and (not leaves or model.specbranch_stats.tree_leaf_hits > 2)
    reference = reference_block if head.block else reference_draft
    for text, tokens in proposals:
        assert tokens == reference(head, target, text, len(tokens))


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
def test_drafts_after_looked_up_tokens_are_those_of_the_head_alone(static, request, monkeypatch):
    if static:
        request.getfixturevalue("static_stages")
    monkeypatch.setattr(PassTimes, "seconds", lambda self, count: 1.0)
    draft_is_worth(1.0, monkeypatch)
    target, head = target_and_eagle3()
    proposals, model = watch_proposals(monkeypatch), attached(target)
    model.generate(
        **prompt(1, 12, vocabulary=12), **GREEDY, assistant_model=head,
        specbranch=settings(prompt_lookup_num_tokens=4),
    )  # fmt: skip
    counts = model.specbranch_stats.sources
    assert counts["lookup"]["rounds"] > 2 and counts["EAGLE-3"]["rounds"] > 2
    for text, tokens in proposals:
        assert tokens == reference_draft(head, target, text, len(tokens))


def test_stale_states_cost_acceptance_and_no_token(monkeypatch):
    """Planted fault: after the prompt the target's states are never kept."""
    target, head = target_and_eagle3()
    asked, model = {**prompt(2, 12, vocabulary=12), **GREEDY}, attached(target)
    model.generate(**asked, assistant_model=head, specbranch=settings())
    accepted = model.specbranch_stats.num_accepted_tokens
    monkeypatch.setattr(target_states.TargetStates, "record", lambda *_: None)
    out = model.generate(**asked, assistant_model=head, specbranch=settings())
    assert torch.equal(out, target.generate(**asked))
    assert model.specbranch_stats.num_accepted_tokens < accepted


def test_a_given_cache_holds_no_states_and_is_not_read(monkeypatch):
    target, head = target_and_eagle3()
    ids = prompt(1, 24, vocabulary=12)["input_ids"]
    model, asked = attached(target), {"attention_mask": torch.ones_like(ids), **GREEDY}
    with torch.no_grad():
        past = target(ids[:, :10], use_cache=True).past_key_values
    out = model.generate(ids, **asked, past_key_values=past, assistant_model=head, specbranch=settings())
    assert torch.equal(out, target.generate(ids, **asked))
    assert model.specbranch_stats.sources["EAGLE-3"]["accepted"] > 0


# ---- loading


@pytest.fixture
def folder(tmp_path):
    """A published draft."""
    target = llama(seed=0, layers=4)
    config = eagle3_config(target, tokens=40, layers=(1, 2, 3), norm_before_residual=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config, target), tmp_path / "model.safetensors")
    return tmp_path, target


@pytest.mark.compat
@pytest.mark.matrix
def test_a_folder_is_loaded_by_its_config(folder):
    path, target = folder
    model = specbranch(target, draft=str(path))
    out = model.generate(**prompt(2), max_new_tokens=12, do_sample=False)
    assert torch.equal(out, model.generate(**prompt(2), max_new_tokens=12, do_sample=False, specbranch=False))
    model.generate(**prompt(2), max_new_tokens=12, do_sample=False, specbranch=settings())
    assert set(model.specbranch_stats.sources) == {"EAGLE-3"}
    head = model._specbranch_memory.draft
    assert head.embed_tokens.weight is target.get_input_embeddings().weight  # not stored again
    assert head.generation_config.num_assistant_tokens == 3


def changed(path, **fields):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculators_model_type": "dspark"}, "expected 'eagle3'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "the target has 4 layers"),
        ({"target_hidden_size": 64}, "hidden states of size 64"),
        ({"fc_norm": True}, "fc_norm.0.weight"),
        ({"transformer_layer_config": {"model_type": "gpt2"}}, "expected 'llama' or 'qwen3'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_drafts_that_do_not_fit_are_refused(folder, fields, message):
    path, target = folder
    changed(path, **fields)
    with pytest.raises(ValueError, match=message):
        specbranch(target, draft=path)


@pytest.mark.parametrize(
    "more",
    [
        slowly({"norm_before_fc": True}),
        {"fc_norm": True, "norm_output": True},
        {"decoder": {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 8}},
    ],
    ids=["norm before fc", "norms", "two Qwen3 layers"],
)
def test_variants_draft_as_the_head_alone(more, monkeypatch):
    target = llama(seed=0, layers=4)
    head = random_eagle3(target, layers=(1, 2, 3), **more)
    proposals = watch_proposals(monkeypatch)
    asked = {**prompt(2), "max_new_tokens": 8, "do_sample": False}
    out = attached(target).generate(**asked, assistant_model=head, specbranch=settings())
    assert torch.equal(out, target.generate(**asked))
    for text, tokens in proposals:
        assert tokens == reference_draft(head, target, text, len(tokens))


# ---- multi-token-prediction layers


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A target and its checkpoint, in which the multi-token-prediction layer is the one after its last."""
    target, _ = small_target()
    head = random_mtp(target)
    names = {"mtp_block.": "", "post_norm": "shared_head.norm"}
    weights = {}
    for name, value in head.mtp.layers[0].state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        weights[f"model.layers.2.{name}"] = value.clone()
    target.config.save_pretrained(tmp_path)
    save_file(target.state_dict() | weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])
    return LlamaForCausalLM.from_pretrained(tmp_path).eval(), head


@pytest.mark.compat
@pytest.mark.matrix
@pytest.mark.parametrize("asked", ["draft", "use_mtp"])
def test_layers_come_from_the_checkpoint(checkpoint, asked, monkeypatch):
    target, head = checkpoint
    model = specbranch(target, draft="mtp") if asked == "draft" else specbranch(target)
    proposals = watch_proposals(monkeypatch)
    more = {} if asked == "draft" else {"use_mtp": True}
    inputs = {**prompt(2, 12, vocabulary=12), "max_new_tokens": 16, "do_sample": False}
    out = model.generate(**inputs, **more, specbranch=settings())
    assert set(model.specbranch_stats.sources) == {"MTP"}
    assert torch.equal(out, target.generate(**inputs, specbranch=False))
    for text, tokens in proposals:
        assert tokens == reference_draft(head, target, text, len(tokens))


@pytest.mark.skipif(MTP_LAYERS_FAIL, reason="these layers of transformers fail in this release")
def test_the_first_draft_token_is_that_of_transformers():
    target, head = target_and_mtp()
    ids = prompt(1, 12, vocabulary=12)["input_ids"]
    with torch.no_grad():
        hidden = target(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        cache = MtpCache(config=target.config.get_mtp_config())
        positions = torch.arange(1, ids.shape[1])[None]
        mask = torch.ones_like(positions)
        tokens, *_ = head.mtp(ids[:, 1:], hidden, mask, positions, cache)
    assert tokens[0].tolist() == reference_draft(head, target, ids[0].tolist(), 1)


def test_a_target_without_layers_says_so():
    with pytest.raises(ValueError, match="num_mtp_layers"):
        specbranch(llama(seed=0), draft="mtp")
    target, _ = small_target()
    with pytest.raises(ValueError, match="not loaded from a checkpoint"):
        specbranch(target).generate(**prompt(1, vocabulary=12), max_new_tokens=2, use_mtp=True)


# ---- block drafts


@pytest.mark.compat
@pytest.mark.matrix
def test_a_block_draft_is_recognised(tmp_path):
    """By its config in a folder, or as transformers takes it."""
    target, _ = small_target()
    draft = random_block_draft(target)
    draft.save_pretrained(tmp_path)
    inputs = {**prompt(2, 12, vocabulary=12), "max_new_tokens": 8, "do_sample": False}
    expected = target.generate(**inputs)
    loaded = specbranch(copy.deepcopy(target), draft=tmp_path)
    named = attached(target)
    for model, more in ((loaded, {}), (named, {"assistant_model": draft, "speculation_type": "dflash"})):
        out = model.generate(**inputs, **more, specbranch=settings())
        assert torch.equal(out, expected) and set(model.specbranch_stats.sources) == {"DFlash"}
    with pytest.raises(ValueError, match="drafts while the target verifies"):
        loaded.generate(**inputs, specbranch=settings("specbranch"))
