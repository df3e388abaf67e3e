"""Does a collapsed run recover from the mean of earlier snapshots? (PMA, Section 4.5, Figure 7)

Command:   python experiments/spike_recovery/script.py --runs runs/spike_recovery

For each seed, in order, a small decoder is trained at a rate that is far too high. The first three seeds whose runs
collapse permanently are used: each arm starts from the collapsing run's own state and snapshots from before the spike,
reaches the spike, and reacts to it as its configuration specifies. Arms that --runs already contains are not repeated,
so several processes can share the seeds (--seeds), and one more collects the results. Other options
(`--config.key=value`) apply to every run.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COLLAPSES = 3  # collapsed seeds to use
STEP = 512  # tokens per step
RATE, CLEAN_RATE = 0.08, 0.01  # peak learning rates: of the runs that collapse, and of the arm `clean`
BASE = [
    "model.width=32",
    "model.layers=4",
    "model.heads=2",
    "model.kv_heads=2",
    "model.head_dim=16",
    "model.hidden=96",
    "training.sequence_length_tokens=64",
    "training.batch_size_sequences=8",
    f"training.total_tokens={1000 * STEP}",
    f"training.log_interval_tokens={STEP}",
    f"schedule.peak_rate={RATE}",
    f"schedule.warmup_tokens={50 * STEP}",
    # Everything that stabilises a run at such a rate is off, and b2 is that of the original Adam paper.
    "optimizer.clip_norm=0",
    "optimizer.weight_decay=0",
    "optimizer.b2=0.999",
    f"checkpoint.interval_tokens={25 * STEP}",
    "checkpoint.kinds=point",
    f"checkpoint.state_interval_tokens={25 * STEP}",
    "checkpoint.keep_states=1000",
    "checkpoint.keep_states_at_tokens=()",
    "evaluation.tokens=8192",
    "preview.windows=()",
    "mesh.cpu_devices=1",
    # A batch of 512 tokens is noisy (spread 0.2 nats): a collapse rises only a few spreads, but it lasts.
    f"spikes.window_tokens={100 * STEP}",
    f"spikes.patience_tokens={60 * STEP}",
    "spikes.loss_z=1.7",
    "spikes.minimum_rise_nats=0.2",
    "spikes.confirm_steps=20",
]
ROLL_BACK = ["spikes.attempts=1", "spikes.optimizer=restore"]
RESET = ["spikes.attempts=1", "spikes.optimizer=reset", f"spikes.warmup_tokens={25 * STEP}"]
NOTHING = "nothing"
COLUMN_INCHES, HEIGHT_INCHES, LEGEND_INCHES = 4.4, 6.0, 0.9  # of the figure
SHARE_BEFORE_SPIKE = 0.25  # of a panel's width
FROM_SCRATCH = {  # arms that are trained from the first step
    "clean": [f"schedule.peak_rate={CLEAN_RATE}"],
    "skip updates": ["spikes.skip_gradient_z=4"],
}
ARMS = {  # arms that start before the spike of `nothing`
    "restart": [*ROLL_BACK, "spikes.snapshots=1"],
    "restart, pass over data": [*ROLL_BACK, "spikes.snapshots=1", "spikes.skip_data=true"],
    "PMA-init N=3, optimizer restored": [*ROLL_BACK, "spikes.snapshots=3"],
    "PMA-init N=1": [*RESET, "spikes.snapshots=1"],
    "PMA-init N=3": [*RESET, "spikes.snapshots=3"],
    "PMA-init N=5": [*RESET, "spikes.snapshots=5"],
}


def main() -> None:
    """Train the arms that --runs does not contain yet, then write results.json and figure.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", default="0,1,2,3,4,5,6,7", help="seeds, tried in this order")
    parser.add_argument("--out", type=Path, default=FOLDER, help="directory of results.json and figure.png")
    options, rest = parser.parse_known_args()
    overrides = [word.removeprefix("--config.") for word in rest]
    options.runs.mkdir(parents=True, exist_ok=True)
    # Forty runs share a few programs: compile each of them once.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(options.runs.resolve() / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

    seeds: dict[int, dict[str, Any]] = {}
    never_collapsed = []
    for seed in map(int, options.seeds.split(",")):
        folder = options.runs / str(seed)
        nothing = train_arm(folder, NOTHING, seed, overrides)
        if nothing["onset_tokens"] is None:
            never_collapsed.append(seed)
            continue
        arms = {NOTHING: nothing}
        arms |= {arm: train_arm(folder, arm, seed, [*overrides, *keys]) for arm, keys in FROM_SCRATCH.items()}
        for arm, keys in ARMS.items():
            copy_before_spike(folder, arm, seed, [*overrides, *keys], nothing["onset_tokens"])
            arms[arm] = train_arm(folder, arm, seed, [*overrides, *keys])
        seeds[seed] = judge(arms)
        if len(seeds) == COLLAPSES:
            break
    results = {
        "rate": RATE,
        "clean_rate": CLEAN_RATE,
        "held_out": next((arms[NOTHING]["held_out"] for arms in seeds.values()), None),
        "seeds": seeds,
        "never_collapsed": never_collapsed,
        "summary": summarize(seeds),
        "machine_hours": sum(arm["seconds"] for arms in seeds.values() for arm in arms.values()) / 3600,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if seeds:
        (options.out / "figure.png").write_bytes(draw(seeds))
    print(format_table(results))


def make_config(seed: int, overrides: list[str]) -> Any:
    """Return the configuration of a run."""
    from pma_jax import config as configuration

    raw = configuration.load("demo")
    configuration.override(raw, [*BASE, *overrides, f"training.seed={seed}"])
    return configuration.resolve(raw)


def train_arm(folder: Path, arm: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Train one arm until it completes or gives up; return its record, which is stored next to the run."""
    from pma_jax.training import rollback
    from pma_jax.training.loop import train

    path = folder / folder_name(arm)
    record_path = path.with_suffix(".json")
    if record_path.exists():
        return json.loads(record_path.read_text())
    from pma_jax.data.sampling import REPORT
    from pma_jax.evaluation.held_out import read_sample_of_run
    from pma_jax.evaluation.sweep import RAW
    from pma_jax.evaluation.trajectory import evaluate_pairs
    from pma_jax.runs.directory import open_run

    began, error = time.perf_counter(), None
    try:
        train(make_config(seed, overrides), path)
    except ValueError as raised:
        error = str(raised)
    run = open_run(path)
    records, events = run.metrics, rollback.events(run)
    declared = [r for r in records if r["kind"] == "spike" and r["verdict"] == "irrecoverable"]
    steps = [r for r in records if r["kind"] == "train"]
    # The losses of the marks are on the part `select`; what is published is on the part `report`.
    evaluated = evaluate_pairs(run, [(RAW, snapshot.tokens) for snapshot in run.snapshots], REPORT)
    text = read_sample_of_run(run, REPORT, run.config.evaluation).describe()
    evaluations = sorted([tokens, loss.loss] for (_, tokens), loss in evaluated.items())
    record = {
        "onset_tokens": declared[0]["onset_tokens"] if declared else None,
        "went_back_to_tokens": [event["tokens"] for event in events],
        "declared_tokens": [event["spike"]["tokens"] for event in events] + [r["tokens"] for r in declared],
        "gave_up": error,
        "final_tokens": evaluations[-1][0],
        "final_loss": evaluations[-1][1],
        "skipped_updates": steps[-1].get("skipped_updates"),
        "seconds": time.perf_counter() - began,
        "evaluations": evaluations,
        "held_out": text,
        "curve": thin_curve(steps),
    }
    record_path.write_text(json.dumps(record) + "\n")
    return record


def copy_before_spike(folder: Path, arm: str, seed: int, overrides: list[str], onset_tokens: int) -> None:
    """Create an arm's run from the collapsing run before its spike: its state, snapshots and metrics."""
    from pma_jax.runs import states
    from pma_jax.runs.directory import create_run, is_run, open_run
    from pma_jax.storage.paths import absolute_path

    path = folder / folder_name(arm)
    if path.with_suffix(".json").exists() or is_run(path):
        return
    source = open_run(folder / folder_name(NOTHING))
    state = [s for s in source.states if s.tokens < onset_tokens][-1]
    if path.exists():
        shutil.rmtree(path)
    states.copy_state(state, absolute_path(path))
    for snapshot in source.snapshots:
        if snapshot.tokens <= state.tokens:
            shutil.copytree(snapshot.path, path / "snapshots" / snapshot.path.name)
    shutil.copy(source.path / "metrics.jsonl", path / "metrics.jsonl")
    create_run(path, make_config(seed, overrides), source.metadata)


def judge(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add to each arm whether it passed the spike and recovered.

    The reference is the median of the last three held-out losses before the spike. An arm passes if it did not give
    up, no spike was declared after its last rollback, and its last loss is at most 0.1 nats above the reference. It has
    recovered (`back`) if its last loss is also not above the reference.
    """
    onset = arms[NOTHING]["onset_tokens"]
    before = statistics.median([loss for tokens, loss in arms[NOTHING]["evaluations"] if tokens < onset][-3:])
    for record in arms.values():
        spikes_again = len(record["declared_tokens"]) > len(record["went_back_to_tokens"])
        completed = not record["gave_up"] and not spikes_again
        record["before_loss"] = before
        record["passes"] = completed and record["final_loss"] <= before + 0.1
        record["back"] = completed and record["final_loss"] <= before
        record["above_clean"] = record["final_loss"] - arms["clean"]["final_loss"]
    return arms


def summarize(seeds: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summarize each arm over the seeds."""
    return {
        arm: {
            "passes": sum(s[arm]["passes"] for s in seeds.values()),
            "back": sum(s[arm]["back"] for s in seeds.values()),
            "of": len(seeds),
            "final_losses": [s[arm]["final_loss"] for s in seeds.values()],
            "above_before": [s[arm]["final_loss"] - s[arm]["before_loss"] for s in seeds.values()],
        }
        for arm in (next(iter(seeds.values())) if seeds else ())
    }


def format_table(results: dict[str, Any]) -> str:
    """Format the README's table."""
    lines = [
        "| arm | passes the spike | back at the loss before it | last held-out loss, each seed | less that before |"
    ]
    lines.append("|---|---|---|---|---|")
    for arm, row in results["summary"].items():
        losses = " / ".join(f"{x:.2f}" for x in row["final_losses"])
        above = " / ".join(f"{x:+.2f}" for x in row["above_before"])
        lines.append(f"| {arm} | {row['passes']} of {row['of']} | {row['back']} of {row['of']} | {losses} | {above} |")
    return "\n".join(lines)


def thin_curve(steps: list[dict[str, Any]], every: int = 10) -> list[list[float]]:
    """Return [tokens, median loss, largest gradient norm] of every `every` steps."""
    groups = [steps[i : i + every] for i in range(0, len(steps), every)]
    return [
        [
            group[-1]["tokens"],
            round(statistics.median(r["loss"] for r in group), 4),
            round(max(r["gradient_norm"] for r in group), 4),
        ]
        for group in groups
    ]


def draw(seeds: dict[int, dict[str, Any]]) -> bytes:
    """Draw loss and gradient norm against tokens as PNG: one column per seed, one line per arm (PMA, Figure 7).

    Each panel starts shortly before the spike of the arm `nothing`, and marks it by a vertical line.
    """
    from pma_jax.reporting.drawing import LIGHT, MARKERS, SERIES_COLORS, SMALL_POINTS, label_panel, new_figure, to_png

    figure = new_figure(COLUMN_INCHES * len(seeds), HEIGHT_INCHES + LEGEND_INCHES)
    grid = figure.subplots(2, len(seeds), sharex="col", squeeze=False)
    for column, (seed, arms) in enumerate(seeds.items()):
        onset, end = arms[NOTHING]["onset_tokens"], max(p[0] for arm in arms.values() for p in arm["curve"])
        start = max(onset - SHARE_BEFORE_SPIKE / (1 - SHARE_BEFORE_SPIKE) * (end - onset), 0)
        for axes, title, index in zip(
            grid[:, column], ("training loss, nats per token", "gradient norm"), (1, 2), strict=True
        ):
            for i, (name, arm) in enumerate(arms.items()):
                points = [p for p in arm["curve"] if p[0] >= start]
                axes.plot(
                    [p[0] / 1e6 for p in points],
                    [p[index] for p in points],
                    color=SERIES_COLORS[i % len(SERIES_COLORS)],
                    marker=MARKERS[i % len(MARKERS)],
                    markevery=(3 * i % 11, 12),
                    markersize=3.5,
                    linewidth=1.0,
                    label=name,
                )
            axes.axvline(onset / 1e6, color=LIGHT.ink, linewidth=0.8, linestyle=(0, (2, 3)))
            axes.grid(axis="y", color=LIGHT.grid)
            label_panel(axes, f"seed {seed}: {title}", "tokens, millions" if index == 2 else "")
        grid[1, column].set_yscale("log")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=SMALL_POINTS, frameon=False)
    figure.tight_layout(rect=(0, LEGEND_INCHES / (HEIGHT_INCHES + LEGEND_INCHES), 1, 1))
    return to_png(figure, dpi=110)


def folder_name(arm: str) -> str:
    """Return the name of an arm's run directory."""
    return arm.lower().replace(", ", "-").replace(" ", "-").replace("=", "")


if __name__ == "__main__":
    main()
