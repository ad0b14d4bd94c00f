"""A drafter that asks its hooks about every line before it is sent, not only about survivors."""

from __future__ import annotations

from .drafter import Drafter
from .line import gather_rows


class CuttingDrafter(Drafter):
    """Cuts lines straight from the draft stage as it cuts survivors, and shows hooks more of both.

    On a poorly aligned pair most rolled back tokens come from the draft stage, where a head that is only asked
    about survivors has no say. A cut line loses nothing: what is not sent becomes the main branch.
    """

    def _draft_stage(self, room: list[int]) -> None:
        empty = [length == 0 for length in self.line.length]
        super()._draft_stage(room)
        self.fresh = [empty[b] and self.line.length[b] > 0 for b in self.rows]
        self.survived = [self.survived[b] or self.fresh[b] for b in self.rows]

    def _cut(self) -> list[int]:
        line = self.line
        shown = line.survivor(self.features)
        columns = line.tensor(line.start)
        if self.hooks.draft_scores:
            ring = (columns[:, None] + line.tensor(list(range(shown.tokens.shape[1])))) % line.ring  # [B, M]
            shown = shown._replace(scores=gather_rows(line.scores, ring))
        shown = shown._replace(fresh=line.tensor([int(fresh) for fresh in self.fresh]).bool(), column=columns)
        kept = self.hooks.keep(shown).tolist()
        return [kept[b] if self.survived[b] else line.length[b] for b in self.rows]
