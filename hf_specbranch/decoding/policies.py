"""The policies: four methods, as settings of one loop."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import BLOCK_SIZE, LOOKUP_BESIDE_LEAVES, LOOKUP_TOKENS, TREE_LEAVES, SpecBranchConfig
from ..runtime.eager import EagerRunner
from ..target_heads.base import TargetHead


@dataclass(frozen=True)
class Policy:
    """What a method does in a round.

    Attributes:
        name: as in `SpecBranchConfig.policy`.
        drafts: there is a draft model.
        drafts_first: if no draft is pending, draft up to gamma tokens before the target's pass, and stop where the
            confidence is below epsilon.
        drafts_ahead: draft past the sent tokens while the target verifies them.
        forks: open side branches where the draft is uncertain, and let the length head and other hooks cut a draft that
            survived the last round.
    """

    name: str
    drafts: bool = True
    drafts_first: bool = True
    drafts_ahead: bool = False
    forks: bool = False


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("autoregressive", drafts=False, drafts_first=False),
        Policy("vanilla"),
        # After a rejection PEARL sends nothing: the target's pass verifies the first token while the draft is made.
        Policy("pearl", drafts_first=False, drafts_ahead=True),
        Policy("specbranch", drafts_ahead=True, forks=True),
    )
}
POLICIES["auto"] = POLICIES["specbranch"]  # checked as the policy that needs most, before the planner chooses


def without_alternatives(config: SpecBranchConfig, target: EagerRunner, draft: EagerRunner | None) -> SpecBranchConfig:
    """Return the settings without tree leaves for a recurrent target and without side branches for a recurrent draft.

    Such a layer reads one token after the other, so it cannot read alternatives to a token in the same row. It keeps a
    state for each token of a pass, so passes stay within a block.
    """
    if target.is_recurrent:
        config = replace(config, tree_leaves=0)
        if config.prompt_lookup_num_tokens == "auto" and config.policy == "auto":
            config = replace(config, prompt_lookup_num_tokens=BLOCK_SIZE - 1)
        elif config.lookup_tokens >= BLOCK_SIZE:
            config = replace(config, prompt_lookup_num_tokens=BLOCK_SIZE - 1)
    if draft is not None and draft.is_recurrent:
        config = replace(config, max_branches=1, max_rejection_branches=0)
        if target.is_recurrent and target.device.type == "cpu":
            # torch's convolutions on a CPU give wrong results if two threads run them at the same time.
            config = replace(config, overlap=False)
    return config


def for_head(config: SpecBranchConfig, head: TargetHead, captured: bool) -> SpecBranchConfig:
    """Return the settings for a head of the target; with `policy="auto"` plain speculation, with leaves if captured.

    A head drafts best right after the target's pass, whose hidden states it reads. What it drafts while the target
    verifies rests on its own; a block draft cannot do that.
    """
    if head.block:
        config = replace(config, max_draft_length=min(config.draft_length, head.block - 1))
    if not head.drafts_ahead and config.policy != "auto" and POLICIES[config.policy].drafts_ahead:
        raise ValueError(
            f"policy={config.policy!r} drafts while the target verifies, and {head.source} needs the target's hidden "
            f"states first: choose 'vanilla' or 'auto'"
        )
    if config.policy != "auto":
        return config
    leaves, lookup = config.tree_leaves, config.prompt_lookup_num_tokens
    if leaves == "auto":
        leaves = TREE_LEAVES if captured else 0
    if lookup == "auto":
        lookup = LOOKUP_BESIDE_LEAVES if leaves else LOOKUP_TOKENS
    return replace(config, policy="vanilla", tree_leaves=leaves, prompt_lookup_num_tokens=lookup)
