import json
import math
import shlex

import pytest
from matplotlib.text import Text
from metrics_records import evaluation, preview

from pma_jax import config as configuration
from pma_jax.reporting import report as reporting
from pma_jax.reporting.report import build_report, format_report, write_report
from pma_jax.reporting.report_figure import draw_report

HORIZON, FORK = 6_000_000, 4_800_000
ROWS = [
    {"recipe": "sma", "window": 3, "text": "sma:3", "loss": 1.15},
    {"recipe": "sma", "window": 10, "text": "sma:10", "loss": 1.12},
    {"recipe": "ema:alpha=0.2", "window": 10, "text": "ema:alpha=0.2:10", "loss": 1.11},
]
SWEEP = {"tokens": HORIZON, "raw_loss": 1.2, "rows": ROWS}


RAW = [
    {"kind": "train", "tokens": 1_000_000, "step": 488, "learning_rate": 3e-3, "loss": 9.0},
    evaluation(1_000_000, 1.5),
    preview(1_000_000, "sma:3", 1.6),
    evaluation(FORK, 1.3),
    preview(FORK, "sma:3", 1.25),
    preview(FORK, "sma:10", 1.26),
    evaluation(HORIZON, 1.2),
    preview(HORIZON, "sma:3", 1.15),
    preview(HORIZON, "sma:10", 1.12),
]
ANNEALED = [evaluation(FORK, 1.3), evaluation(5_400_000, 1.2), evaluation(HORIZON, 1.1)]


@pytest.fixture
def pair(make_run, forked):
    run = make_run("demo", RAW, sweep=SWEEP)
    return run, make_run("demo-annealed", ANNEALED, decay="linear", facts=forked)


def test_recovered_shares_equal_values_computed_by_hand(pair):
    run, fork = pair
    report = build_report(run, [fork])
    assert (report["tokens"], report["raw_loss"], report["annealed_loss"]) == (HORIZON, 1.2, 1.1)
    assert report["merged_loss"] == {"sma:3": 1.15, "sma:10": 1.12, "ema:alpha=0.2:10": 1.11}
    # (1.2 - loss) / (1.2 - 1.1); the best SMA window is the headline, although EMA is better.
    assert report["recovered_shares"] == pytest.approx({"sma:3": 0.5, "sma:10": 0.8, "ema:alpha=0.2:10": 0.9})
    assert report["recovered_share"] == pytest.approx(0.8)
    assert report["best_sma"]["text"] == "sma:10"
    assert report["best_merge"] == {"text": "ema:alpha=0.2:10", "loss": 1.11, "recovered_share": pytest.approx(0.9)}
    assert (report["fork_tokens"], report["tokens_saved"]) == (FORK, 1_200_000)
    assert report["annealing"] == {
        "shape": "linear",
        "start_tokens": FORK,
        "peak_rate": run.config.schedule.peak_rate,
        "final_rate": 0.0,
    }
    assert report["notes"] == []
    assert "+0.0200 nats from the annealed" in report["finding"] and "1.20M tokens" in report["finding"]


def test_previews_are_compared_with_the_raw_loss_at_the_same_tokens(pair):
    run, fork = pair
    report = build_report(run, [fork])
    assert (report["previews_total"], report["previews_below_raw"]) == (5, 4)
    first = report["previews"]["sma:3"]
    assert (first["count"], first["below_raw"], first["below_raw_since_tokens"]) == (3, 2, FORK)
    # Gains -0.1, 0.05 and 0.05 nats.
    assert first["median_gain"] == pytest.approx(0.05) and first["last_gain"] == pytest.approx(0.05)
    assert list(report["previews"]) == ["sma:3", "sma:10"]


def test_curves_contain_the_evaluations(pair):
    run, fork = pair
    curves = build_report(run, [fork])["curves"]
    assert curves["raw"] == [[1_000_000, 1.5], [FORK, 1.3], [HORIZON, 1.2]]
    assert curves["annealed"] == [[5_400_000, 1.2], [HORIZON, 1.1]]  # Only what the fork trained itself.
    assert curves["previews"]["sma:10"] == [[FORK, 1.26], [HORIZON, 1.12]]


def test_report_contains_provenance(pair):
    run, fork = pair
    report = build_report(run, [fork])
    assert (report["corpus_digest"], report["evaluation_digest"]) == ("c0ffee", "e7a1")
    assert report["config_digest"] == configuration.digest(run.config)
    assert report["versions"] == {"jax": "0.10.0", "python": "3.11.9"}
    assert report["parameters"] == 918_656  # 2·256·128 + 4 (4·128·128 + 3·128·384 + 2·128) + 128


def test_commands_reproduce_the_configurations(pair):
    run, fork = pair
    train, forking, sweep, last = (shlex.split(c) for c in build_report(run, [fork])["commands"])
    raw = configuration.load(train[train.index("--config") + 1])
    configuration.override(raw, [w.removeprefix("--config.") for w in train if w.startswith("--config.")])
    assert configuration.digest(configuration.resolve(raw)) == configuration.digest(run.config)
    configuration.override(raw, [w.removeprefix("--config.") for w in forking if w.startswith("--config.")])
    assert configuration.digest(configuration.resolve(raw)) == configuration.digest(fork.config)
    assert forking[2:5] == [f"runs/{run.path.name}", "--at-tokens", str(FORK)]
    assert sweep[3:] == ["--recipes", "sma,ema:alpha=0.2", "--windows", "3,10"]
    assert last == ["pma", "report", f"runs/{run.path.name}", f"runs/{fork.path.name}"]


BLOCK_ROWS = [
    {"recipe": "sma", "window": 10, "interval": 2, "kind": "point", "text": "sma:10@2", "loss": 1.105},
    {"recipe": "wma", "window": 10, "interval": 1, "kind": "block_mean", "text": "block/wma:10", "loss": 1.104},
    {"recipe": "sma", "window": 3, "interval": 1, "kind": "block_mean", "text": "block/sma:3", "loss": 1.14},
]


@pytest.fixture
def with_blocks(make_run, forked):
    run = make_run("demo", RAW, sweep=SWEEP | {"rows": ROWS + BLOCK_ROWS})
    return run, make_run("demo-annealed", ANNEALED, decay="linear", facts=forked)


def test_block_means_and_intervals_are_listed_beside_the_papers_merges(with_blocks):
    run, fork = with_blocks
    report = build_report(run, [fork])
    assert report["best_block_merge"] == {"text": "block/wma:10", "loss": 1.104, "recovered_share": pytest.approx(0.96)}
    # The headline uses points one interval apart: sma:10 with 0.8, although sma:10@2 is better.
    assert report["best_sma"]["text"] == "sma:10" and report["recovered_share"] == pytest.approx(0.8)
    assert report["block_points_gained"] == pytest.approx(0.16)
    assert report["merged_loss"]["sma:10@2"] == 1.105 and report["merged_loss"]["block/sma:3"] == 1.14
    table = format_report(report)
    assert "block/wma:10 *" in table and "sma:10@2" in table
    page = write_report(report, run)[2].read_text()
    assert (
        "block/wma" in page
        and "the best of them recovers 96.0%,\nthe best SMA of points 80.0%" in page
        and "sma@2" in page
    )
    sweeps = [shlex.split(c)[3:] for c in report["commands"] if "sweep" in c]
    assert sweeps == [
        ["--recipes", "sma,ema:alpha=0.2", "--windows", "3,10", "--intervals", "1,2"],
        ["--recipes", "wma,sma", "--windows", "10,3", "--kind", "block_mean"],
    ]


def test_block_means_are_not_mentioned_without_any(pair):
    run, fork = pair
    report = build_report(run, [fork])
    assert report["best_block_merge"] is None and report["block_points_gained"] is None
    assert "block/" not in write_report(report, run)[2].read_text()


def test_block_means_alone_claim_no_gain_over_missing_points(make_run, forked):
    fork = make_run("annealed", ANNEALED, decay="linear", facts=forked)
    rows, unknown = BLOCK_ROWS[1:], {"raw_loss": None}
    report = build_report(make_run("demo", RAW, sweep=SWEEP | unknown | {"rows": rows}), [fork])
    assert report["recovered_share"] is None and report["block_points_gained"] is None
    assert report["best_block_merge"]["text"] == "block/wma:10" and report["notes"] == []


def test_watched_previews_are_listed_beside_the_trainers(make_run, forked):
    run = make_run("demo", RAW)
    watched = [preview(t, "block/sma:3", loss) | {"by": "watch"} for t, loss in ((FORK, 1.24), (HORIZON, 1.13))]
    # The trainer's sma:3 was watched too: it is one curve and counted once.
    again = [preview(HORIZON, "sma:3", 1.15) | {"by": "watch"}]
    (run.path / "watch.jsonl").write_text("".join(json.dumps(r) + "\n" for r in watched + again))
    report = build_report(run, [make_run("annealed", ANNEALED, decay="linear", facts=forked)])
    assert report["curves"]["previews"]["block/sma:3"] == [[FORK, 1.24], [HORIZON, 1.13]]
    assert report["previews_total"] == 7
    assert report["best_block_merge"] == {"text": "block/sma:3", "loss": 1.13, "recovered_share": pytest.approx(0.7)}
    assert report["block_points_gained"] == pytest.approx(-0.1)


def test_without_an_annealed_run_there_are_no_recovered_shares(make_run):
    report = build_report(make_run("demo", RAW, sweep=SWEEP), [])
    for key in ("annealed_loss", "recovered_share", "tokens_saved", "fork_tokens", "annealing"):
        assert report[key] is None
    assert set(report["recovered_shares"].values()) == {None}
    assert report["best_merge"]["text"] == "ema:alpha=0.2:10"
    assert "no annealed run" in report["finding"]


def test_without_a_sweep_the_last_previews_are_the_merges(make_run, forked):
    fork = make_run("annealed", ANNEALED, decay="cosine", facts=forked)
    report = build_report(make_run("demo", RAW), [fork])
    assert report["merged_loss"] == {"sma:3": 1.15, "sma:10": 1.12}
    assert report["recovered_share"] == pytest.approx(0.8)


def test_sweep_at_another_horizon_is_skipped_with_a_note(make_run):
    report = build_report(make_run("demo", RAW, sweep=SWEEP | {"tokens": FORK}), [])
    assert set(report["merged_loss"]) == {"sma:3", "sma:10"}
    assert "4,800,000" in report["notes"][0] and "pma sweep" in report["notes"][0]


def test_sweep_with_another_raw_loss_is_skipped_with_a_note(make_run):
    report = build_report(make_run("demo", RAW, sweep=SWEEP | {"raw_loss": 1.3}), [])
    assert set(report["merged_loss"]) == {"sma:3", "sma:10"}
    assert "1.3000" in report["notes"][0]


def test_evaluations_alone_make_a_report(make_run, tmp_path):
    run = make_run("demo", [evaluation(100_000, 3.0)])
    report = build_report(run, [])
    assert report["merged_loss"] == {} and report["best_merge"] is None and report["previews_total"] == 0
    assert all(path.exists() for path in write_report(report, run))
    assert "3.0000" in format_report(report)


def test_best_of_several_annealed_forks_is_the_reference(pair, make_run, forked):
    run, fork = pair
    worse = make_run("cosine", [evaluation(HORIZON, 1.14)], decay="cosine", facts=forked)
    report = build_report(run, [worse, fork])
    assert report["annealed_loss"] == 1.1 and report["annealing"]["shape"] == "linear"
    assert [a["run"] for a in report["annealed_runs"]] == ["demo-annealed", "cosine"]


def test_forks_not_annealed_or_not_at_the_horizon_are_noted(pair, make_run, forked):
    run, fork = pair
    short = make_run("short", ANNEALED[:2], decay="linear", facts=forked)
    constant = make_run("constant", [evaluation(HORIZON, 1.0)], facts=forked)
    report = build_report(run, [fork, short, constant])
    assert report["annealed_loss"] == 1.1
    assert any("short" in n and "5,400,000" in n for n in report["notes"])
    assert any("constant" in n for n in report["notes"])


def test_annealing_without_gain_gives_no_recovered_share(make_run, forked):
    fork = make_run("annealed", [evaluation(HORIZON, 1.25)], decay="linear", facts=forked)
    run = make_run("demo", RAW, sweep=SWEEP)
    report = build_report(run, [fork])
    assert report["recovered_share"] is None and report["tokens_saved"] == 1_200_000
    assert "did not lower" in report["notes"][0]
    assert "-" in format_report(report)
    assert all(path.exists() for path in write_report(report, run))


@pytest.mark.parametrize(("fact", "what"), [("corpus", "corpus"), ("evaluation", "held-out text")])
def test_runs_on_other_text_are_refused(make_run, forked, fact, what):
    fork = make_run("annealed", ANNEALED, decay="linear", facts=forked | {fact: "0bad"})
    with pytest.raises(ValueError, match=f"cannot be compared: their {what} differs .0bad and"):
        build_report(make_run("demo", RAW), [fork])


def test_run_that_was_not_forked_is_refused(make_run):
    with pytest.raises(ValueError, match="is not a fork"):
        build_report(make_run("demo", RAW), [make_run("other", ANNEALED, decay="linear")])


def test_runs_in_the_wrong_order_are_refused(pair):
    run, fork = pair
    with pytest.raises(ValueError, match="constant-rate run first"):
        build_report(fork, [run])


def test_run_without_evaluations_is_refused_with_the_remedy(make_run):
    with pytest.raises(ValueError, match="train it to its first snapshot"):
        build_report(make_run("demo", RAW[:1]), [])


def test_diverged_run_is_refused(make_run):
    with pytest.raises(ValueError, match="diverged"):
        build_report(make_run("demo", [evaluation(HORIZON, math.nan)]), [])


def test_non_finite_losses_are_excluded_from_the_json(make_run, tmp_path):
    rows = [*ROWS, {"recipe": "wma", "window": 3, "text": "wma:3", "loss": math.inf}]
    records = [evaluation(50_000, math.nan), preview(50_000, "sma:3", math.nan), *RAW]
    run = make_run("demo", records, sweep=SWEEP | {"rows": rows})
    report = build_report(run, [])
    assert "wma:3" not in report["merged_loss"] and "not finite" in report["notes"][0]
    json.loads(write_report(report, run)[0].read_text(), parse_constant=pytest.fail)


def test_files_are_complete_and_written_to_the_requested_folder(pair, tmp_path):
    run, fork = pair
    report = build_report(run, [fork])
    here, there = write_report(report, run), write_report(report, run, tmp_path / "new" / "folder")
    assert [p.name for p in here] == ["report.json", "report.png", "report.html"]
    assert {p.parent for p in here} == {run.path}
    assert json.loads(here[0].read_text()) == json.loads(there[0].read_text()) == report
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == sorted(p.name for p in there)
    # The same report gives the same bytes.
    assert [p.read_bytes() for p in here] == [p.read_bytes() for p in there]


def test_failed_report_leaves_the_old_files(pair, monkeypatch):
    run, fork = pair
    report = build_report(run, [fork])
    before = {p: p.read_bytes() for p in write_report(report, run)}

    def fails(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(reporting.html, "render_page", fails)
    with pytest.raises(RuntimeError):
        write_report(report | {"raw_loss": 2.0}, run)
    assert {p: p.read_bytes() for p in before} == before


def test_table_is_aligned_and_marks_the_best(pair):
    run, fork = pair
    lines = format_report(build_report(run, [fork])).splitlines()
    table = lines[2:8]
    assert len({len(line) for line in table}) == 1
    # 1.11 nats per byte: perplexity e^1.11, bits 1.11 / ln 2.
    best = next(line for line in table if "ema" in line).split()
    assert best == ["ema:alpha=0.2:10", "*", "1.1100", "3.0344", "1.6014", "90.0%"]
    assert lines[-1] == "previews below the raw loss: 4 of 5"


def test_bits_per_byte_are_given_for_bytes_only(make_run):
    run = make_run("demo", RAW, sweep=SWEEP, tokenizer="bpe")
    report = build_report(run, [])
    assert "bits" not in format_report(report)
    assert "bits per byte" not in write_report(report, run)[2].read_text()


def test_workers_are_drawn_beside_the_model_that_stands_for_them(make_run):
    tokens = [record["tokens"] for record in RAW if record["kind"] == "evaluation"]
    losses = {0: [1.6, 1.4, 1.3], 1: [1.7, 1.5, 1.4]}
    of_workers = [
        evaluation(t, loss) | {"kind": "worker", "worker": k}
        for k, of_worker in losses.items()
        for t, loss in zip(tokens, of_worker, strict=True)
    ]
    report = build_report(make_run("workers", RAW + of_workers), [])
    curves = {f"worker_{k}": [[t, x] for t, x in zip(tokens, of, strict=True)] for k, of in losses.items()}
    assert report["curves"]["workers"] == curves
    assert report["raw_loss"] == 1.2, "workers are not the raw model"
    drawn, alone = (draw_report(r) for r in (report, build_report(make_run("alone", RAW), [])))
    texts, without = ({text.get_text() for text in figure.findobj(Text)} for figure in (drawn, alone))
    assert texts - without >= {"all workers together  1.200", "single workers  1.350"}
    lines = [list(line.get_ydata()) for axes in drawn.axes for line in axes.lines]
    assert all(of_worker in lines for of_worker in losses.values())
