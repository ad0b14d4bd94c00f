"""The four methods, as settings of one loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """What a method does in a round.

    Attributes:
        drafts: there is a draft model at all.
        drafts_first: draft a chain before the target's pass whenever no drafted line is left.
        drafts_ahead: draft past the chain while the target verifies it.
        forks: open branches at the branch point, and let hooks cut a surviving line.
    """

    name: str
    drafts: bool = True
    drafts_first: bool = True
    drafts_ahead: bool = False
    forks: bool = False

    def depth(self, gamma: int) -> int:
        """How many tokens to draft behind the token at the branch point.

        PEARL drafts gamma tokens ahead, the branch point's among them; a branch is gamma tokens further.
        """
        return gamma if self.forks else gamma - 1


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("autoregressive", drafts=False, drafts_first=False),
        Policy("vanilla"),
        Policy("pearl", drafts_first=False, drafts_ahead=True),
        Policy("specbranch", drafts_ahead=True, forks=True),
    )
}
POLICIES["auto"] = POLICIES["specbranch"]  # what is asked of a call before anything is chosen: all that there is
