"""`hf-specbranch bench --families`: time models with random weights against the time to read their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ..bench.families import FamiliesBenchmark, FamiliesPlan
from ..bench.families_report import build_families, families_markdown, print_families
from ..bench.methods import Overrides
from ..bench.shapes import SHAPES, config_of, shrunk
from .bench_report import Files, exit_status
from .names import check_folder
from .pair import device_of, dtype_of, naming_option
from .printing import Console, leaving_cleanly, terminable
from .progress import showing_progress


def families_and_show(names: list[str], overrides: Overrides, files: Files, given: dict[str, Any]) -> int:
    """Time models with random weights and report it, interrupted or not.

    Args:
        names: of shapes, repositories or folders.
        overrides: what the user set for our methods.
        files: to write.
        given: the options of the command.

    Returns:
        The exit status: 130 or 143 if it was interrupted, 1 if a model failed, else 0.
    """
    plan = FamiliesPlan(
        device_of(given["device"]),
        dtype_of(given["dtype"]),
        overrides.settings("autoregressive"),
        given["context_length"],
        given["max_new_tokens"],
        given["repeat"],
        given["plain"],
        None if given["bandwidth"] is None else given["bandwidth"] * 1e12,
        given["seed"],
    )
    stopped: BaseException | None = None
    with leaving_cleanly(), terminable():
        configs = family_configs(names, given["tiny"])
        with showing_progress(len(configs)) as progress:
            benchmark = FamiliesBenchmark(configs, plan, progress)
            try:
                benchmark.run()
            except (KeyboardInterrupt, Exception) as error:  # keep what is measured so far
                stopped = error
        report = build_families(benchmark, given, interrupted=stopped is not None)
        try:
            print_families(report, Console())
        finally:  # the reader of a pipe may be gone
            files.write(report, families_markdown)
    return exit_status(stopped, failed=any(result.failed for result in benchmark.results.values()))


def family_configs(names: list[str], tiny: bool) -> dict[str, PreTrainedConfig]:
    """Return the configurations of the named models; "all" stands for every shape of ours.

    Args:
        names: of shapes, repositories or folders with a config.json.
        tiny: shrink every size, keep the architecture.

    Raises:
        ValueError: there is no such shape.
        OSError: there is no such folder or repository.
    """
    chosen = list(SHAPES) if names == ["all"] else list(dict.fromkeys(names))
    if not chosen:
        raise ValueError(f"--families is empty: expected all, or some of {', '.join(SHAPES)}, ids or folders")
    for name in chosen:
        check_folder("--families", name)
        if name.lower() not in SHAPES and "/" not in name and not Path(name).is_dir():
            raise ValueError(
                f"--families {name}: expected all, a folder, a repository id, or one of {', '.join(SHAPES)}"
            )
    return {name: _config(name, tiny) for name in chosen}


def _config(name: str, tiny: bool) -> PreTrainedConfig:
    if name.lower() in SHAPES:
        return config_of(name.lower(), tiny=tiny)
    with naming_option("--families", name):
        config: PreTrainedConfig = AutoConfig.from_pretrained(name).get_text_config(decoder=True)
    config.quantization_config = None  # random weights are not quantised
    if not tiny:
        return config
    figures = {key: value for key, value in config.to_dict().items() if key != "model_type"}
    small: PreTrainedConfig = AutoConfig.for_model(config.model_type, **shrunk(figures))
    return small
