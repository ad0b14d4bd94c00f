"""The result of `head eval`, to be read."""

from __future__ import annotations

from typing import Any

NAMES = {
    "head": "head",
    "head_decisions": "head, as it decides",
    "confidence": "best threshold on confidence",
    "first_confidence": "best threshold on the first token's confidence",
    "majority": "majority class",
}


def eval_table(result: dict[str, Any]) -> str:
    """Two tables: verdicts, and their effect on whole generations."""
    verdicts = result["verdicts"]
    lines = [
        f"{result['prompts']['number']} prompts of {result['prompts']['file']}, {result['max_new_tokens']} new tokens, "
        f"gamma {result['gamma']}, epsilon {result['confidence_threshold']}, seed {result['seed']}",
        "",
        f"{'verdicts on ' + format(verdicts['lines'], ',') + ' lines':48s} macro-F1  accuracy",
    ]
    for name, words in NAMES.items():
        lines.append(f"{words:48s} {verdicts[name]['macro_f1']:8.3f}  {verdicts[name]['accuracy']:8.3f}")
    lines += ["", f"{'temperature':12s} {'method':24s} rollback rate  tokens per pass  branch hits"]
    for run in result["runs"]:
        lines.append(
            f"{run['temperature']:<12} {run['method']:24s} {run['rollback_rate']:13.3f}  "
            f"{run['tokens_per_pass']:15.3f}  {run['branch_hit_rate']:11.3f}"
        )
    return "\n".join(lines)
