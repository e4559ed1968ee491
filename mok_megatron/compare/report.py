"""The comparison as a table, JSON and a Markdown report."""

from __future__ import annotations

import json
import platform
import shlex
from pathlib import Path
from typing import Any

from mok_megatron import versions
from mok_megatron.bench.report import DISTRIBUTIONS, commit, hardware
from mok_megatron.compare.log import Training
from mok_megatron.compare.presets import Preset, preset_model
from mok_megatron.training.report import largest_difference, write_summary

BASELINE = "alltoall"
"""The dispatcher that the others' losses and times are set against."""

HEADERS = ("dispatcher", "ms/step", "tokens/s/GPU", "TFLOP/s/GPU", "peak GB", "loss 1", "loss 10", "loss last", "diff")


def summarize(preset: Preset, trained: dict[str, Training], absent: dict[str, str]) -> dict[str, Any]:
    """The contents of ``summary.json``, without where it ran.

    Args:
        trained: the runs that finished, by dispatcher.
        absent: those that did not, with the reason.

    Returns:
        ``preset``, ``steps``, ``results`` (by dispatcher: see `Training.as_dictionary`; ``max_abs_loss_diff`` and
        ``max_rel_loss_diff`` to the baseline, None without one; ``speedup``: the baseline's step by this one's),
        ``not_run``.
    """
    base = trained.get(BASELINE)
    results: dict[str, dict[str, Any]] = {}
    for name, training in trained.items():
        results[name] = training.as_dictionary()
        results[name]["max_abs_loss_diff"] = None if base is None else largest_difference(training.loss, base.loss)
        results[name]["max_rel_loss_diff"] = None if base is None else relative_difference(training.loss, base.loss)
        results[name]["speedup"] = None if base is None else base.step_ms / training.step_ms
    steps = max((len(training.loss) for training in trained.values()), default=0)
    return {"preset": preset.name, "steps": steps, "baseline": BASELINE, "results": results, "not_run": absent}


def relative_difference(losses: list[float], base: list[float]) -> float:
    """Largest difference of two curves relative to ``base``; infinite where there is a NaN or no step."""
    return largest_difference([a / b for a, b in zip(losses, base, strict=False)], [1.0] * len(base))


def describe_run(commands: dict[str, list[str]], on_gpus: bool) -> dict[str, Any]:
    """Where and with what it ran: hardware, versions, commit, commands."""
    import torch

    device = torch.device("cuda" if on_gpus else "cpu")
    return {
        "hardware": hardware(device) | ({"gpus": torch.cuda.device_count()} if on_gpus else {}),
        "versions": {"python": platform.python_version(), **{name: versions.installed(name) for name in DISTRIBUTIONS}},
        "commit": commit(),
        "commands": {name: shlex.join(command) for name, command in commands.items()},
    }


def explain_by_layers(
    preset: Preset, trained: dict[str, Training], record: dict[str, Any] | None
) -> dict[str, dict[str, float]]:
    """How much of a step's difference to mok the MoE layers alone explain: {dispatcher: ms a step}.

    A layer's difference in the layer benchmark, times the MoE layers (MTP included) and microbatches of a step. Empty
    without the benchmark, without mok, or with a pipeline, where layers of several stages run at once.

    Args:
        record: the JSON of ``mok-megatron bench``.
    """
    mok = trained.get("mok")
    if record is None or mok is None or mok.arguments.get("pipeline_model_parallel_size") != 1:
        return {}
    model = preset_model(preset)
    layers = model.moe.num_moe_layers + model.model.mtp_layers
    entries = record["results"][0]["implementations"]
    times = {entry["name"]: entry["times"]["both"] for entry in entries if entry["times"]}
    explained = {}
    for name, training in trained.items():
        if name != "mok" and name in times and "mok" in times:
            explained[name] = {
                "step_difference_ms": training.step_ms - mok.step_ms,
                "moe_layers_difference_ms": (times[name] - times["mok"]) * layers * mok.microbatches,
                "moe_layers_of_mok_ms": times["mok"] * layers * mok.microbatches,
            }
    return explained


def rows(summary: dict[str, Any]) -> list[list[str]]:
    """Cells of the table, a row a dispatcher, in the order of `HEADERS`; ``-`` where there is nothing to say."""
    lines = []
    for name, result in summary["results"].items():
        loss, peak, difference = result["loss"], result["peak_gb"], result["max_abs_loss_diff"]
        lines.append(
            [
                name,
                f"{result['ms_per_step']:,.1f}",
                f"{result['tokens_per_s_per_gpu']:,.0f}",
                f"{result['tflops_per_gpu']:.1f}" if result["tflops_per_gpu"] else "-",
                "-" if peak is None else f"{peak:.1f}",
                f"{loss[0]:.6f}",
                f"{loss[9]:.6f}" if len(loss) > 9 else "-",
                f"{loss[-1]:.6f}",
                "-" if difference is None or name == BASELINE else f"{difference:.1e}",
            ]
        )
    return lines


def table(summary: dict[str, Any]) -> str:
    """The table for a terminal, then what was not run."""
    cells = [list(HEADERS), *rows(summary)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADERS))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    return "\n".join([*lines, *(f"{name}: not run: {reason}" for name, reason in summary["not_run"].items())])


def conclusions(summary: dict[str, Any]) -> list[str]:
    """What the figures say, a sentence each; nothing that was not measured."""
    results = summary["results"]
    mok = results.get("mok")
    if mok is None:
        return ["mok did not run, so there is nothing to conclude about it."]
    sentences = []
    for name, other in results.items():
        if name == "mok":
            continue
        ratio = other["ms_per_step"] / mok["ms_per_step"]
        text = (
            f"A step under mok takes {mok['ms_per_step']:,.1f} ms against {other['ms_per_step']:,.1f} ms under {name}"
        )
        text += f" ({ratio:.2f}x)"
        if mok["peak_gb"] and other["peak_gb"]:
            text += f", and {mok['peak_gb']:.1f} GB against {other['peak_gb']:.1f} GB"
        sentences.append(text + ".")
    if mok["max_rel_loss_diff"] is not None and BASELINE in results:
        sentences.append(
            f"Over {summary['steps']} steps mok's loss differs from {BASELINE}'s by at most "
            f"{mok['max_rel_loss_diff']:.1e} of it."
        )
    if mok.get("kernel_ms_per_step"):
        kernels = mok["kernel_ms_per_step"]
        sentences.append(
            f"The kernels of the fused layers take {kernels:,.1f} ms of mok's step "
            f"({kernels / mok['ms_per_step']:.0%}), measured in that training by events around them."
        )
    for name, result in results.items():
        if result.get("moe_ms_per_step"):
            moe, step = result["moe_ms_per_step"], result["ms_per_step"]
            sentences.append(
                f"Whole MoE layers, with router and shared expert, take {moe:,.1f} ms of a step under {name} "
                f"({moe / step:.0%}); what is not MoE takes {step - moe:,.1f} ms ({1 - moe / step:.0%})."
            )
    for name, part in summary.get("moe_layers", {}).items():
        share = part["moe_layers_of_mok_ms"] / mok["ms_per_step"]
        sentences.append(
            f"By the layer benchmark, MoE layers alone account for {part['moe_layers_difference_ms']:,.1f} of the "
            f"{part['step_difference_ms']:,.1f} ms between {name} and mok; they are {share:.0%} of mok's step."
        )
    return sentences


def markdown_rows(summary: dict[str, Any]) -> list[str]:
    """The table in Markdown; the documents quote a record with these lines."""
    lines = ["| " + " | ".join(HEADERS) + " |", "|---" + "|---:" * (len(HEADERS) - 1) + "|"]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows(summary)]


def markdown(summary: dict[str, Any]) -> str:
    """The report for people."""
    run = summary["run"]
    steps = summary["steps"]
    skipped = max((result["median_leaves_out_first"] for result in summary["results"].values()), default=0)
    lines = [f"# Token dispatchers compared: {summary['preset']}, {steps} steps", ""]
    lines += markdown_rows(summary)
    lines += [
        "",
        f"Same model, seed, data and steps for all, one after another. Times are medians over steps, without the first "
        f"{skipped}; TFLOP/s by Megatron's count; peak memory is torch's largest "
        "allocation and what peers map; `diff` is the largest "
        f"absolute difference of the loss to {BASELINE}'s over all steps.",
        "",
        "![loss and speed](compare.png)",
        "",
        *(f"- {sentence}" for sentence in conclusions(summary)),
        *(f"- {name} was not run: {reason}" for name, reason in summary["not_run"].items()),
    ]
    lines += ["", "## One MoE layer", ""]
    lines += ["```", summary["layer_table"], "```"] if "layer_table" in summary else [summary["no_layer"]]
    lines += ["", "## Where and how", "", f"- commit {run['commit'] or 'unknown'}"]
    lines += ["- " + ", ".join(f"{name} {value}" for name, value in run["hardware"].items() if value is not None)]
    lines += ["- " + ", ".join(f"{name} {value}" for name, value in run["versions"].items() if value is not None)]
    lines += ["", "```"] + list(run["commands"].values()) + ["```"]
    return "\n".join(lines) + "\n"


def write(summary: dict[str, Any], folder: Path) -> None:
    """Write ``summary.json`` and ``report.md``."""
    write_summary(summary, folder / "summary.json")
    (folder / "report.md").write_text(markdown(summary))


def read(path: Path) -> dict[str, Any] | None:
    """A JSON record, or None where there is none."""
    return json.loads(path.read_text()) if path.is_file() else None
