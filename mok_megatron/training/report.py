"""The quick start's result as a table, a picture and ``summary.json``."""

import json
from pathlib import Path
from typing import Any

# Largest differences that pass, by dtype: uninterrupted runs against each other, resumed against uninterrupted under
# the same dispatcher, and the next losses of a checkpoint that changed dispatchers. In bf16 the dispatchers round
# intermediate sums differently, so only a resumed run can repeat another closely.
LIMITS = {
    "fp32": {"loss": 1e-4, "resume": 1e-6, "exchange": 1e-6},
    "bf16": {"loss": 5e-2, "resume": 1e-6, "exchange": 2e-2},
}

Losses = dict[str, list[float]]


def summarize(trained: dict[str, Any], resumed: Losses, save_step: int, dtype: str) -> dict[str, Any]:
    """The contents of ``summary.json``.

    Args:
        trained: of two dispatchers, ``loss`` (a list of every step's), ``tokens_per_s`` and ``seconds``.
        resumed: losses after a checkpoint, under keys ``<source>_to_<dispatcher>``.
        save_step: steps behind the checkpoints.
        dtype: ``fp32`` or ``bf16``.

    Returns:
        ``steps``, ``dtype``, ``loss``, ``max_abs_loss_diff``, ``resume_max_abs_loss_diff``, ``checkpoint_exchange``
        (``<source>_to_<dispatcher>``: largest difference of the next losses from the source's uninterrupted run),
        ``tokens_per_s``, ``seconds``, ``limits``, ``passed``.
    """
    loss: Losses = trained["loss"]
    first, second = loss
    limits = LIMITS[dtype]
    against_source = {
        name: largest_difference(losses, loss[name.split("_to_")[0]][save_step:]) for name, losses in resumed.items()
    }
    same = max(against_source[f"{name}_to_{name}"] for name in loss)
    exchange = {name: diff for name, diff in against_source.items() if len(set(name.split("_to_"))) == 2}
    difference = largest_difference(loss[first], loss[second])
    return {
        "steps": len(loss[first]),
        "dtype": dtype,
        "loss": loss,
        "max_abs_loss_diff": difference,
        "resume_max_abs_loss_diff": same,
        "checkpoint_exchange": exchange,
        "checkpoint_step": save_step,
        "tokens_per_s": trained["tokens_per_s"],
        "seconds": trained["seconds"],
        "limits": limits,
        "passed": difference < limits["loss"]
        and same < limits["resume"]
        and all(diff < limits["exchange"] for diff in exchange.values()),
    }


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Largest absolute difference of two curves over their common steps; infinite where there is a NaN or no step."""
    pairs = list(zip(losses, others, strict=False))
    differences = [abs(a - b) for a, b in pairs]
    if not pairs or any(diff != diff for diff in differences):
        return float("inf")
    return max(differences)


def table(summary: dict[str, Any]) -> str:
    """The summary for a terminal: losses at a few steps, then one line a check."""
    loss: Losses = summary["loss"]
    first, second = loss
    last = summary["steps"]
    shown = sorted({1, last // 4, last // 2, 3 * last // 4, last} - {0})
    lines = [f"{'step':>6}  {'loss, ' + first:>14}  {'loss, ' + second:>14}  {'difference':>10}"]
    for step in shown:
        a, b = loss[first][step - 1], loss[second][step - 1]
        lines.append(f"{step:>6}  {a:>14.6f}  {b:>14.6f}  {abs(a - b):>10.1e}")
    rates = "  ".join(f"{name} {rate:,.0f}" for name, rate in summary["tokens_per_s"].items())
    lines += ["", f"tokens/s (median step): {rates}", ""]
    limits = summary["limits"]
    checks = [
        (f"largest loss difference over {last} steps", summary["max_abs_loss_diff"], limits["loss"]),
        ("resumed run against the uninterrupted one", summary["resume_max_abs_loss_diff"], limits["resume"]),
    ]
    for name, difference in summary["checkpoint_exchange"].items():
        checks.append((f"checkpoint of {name.replace('_to_', ' continued under ')}", difference, limits["exchange"]))
    for name, difference, limit in checks:
        verdict = "ok" if difference < limit else "TOO LARGE"
        lines.append(f"{name:48} {difference:8.1e}  (limit {limit:.0e})  {verdict}")
    return "\n".join(lines)


def draw(summary: dict[str, Any], path: Path) -> None:
    """Write the loss curves and their difference as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    loss: Losses = summary["loss"]
    first, second = loss
    steps = range(1, summary["steps"] + 1)
    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    curves.plot(steps, loss[second], color="tab:orange", linewidth=4, alpha=0.5, label=second)
    curves.plot(steps, loss[first], color="tab:blue", linewidth=1.2, label=first)
    curves.axvline(summary["checkpoint_step"], color="grey", linestyle=":", label="checkpoint")
    curves.set_ylabel("loss (nats a byte)")
    curves.legend(frameon=False)
    gaps = [abs(a - b) for a, b in zip(loss[first], loss[second], strict=True)]
    differences.semilogy(steps, [gap or None for gap in gaps], ".", color="tab:blue", markersize=4)
    differences.axhline(summary["limits"]["loss"], color="tab:red", linewidth=1, label="limit")
    differences.set_ylabel(f"|{first} - {second}|")
    differences.set_xlabel("step")
    differences.legend(frameon=False)
    figure.savefig(path, dpi=150)


def write_summary(summary: dict[str, Any], path: Path) -> None:
    """Write ``summary.json``."""
    path.write_text(json.dumps(summary, indent=2) + "\n")
