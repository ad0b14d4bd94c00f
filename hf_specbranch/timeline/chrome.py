"""Chrome's trace format, which Perfetto opens too."""

from __future__ import annotations

from typing import Any

from .recording import BRANCHES, DRAFT, TARGET, Block, Recording

LANES = (TARGET, DRAFT, BRANCHES)


def chrome_trace(recordings: list[Recording]) -> dict[str, Any]:
    """The recordings as processes, their lanes as threads, their work as slices with the tokens in `args`."""
    events: list[dict[str, Any]] = []
    for process, recording in enumerate(recordings, start=1):
        events.append(_name("process_name", process, 0, recording.policy))
        for thread, lane in enumerate(LANES, start=1):
            events.append(_name("thread_name", process, thread, lane))
            events.append({**_name("thread_sort_index", process, thread, ""), "args": {"sort_index": thread}})
        events += [_slice(recording, block, process) for block in recording.blocks]
        events += [_result(recording, number, process) for number in range(len(recording.result_times))]
    stats = [recording.stats.to_dict() for recording in recordings]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"stats": stats}}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(recording: Recording, block: Block, process: int) -> dict[str, Any]:
    texts = [[_token(recording, index) for index in row] for row in block.rows]
    return {
        "ph": "X",
        "name": f"{block.name}: {''.join(token['text'] for token in texts[0])}" if texts else block.name,
        "cat": block.lane,
        "pid": process,
        "tid": 1 + LANES.index(block.lane),
        "ts": block.begin * 1e6,
        "dur": block.seconds * 1e6,
        "args": {"round": block.round, "forwards": block.forwards, "tokens": texts},
    }


def _token(recording: Recording, index: int) -> dict[str, Any]:
    drafted = recording.drafted[index]
    return {"text": recording.texts[drafted.token], "fate": drafted.fate, "confidence": drafted.confidence}


def _result(recording: Recording, number: int, process: int) -> dict[str, Any]:
    committed = [each for each in recording.committed if each.round == number]
    return {
        "ph": "i",
        "s": "p",  # drawn across the whole process
        "name": "verify result",
        "cat": "verify result",
        "pid": process,
        "tid": 1,
        "ts": recording.result_times[number] * 1e6,
        "args": {"round": number, "committed": [recording.texts[each.token] for each in committed]},
    }
