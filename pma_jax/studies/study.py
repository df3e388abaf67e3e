"""A question to many runs: the command line, the trunks and the page that the scripts in experiments/ share.

A script has a docstring (the question) and four functions, and ends with `study.main(__file__, answer, report, row,
figures)`:

    answer(study) -> dict      trains and evaluates by way of the study; what results.json holds of it (plain JSON)
    report(results) -> str     the part of the README that follows from results.json: tables, and what was found
    row(results) -> Row        the question's row on experiments/README.md
    figures(results) -> dict   file name -> PNG

Trunks are runs at a constant rate, cut into `units` equal parts: a snapshot of either kind at the end of each, and a
state wherever an annealed branch may leave. Positions in the scripts are units, so that a script is the same at every
size: `--sizes dense_1b --config.training.total_tokens=20e9` runs it on other models.
"""

import argparse
import contextlib
import dataclasses
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from pma_jax import config as configuration
from pma_jax.config import Config, EvaluationConfig
from pma_jax.evaluation.sweep import Cell
from pma_jax.evaluation.trajectory import RAW, losses_along
from pma_jax.model.decoder import abstract_params, activated_parameter_count, parameter_count
from pma_jax.runs.directory import Run
from pma_jax.runs.snapshots import Snapshot
from pma_jax.runtime.allocator import keep_freed_memory
from pma_jax.runtime.errors import error_line
from pma_jax.runtime.mesh import make_mesh
from pma_jax.storage import atomic
from pma_jax.studies import pages, run_cache
from pma_jax.studies.pages import Row

SIZES = ("science_small", "science_large", "science_moe")
RECORD_TOKENS = 4096  # held-out tokens of a trunk's own records; the study evaluates on its own, larger text
LENGTHS = (32, 16, 8, 4, 2)  # an annealed branch takes one over so many of the tokens at its end
# `--tiny`: a model that is trained in seconds, to see that a script runs. Its numbers say nothing.
TINY = (
    "model.width=16",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=2",
    "model.head_dim=8",
    "model.hidden=16",
    "model.expert_hidden=8",
    "training.sequence_length_tokens=16",
    "training.batch_size_sequences=8",
    "training.total_tokens=4096",
    "schedule.warmup_tokens=256",
    "checkpoint.block_every_steps=1",
)
TINY_OPTIONS = {"sizes": (SIZES[0], SIZES[-1]), "seeds": (0, 1), "units": 16, "evaluation_tokens": 512}


@dataclasses.dataclass(frozen=True)
class Study:
    """What a script was called with, and the runs that it has asked for."""

    runs: Path  # folder of the run cache
    sizes: tuple[str, ...] = SIZES  # configurations, the one that most is asked of first
    seeds: tuple[int, ...] = (0, 1, 2)
    units: int = 64  # parts of a trunk; a multiple of 16
    evaluation_tokens: int = 32_768  # held-out tokens that merges are judged by
    overrides: tuple[str, ...] = ()  # `section.key=value`, of every run
    read: dict[str, Run] = dataclasses.field(default_factory=dict)  # by path: the runs that were asked for
    waited: list[float] = dataclasses.field(default_factory=lambda: [0.0])  # seconds until they were there

    def trunk_config(self, size: str, seed: int, changes: Iterable[str] = ()) -> Config:
        """The configuration of a trunk: that of `size` under the overrides, with the study's marks.

        The horizon is rounded down to whole steps a unit. A key that is overridden stays as it is given.
        """
        raw = configuration.load(size)
        given = [*self.overrides, *changes]
        configuration.override(raw, given)
        batch = raw.training.batch_size_sequences * raw.training.sequence_length_tokens
        unit = max(raw.training.total_tokens // (batch * self.units), 1) * batch
        marks = ",".join(str(u * unit) for u in self.fork_units())
        derived = {
            "training.total_tokens": unit * self.units,
            "training.seed": seed,
            "training.log_interval_tokens": unit,
            "schedule.decay": "none",
            "checkpoint.interval_tokens": unit,
            "checkpoint.kinds": "point,block_mean",
            "checkpoint.state_interval_tokens": unit * self.units,
            "checkpoint.keep_states": 1,
            "checkpoint.keep_states_at_tokens": marks,
            "checkpoint.keep_windows": 0,
            "evaluation.tokens": min(RECORD_TOKENS, self.evaluation_tokens),
            "preview.windows": "()",
        }
        keys = {text.partition("=")[0] for text in given} - {"training.total_tokens"}
        configuration.override(raw, [f"{key}={value}" for key, value in derived.items() if key not in keys])
        return configuration.resolve(raw)

    def fork_units(self) -> list[int]:
        """Where trunks keep states: a branch of every length (`branch_units`) can end at a quarter, half, the end."""
        ends = (self.units // 4, self.units // 2, self.units)
        starts = {end - length for end in ends for length in self.branch_units(end)}
        return sorted(starts | {self.units // 4, self.units // 2, 3 * self.units // 4})

    def branch_units(self, end: int) -> list[int]:
        """Lengths of the annealed branches that end at `end`: from a 32nd to half of it, in whole units."""
        return [end // share for share in LENGTHS if end // share]

    def trunk(self, size: str, seed: int, changes: Iterable[str] = ()) -> Run:
        """A trunk, trained: at a constant rate, with both kinds of snapshots at every unit."""
        config = self.trunk_config(size, seed, changes)
        return self._asked(lambda: run_cache.trained(self.runs, config))

    def at_rate(self, size: str, factor: float) -> tuple["Study", dict[int, Run]]:
        """A study of half the tokens, and its trunks by seed at `factor` times the size's rate, trained.

        At the size's own rate the first half of the trunk is the run.
        """
        half, whole = dataclasses.replace(self, units=self.units // 2), self.trunk_config(size, self.seeds[0])
        changes = [
            f"training.total_tokens={whole.training.total_tokens // 2}",
            f"schedule.peak_rate={factor * whole.schedule.peak_rate}",
        ]
        own = factor == 1
        return half, {seed: self.trunk(size, seed) if own else half.trunk(size, seed, changes) for seed in self.seeds}

    def forked(self, run: Run, at: int, end: int, changes: Iterable[str] = (), weights: Snapshot | None = None) -> Run:
        """The fork of a trunk from unit `at` to unit `end` under `changes`, trained; see `run_cache.forked`."""
        keys = [
            f"training.total_tokens={end * self.unit_tokens(run)}",
            f"checkpoint.state_interval_tokens={end * self.unit_tokens(run)}",
            "checkpoint.keep_states_at_tokens=()",
            *changes,
        ]
        return self._asked(lambda: run_cache.forked(self.runs, run, at * self.unit_tokens(run), keys, weights))

    def annealed(self, run: Run, at: int, end: int, shape: str = "linear", weights: Snapshot | None = None) -> Run:
        """The fork of a trunk at unit `at` whose rate decays to 0 at unit `end`: linear, cosine or minus_sqrt."""
        decay = [f"schedule.decay={shape}", f"schedule.decay_start_tokens={at * self.unit_tokens(run)}"]
        return self.forked(run, at, end, decay, weights)

    def merged(self, run: Run, cell: Cell, at: int) -> Snapshot:
        """The merge of a trunk's newest snapshots at unit `at`, as a snapshot that a fork can begin with."""
        return run_cache.merged_at(run, cell, at * self.unit_tokens(run))

    def losses(self, run: Run, cells: Iterable[Cell], ends: Sequence[int]) -> dict[tuple[Cell, int], float]:
        """Held-out loss of each merge at each end, in units; what has too few snapshots there is left out."""
        tokens = [end * self.unit_tokens(run) for end in ends]
        found = losses_along(run, cells, tokens, self.evaluation(run))
        return {(cell, at // self.unit_tokens(run)): loss for (cell, at), loss in found.items()}

    def loss(self, run: Run, cell: Cell = RAW, end: int | None = None) -> float:
        """Held-out loss of one merge, by default of the run's last weights. Raises KeyError where it cannot be made."""
        end = run.config.training.total_tokens // self.unit_tokens(run) if end is None else end
        return self.losses(run, [cell], [end])[cell, end]

    def over_seeds(
        self, run_of: Callable[[int], Run], cells: Iterable[Cell], ends: Sequence[int]
    ) -> dict[str, dict[str, list[float]]]:
        """`losses` of the runs of all seeds, for results.json: merge -> end, in units -> a loss for each seed."""
        cells = list(cells)
        each = [self.losses(run_of(seed), cells, ends) for seed in self.seeds]
        found: dict[str, dict[str, list[float]]] = {}
        for cell in cells:
            at = {str(end): [losses[cell, end] for losses in each] for end in ends if (cell, end) in each[0]}
            found |= {cell.text: at} if at else {}
        return found

    def facts(self, size: str) -> dict[str, Any]:
        """What tables say of a size: its parameters (active: that a token meets), and a trunk's tokens and rate."""
        config = self.trunk_config(size, self.seeds[0])
        shapes = abstract_params(config.model, make_mesh(config.mesh))
        return {
            "parameters": parameter_count(shapes),
            "active_parameters": activated_parameter_count(shapes, config.model),
            "unit_tokens": config.checkpoint.interval_tokens,
            "tokens": config.training.total_tokens,
            "peak_rate": config.schedule.peak_rate,
        }

    def evaluation(self, run: Run) -> EvaluationConfig:
        """The held-out text of the study: the same for every run."""
        return dataclasses.replace(run.config.evaluation, tokens=self.evaluation_tokens)

    def unit_tokens(self, run: Run) -> int:
        """Tokens of a unit."""
        return run.config.checkpoint.interval_tokens

    def spent(self) -> dict[str, float]:
        """Wall hours and tokens of the training of all runs that were asked for, by this script or another."""
        each = [run_cache.spent(run) for run in self.read.values()]
        return {
            "runs": len(each),
            "tokens": sum(s["tokens"] for s in each),
            "training_hours": sum(s["seconds"] for s in each) / 3600,
        }

    def _asked(self, ask: Callable[[], Run]) -> Run:
        began = time.perf_counter()
        run = ask()
        self.waited[0] += time.perf_counter() - began
        self.read[str(run.path)] = run
        return run


def main(
    script: str,
    answer: Callable[[Study], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
    row: Callable[[dict[str, Any]], Row],
    figures: Callable[[dict[str, Any]], dict[str, bytes]],
    arguments: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Answer the question of `script`: writes results.json and the figures, and the README's results between its marks.

    What was trained and evaluated before is read from --runs. Wrong words or files end it with one line and exit
    status 1. Returns what results.json holds.
    """
    folder = Path(script).resolve().parent
    options, overrides = _parsed(folder, arguments)
    with _refusals_in_one_line():
        page = options.out / "README.md"
        if page.exists():
            pages.results_of(page.read_text())  # before the hours that the answer takes
        keep_freed_memory()
        kept = options.out / "results.json"
        results = json.loads(kept.read_text()) if options.redraw else _answered(answer, options, overrides)
        results["row"] = dataclasses.asdict(row(results))
        atomic.write_text(epath.Path(kept), json.dumps(results, indent=1) + "\n")
        for name, png in figures(results).items():
            (options.out / name).write_bytes(png)
        if page.exists():
            page.write_text(pages.with_results(page.read_text(), whole_report(report, results)))
        if options.out == folder and (folder.parent / "README.md").exists():
            pages.write_index(folder.parent)
        print(whole_report(report, results))
        return results


@contextlib.contextmanager
def _refusals_in_one_line() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error_line(error)}") from error


def whole_report(report: Callable[[dict[str, Any]], str], results: dict[str, Any]) -> str:
    """The README's part between its marks: the script's own report, then what made it."""
    return f"{report(results)}\n\n{made_text(results['made'])}"


def made_text(made: dict[str, Any]) -> str:
    """Where the numbers come from, in a sentence or two."""
    commit = f"Made at commit `{made['commit']}`" if made["commit"] else "Made outside of a repository"
    given = f"; given besides: `{' '.join(made['overrides'])}`" if made["overrides"] else ""
    return (
        f"{commit}: {made['runs']} runs of {made['tokens'] / 1e6:.1f}M tokens in {made['training_hours']:.2f} machine "
        f"hours (wall time; what other questions read too counts in each), and {made['evaluation_hours']:.2f} hours of "
        f"evaluating. Seeds {', '.join(map(str, made['seeds']))}; {made['evaluation_tokens']:,} held-out "
        f"tokens, the same for every model{given}. All numbers: [results.json](results.json)."
    )


def _answered(answer: Callable[[Study], dict[str, Any]], options: Any, overrides: Sequence[str]) -> dict[str, Any]:
    keys = {name: getattr(options, name) for name in ("sizes", "seeds", "units", "evaluation_tokens")}
    study = Study(options.runs.resolve(), overrides=tuple(overrides), **keys)
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    found = answer(study)
    made = {"commit": _commit(), **keys, "overrides": list(overrides), **study.spent()}
    made["evaluation_hours"] = (time.perf_counter() - began - study.waited[0]) / 3600
    return json.loads(json.dumps({"made": made, **found}))


def _parsed(folder: Path, arguments: Sequence[str] | None) -> tuple[Any, list[str]]:
    parser = argparse.ArgumentParser(description=f"The experiment {folder.name}; --config.KEY=VALUE goes to every run.")
    texts = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs, shared by all experiments")
    parser.add_argument("--out", type=Path, default=folder, help="folder of results.json, figures and README.md")
    parser.add_argument("--sizes", type=texts, help=f"configurations ({','.join(SIZES)})")
    parser.add_argument("--seeds", type=lambda text: tuple(map(int, text.split(","))), help="(0,1,2)")
    parser.add_argument("--units", type=int, help="parts of a trunk, a multiple of 16 (64)")
    parser.add_argument("--evaluation-tokens", type=int, help="held-out tokens that merges are judged by (32768)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and two seeds, to see that it runs")
    parser.add_argument("--redraw", action="store_true", help="only tables and figures anew, from results.json")
    options, rest = parser.parse_known_args(arguments)
    wrong = [word for word in rest if not (word.startswith("--config.") and "=" in word)]
    if wrong:
        parser.error(f"unknown: {' '.join(wrong)}")
    defaults = {field.name: field.default for field in dataclasses.fields(Study)} | (
        TINY_OPTIONS if options.tiny else {}
    )
    for name in ("sizes", "seeds", "units", "evaluation_tokens"):
        if getattr(options, name) is None:
            setattr(options, name, defaults[name])
    if options.units % 16:
        parser.error(f"--units {options.units}: give a multiple of 16")
    options.out = options.out.resolve()
    overrides = [word.removeprefix("--config.") for word in rest]
    return options, [*(TINY if options.tiny else ()), *overrides]


def _commit() -> str | None:
    """The short name of the commit that runs, with + where files that are tracked were changed since."""
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        name = subprocess.run([*here, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*here, "status", "--porcelain", "-uno", "--", "."], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.stdout.strip() + ("+" if changed.stdout.strip() else "")
