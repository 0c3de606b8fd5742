"""Does the std of fresh weights decide whether a deep, narrow GPT trains at a hot learning rate? Curves and a picture.

Weights drawn with std 0.02 broke a 104B GPT of hidden size 11600; sqrt(1/(3 hidden)), 0.00536 there, held. Below hidden
size 833 the formula gives more than 0.02, so 0.02 alone would test the opposite of that story. Three stds are compared:

  0.02           literally, the smallest of the three at these widths
  formula        sqrt(1/(3 hidden))
  3.73 formula   as far above the formula as 0.02 was in the 104B model

Runs of one seed see the same samples in the same order, and draw the same random numbers times their std. Finished runs
stand in the --output file and are not repeated, so a sweep and more seeds are further calls (the plot extra is needed):

  export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu
  python benchmarks/init_std.py --lrs 1e-3 3e-3 1e-2 3e-2 --seeds 1     # how hot may it be?
  python benchmarks/init_std.py --lrs 3e-3 1e-2 --seeds 1 2 3           # more seeds of two
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from small_runs import build_engine

from megastable.config import RunConfig, run_from_dict
from megastable.core.init_std import MatrixSize, megatron_530b
from megastable.core.launch import Launch
from megastable.core.records import TrainingState
from megastable.core.scripts import Parser, run_script
from megastable.data import BlendedCorpus, Corpus, prepare_corpus, training_micro_batches
from megastable.engine.process_group import connected
from megastable.planning.run_plan import RunPlan

RATIO_OF_104B = 0.02 / megatron_530b(MatrixSize.square(11600), None)
STDS: dict[str, Callable[[int], float]] = {
    "0.02": lambda hidden: 0.02,
    "formula": lambda hidden: megatron_530b(MatrixSize.square(hidden), None),
    "3.73 formula": lambda hidden: RATIO_OF_104B * megatron_530b(MatrixSize.square(hidden), None),
}
COLORS = dict(zip(STDS, ("tab:blue", "tab:green", "tab:red"), strict=True))
RESULTS = Path(__file__).parent / "results"
FINAL_STEPS = 10
SPIKE_NATS = 1.5  # with 1.0, samples that are hard for every std were counted, too

Run = dict[str, Any]
"""What was run, and the ``loss`` (nats a token) and ``grad_norm`` (before clipping) of each step."""


def run_config(arguments: argparse.Namespace, hidden: int, std: float, lr: float, seed: int) -> RunConfig:
    """Build the run of a GPT-2-like model: a short warmup, then a constant learning rate, clip norm 1 as at 104B."""
    return run_from_dict(
        {
            "train_micro_batch_size_per_gpu": arguments.batch,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "megastable": {
                "model": {
                    "num_layers": arguments.layers, "hidden_size": hidden, "num_attention_heads": hidden // 32,
                    "seq_length": arguments.seq_length, "vocab_size": 257, "position_embedding": "learned",
                },
                "batch_rampup": {"final": arguments.batch},
                "lr_schedule": {"type": "constant", "warmup": arguments.batch * arguments.warmup_steps},
                "init": {"scheme": "fixed", "std": std, "residual_scaling": True},
                "data": {
                    "source": {"type": "stdlib"}, "tokenizer": {"type": "bytes"}, "cache_dir": arguments.cache_dir,
                },
                "training": {"total_steps": arguments.steps, "seed": seed},
            },
        }
    )  # fmt: skip


def train(plan: RunPlan, corpus: Corpus | BlendedCorpus) -> tuple[list[float], list[float]]:
    """Train a planned run; returns the losses and gradient norms of all its steps."""
    engine = build_engine(plan)
    order = corpus.order(plan.run.megastable.training.seed)
    state = TrainingState()
    losses = []
    norms = []
    for _ in range(plan.length.total_steps):
        batch = engine.rampup_hook.before_step(state.consumed_samples)
        micro_batches = training_micro_batches(corpus.train, order, batch, state.consumed_samples, 0, 1)
        result = engine.train_batch(micro_batches, plan.learning_rate(state.applied_samples, batch))
        state = state.advance(batch, result, plan.run.megastable.model.seq_length)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return losses, norms


def run_all(arguments: argparse.Namespace, settings: dict[str, Any], runs: list[Run]) -> None:
    """Train what ``runs`` lacks; the results file is whole after every run."""
    grid = [
        {"hidden": hidden, "lr": lr, "seed": seed, "init": name}
        for hidden in arguments.hidden for lr in arguments.lrs for seed in arguments.seeds for name in STDS
    ]  # fmt: skip
    done = [{key: run[key] for key in ("hidden", "lr", "seed", "init")} for run in runs]
    with connected(Launch.detect(os.environ)):
        for what in (what for what in grid if what not in done):
            std = STDS[what["init"]](what["hidden"])
            plan = RunPlan.of(run_config(arguments, what["hidden"], std, what["lr"], what["seed"]), 1)
            corpus = prepare_corpus(plan.run.megastable.data, plan.run.megastable.model, show_progress=True)
            settings["unigram_entropy_nats"] = round(corpus.unigram_entropy_nats, 3)
            losses, norms = train(plan, corpus)
            run = {**what, "std": rounded(std), "loss": [*map(rounded, losses)], "grad_norm": [*map(rounded, norms)]}
            runs.append(run)
            write_results(arguments.output, settings, runs)
            print(what, f"final loss {final_loss(run):.2f}", flush=True)


def rounded(value: float) -> float | None:
    """Round to four digits; None where the value is not finite, which JSON cannot say."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def write_results(path: Path, settings: dict[str, Any], runs: list[Run]) -> None:
    """Write one JSON object, a run a line."""
    lines = ",\n".join(json.dumps(run) for run in runs)
    path.write_text(f'{{"settings": {json.dumps(settings)},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8")


def read_results(path: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], list[Run]]:
    """Read the settings and runs of ``path``, no runs before it exists. Exits where its runs are not comparable."""
    if not path.exists():
        return settings, []
    results = json.loads(path.read_text(encoding="utf-8"))
    different = {key: value for key, value in settings.items() if results["settings"][key] != value}
    if different:
        raise SystemExit(f"{path} was recorded with other settings than {different}; name another --output")
    return results["settings"], results["runs"]


def final_loss(run: Run) -> float:
    """Return the mean of the last steps, infinite where one of them is not finite."""
    return statistics.mean(number(loss) for loss in run["loss"][-FINAL_STEPS:])


def number(recorded: float | None) -> float:
    """Return a recorded value, infinite where it was not finite."""
    return math.inf if recorded is None else recorded


def spikes(run: Run, settings: dict[str, Any]) -> list[int]:
    """Find the steps after the warmup whose loss is not finite or SPIKE_NATS above the median of the ten before."""
    losses = [number(loss) for loss in run["loss"]]
    first = max(settings["warmup_steps"], 1)  # step 0 has none before it
    return [
        step
        for step in range(first, len(losses))
        if not losses[step] < statistics.median(losses[max(0, step - 10) : step]) + SPIKE_NATS
    ]


def untrained(run: Run, settings: dict[str, Any]) -> bool:
    """Tell whether the run ends no better than the frequencies of single bytes."""
    return final_loss(run) > settings["unigram_entropy_nats"]


TABLE_HEAD = """
| hidden | LR | init | std | final loss of every seed | minus formula's | above bytes | spiked | largest gradient norm |
|---|---|---|---|---|---|---|---|---|"""


def print_table(runs: list[Run], settings: dict[str, Any]) -> None:
    """Print a line for each hidden size, learning rate and std, with the values of its runs in the order of seeds."""
    print(TABLE_HEAD)
    formula = {(run["hidden"], run["lr"], run["seed"]): run for run in runs if run["init"] == "formula"}
    for hidden, lr in sorted({(run["hidden"], run["lr"]) for run in runs}):
        for name in STDS:
            same = [run for run in runs if (run["hidden"], run["lr"], run["init"]) == (hidden, lr, name)]
            same.sort(key=lambda run: run["seed"])
            pairs = [(run, formula.get((hidden, lr, run["seed"]))) for run in same]
            differences = [final_loss(run) - final_loss(twin) for run, twin in pairs if twin is not None]
            norms = [max(map(number, run["grad_norm"][settings["warmup_steps"] :])) for run in same]
            cells = [
                str(hidden),
                f"{lr:g}",
                name,
                f"{STDS[name](hidden):.4f}",
                " ".join(f"{final_loss(run):.2f}" for run in same),
                " ".join(f"{difference:+.2f}" for difference in differences),
                str(sum(untrained(run, settings) for run in same)),
                str(sum(bool(spikes(run, settings)) for run in same)),
                " ".join(f"{norm:.1f}" for norm in norms),
            ]
            print(f"| {' | '.join(cells)} |")


def draw(settings: dict[str, Any], runs: list[Run], output: Path) -> None:
    """Draw curves of every hidden size and learning rate that has most seeds; below, the final losses of all runs."""
    # Here and not above, so that --help needs no matplotlib.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    seeds = Counter((run["hidden"], run["lr"]) for run in runs)
    pairs = sorted(pair for pair, count in seeds.items() if count == max(seeds.values()))
    widths = sorted({run["hidden"] for run in runs})
    figure = Figure(figsize=(12, 3.0 * len(pairs) + 3.8), layout=ConstrainedLayoutEngine(w_pad=0.1))
    curves, finals = figure.subfigures(2, 1, squeeze=False, height_ratios=(3.0 * len(pairs), 3.8))[:, 0]
    for (hidden, lr), (loss_axes, norm_axes) in zip(pairs, curves.subplots(len(pairs), 2, squeeze=False), strict=True):
        chosen = [run for run in runs if (run["hidden"], run["lr"]) == (hidden, lr)]
        title = (
            f"{settings['layers']} blocks of hidden {hidden}, LR {lr:g}, {len({run['seed'] for run in chosen})} seeds"
        )
        draw_curves(loss_axes, chosen, settings, "loss")
        loss_axes.set(title=title, ylabel="loss (nats per token)")
        draw_curves(norm_axes, chosen, settings, "grad_norm")
        norm_axes.set(title=title, ylabel="gradient norm before clipping", yscale="log")
    for hidden, axes in zip(widths, finals.subplots(1, len(widths), squeeze=False)[0], strict=True):
        draw_final_losses(axes, [run for run in runs if run["hidden"] == hidden])
        axes.set(title=f"hidden {hidden}: a dot a run, a line a seed", xlabel="learning rate", xscale="log")
        axes.set_ylabel(f"mean loss of the last {FINAL_STEPS} steps\n(nats per token)")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        if "loss" in axes.get_ylabel():
            axes.axhline(settings["unigram_entropy_nats"], color="black", linestyle=":", label="byte frequencies alone")
            axes.legend(frameon=False, fontsize=8)
    figure.suptitle(
        "line: mean over the seeds; band: their range; triangle: spike of a run; cross: a run that ends above "
        "what byte frequencies alone give",
        fontsize=9,
    )
    figure.savefig(output, dpi=80)


def draw_curves(axes: Any, runs: list[Run], settings: dict[str, Any], key: str) -> None:
    """Draw the mean and range over the seeds for each std, a cross at an untrained end and triangles at spikes."""
    for name, color in COLORS.items():
        of_init = [run for run in runs if run["init"] == name]
        curves = [[math.nan if value is None else value for value in run[key]] for run in of_init]
        steps = range(settings["steps"])
        by_step = list(zip(*curves, strict=True))
        label = f"std {name}"
        if name != "0.02":
            label += f" = {of_init[0]['std']:.3f}"
        axes.plot(steps, [statistics.mean(values) for values in by_step], color=color, linewidth=1.3, label=label)
        axes.fill_between(
            steps, [min(values) for values in by_step], [max(values) for values in by_step],
            color=color, alpha=0.18, linewidth=0,
        )  # fmt: skip
        for run, curve in zip(of_init, curves, strict=True):
            spiked = spikes(run, settings)
            axes.plot(spiked, [curve[step] for step in spiked], "v", color=color, markersize=5)
            if untrained(run, settings):
                axes.plot(len(curve) - 1, curve[-1], "x", color=color, markersize=8, clip_on=False)
    axes.axvline(settings["warmup_steps"], color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("step (dashed: end of the warmup)")


def draw_final_losses(axes: Any, runs: list[Run]) -> None:
    """Draw the final loss over the learning rate: a dot a run, a line through those of one seed."""
    for name, color in COLORS.items():
        for number_of_line, seed in enumerate(sorted({run["seed"] for run in runs})):
            of_seed = sorted(
                (run for run in runs if (run["init"], run["seed"]) == (name, seed)), key=lambda run: run["lr"]
            )
            label = f"std {name}" if number_of_line == 0 else None  # one entry of the legend for all seeds
            axes.plot(
                [run["lr"] for run in of_seed], [final_loss(run) for run in of_seed],
                "o-", color=color, markersize=3, linewidth=1, label=label,
            )  # fmt: skip


def main() -> None:
    """Train what is asked for and not recorded yet; print a table and draw all that is recorded."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 128], help="hidden sizes, multiples of 32")
    parser.add_argument("--lrs", type=float, nargs="+", default=[3e-3, 1e-2], help="learning rates (3e-3 1e-2)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of weights and data order")
    parser.add_argument("--layers", type=int, default=16, help="transformer blocks (16)")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens a sample, a byte each (64)")
    parser.add_argument("--batch", type=int, default=4, help="samples a step (4)")
    parser.add_argument("--steps", type=int, default=80, help="steps of a run (80)")
    parser.add_argument("--warmup-steps", type=int, default=10, help="steps of linear warmup (10)")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "init_std.json", help="results; the picture goes beside"
    )
    parser.add_argument("--cache-dir", help="folder for the tokenised text (~/.cache/megastable)")
    arguments = parser.parse_args()
    if find_spec("matplotlib") is None:
        parser.error("the picture needs matplotlib: pip install 'megastable[plot]'")
    settings = {key: getattr(arguments, key) for key in ("layers", "seq_length", "batch", "steps", "warmup_steps")}
    settings, runs = read_results(arguments.output, settings)
    run_all(arguments, settings, runs)
    print_table(runs, settings)
    draw(settings, runs, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    run_script(main)
