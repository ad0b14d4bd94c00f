"""Graph runners on a CPU, and what the tests of prefix reuse share."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from transformers import DynamicCache

from hf_specbranch import specbranch
from hf_specbranch.runtime import capture_trial, cuda_graph, selection
from hf_specbranch.runtime.cuda_graph import GraphRunner

from .models import VOCABULARY, config, llama


class EagerGraphs:
    """In place of the memory of CUDA graphs. A replay runs the stage that was captured: its Python code is not new."""

    def __init__(self, device):
        self.captures, self.seconds, self.num_bytes = 0, 0.0, 0

    @contextmanager
    def capturing(self):
        yield
        self.captures += 1

    def run_and_record(self, stage, generators=()):
        stage()
        return [SimpleNamespace(replay=stage)]


def run_graphs_on_cpu(monkeypatch, graphs=EagerGraphs):
    """Let models on a CPU have the runners of a GPU, through the torch references of our kernels.

    Stages have static shapes and are kept by key. Single forwards are not captured.

    Args:
        monkeypatch: of the test.
        graphs: what takes the place of `GraphMemory`.
    """
    monkeypatch.setattr(selection, "why_not_captured", lambda model: "")
    monkeypatch.setattr(capture_trial, "why_it_syncs", lambda *_: "")
    monkeypatch.setattr(cuda_graph, "GraphMemory", graphs)
    monkeypatch.setattr(GraphRunner, "forward", GraphRunner.forward_uncaptured)


def tokens(length, seed=0, rows=1, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator).to(device)


class Comparison:
    """A plain model and its twin under SpecBranch, whose texts must be equal, call by call.

    Args:
        target: of both.
        draft: the draft model.
        new_tokens: of each call.
        model: the twin, if there is one already.
        settings: of SpecBranch.
    """

    def __init__(self, target, draft, new_tokens=24, model=None, **settings):
        self.plain, self.draft = target, draft
        self.model = specbranch(copy.deepcopy(target)) if model is None else model
        self.settings = {"kernels": True, **settings}
        self.kwargs = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}

    @property
    def stats(self):
        return self.model.specbranch_stats

    def __call__(self, ids, settings=None, attention_mask=None, cached=0, **more):
        """Generate with both and compare; return the text."""
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        texts = []
        own = {"assistant_model": self.draft, "specbranch": config(**{**self.settings, **(settings or {})})}
        for model, extra in ((self.plain, {}), (self.model, own)):
            if cached:  # keys and values of the first tokens are given
                more["past_key_values"] = DynamicCache(config=self.plain.config)
                with torch.no_grad():
                    self.plain(ids[:, :cached], past_key_values=more["past_key_values"], use_cache=True)
            out = model.generate(ids, attention_mask=mask, **self.kwargs, **more, **extra)
            texts.append(out if torch.is_tensor(out) else out.sequences)
        assert torch.equal(*texts), (texts[0] != texts[1]).nonzero()[:1].tolist()
        return texts[0]

    def reused(self, ids, *args, **more):
        """Generate with both and compare; return how many tokens were reused."""
        self(ids, *args, **more)
        return self.stats.reused_tokens


# ---- changes of a model after which no key or value may be reused


def scaled_in_place(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def scaled_through_data(model):
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)


def one_element_through_data(model):
    model.model.layers[0].self_attn.v_proj.weight.data[3, 5] += 2.0


def last_bit_of_one_element(model):
    """Too little to change a text, but the keys are others."""
    flat = model.model.embed_tokens.weight.data.view(-1)
    flat[77] = torch.nextafter(flat[77], flat.new_tensor(torch.inf))


def loaded_state(model):
    other = llama(seed=11, max_position_embeddings=model.config.max_position_embeddings)
    model.load_state_dict(other.state_dict())


def replaced_parameter(model):
    norm = model.model.layers[1].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 1.5)


def to_half_precision_and_back(model):
    model.to(torch.bfloat16).to(torch.float32)


def another_attention(model):
    model.set_attn_implementation("eager")


def changed_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(1.01)


CHANGES = (
    scaled_in_place, scaled_through_data, one_element_through_data, last_bit_of_one_element, loaded_state,
    replaced_parameter, to_half_precision_and_back, another_attention, changed_buffer,
)  # fmt: skip
