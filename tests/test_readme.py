"""Run the commands of README.md and docs/, in the order of each page, on small models."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import hf_models
import numpy as np
import processes
import pytest
import tiny
import tokenizers
import trainer_models
import trainer_trees
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file

from pma_jax import config as configuration
from pma_jax.cli import main
from pma_jax.cli.arguments import parser
from pma_jax.data.tokenizer import byte_tokenizer
from pma_jax.evaluation.task_scores import GOLD_BITS

ROOT = Path(__file__).parent.parent
TRAINER_PAGES = sorted((ROOT / "docs" / "trainers").glob("*.md"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *TRAINER_PAGES])


def blocks(language: str, page: Path = ROOT / "README.md") -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(program: str, page: Path = ROOT / "README.md") -> list[list[str]]:
    """Return the arguments of each command line of a program, parsed as a shell does."""
    lines = [line for block in blocks("bash", page) for line in block.replace("\\\n", " ").splitlines()]
    arguments = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in arguments if line[:1] == [program]]


def write_small_task(folder: Path) -> str:
    """Write a task for the small demo, whose text has no Python functions that `pma:` tasks could ask about."""
    rows = [{"question": f"w{i} w{i + 1}", "answers": [f" w{i + 2}", " w0"]} for i in range(8)]
    (folder / "small.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "small.yaml").write_text(
        "task: small\ndataset_path: json\ndataset_kwargs: {data_files: {test: small.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ntarget_delimiter: ''\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{answers}}'\ndoc_to_target: 0\nmetric_list: [{metric: acc}]\n"
    )
    return str(folder / "small.yaml")


def write_small_demo(folder: Path) -> str:
    """Write the shipped demo with the same token marks, one step per snapshot interval and a small vocabulary."""
    arguments = [f"w{i}" for i in range(14)]
    vocabulary = {word: i for i, word in enumerate(["<eos>", "?", *arguments])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    tiny.write_corpus(folder / "texts")
    demo = configuration.load("demo")
    length = 64
    batch, rest = divmod(demo.checkpoint.interval_tokens, length)
    assert rest == 0 and batch % 8 == 0
    (folder / "small.py").write_text(f"""
from pma_jax import config

def get_config():
    c = config.load("demo")
    c.data.update(source="files", files=({str(folder / "texts" / "*.txt")!r},), held_out_percent=20.0)
    c.data.update(tokenizer={str(folder / "tokenizer.json")!r}, cache_dir={str(folder / "cache")!r})
    c.model.update(vocabulary_size=16, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, hidden=8)
    c.training.update(sequence_length_tokens={length}, batch_size_sequences={batch})
    c.evaluation.update(tokens=400, batch_size_sequences=8)
    c.checkpoint.block_every_steps = 1
    c.mesh.cpu_devices = 0  # the tests' JAX has started, with 8
    return c
""")
    return str(folder / "small.py")


def test_page_has_commands():
    assert commands("pma") and commands("make") and blocks("python")


def test_make_commands_are_targets_of_the_makefile():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for arguments in commands("make"):
        assert arguments and set(arguments) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pma_commands_of_other_pages_parse(page):
    lines = [line for block in blocks("bash", page) for line in block.replace("\\\n", " ").splitlines() if line]
    programs = {shlex.split(line, comments=True)[0] for line in lines}
    assert programs <= {"pma", "make", "git", "cd", "pip"}


def test_tables_match_the_report():
    report = json.loads((ROOT / "experiments" / "demo" / "report.json").read_text())
    page, cells, windows, prefix = (ROOT / "docs" / "demo.md").read_text(), 0, [], ""
    for line in page.splitlines():
        if line.startswith("| merge of the last N"):
            prefix = "block/" if "block means" in line else ""
            windows = [int(n) for n in re.findall(r"\d+", line)]
        row = re.match(r"\| `([^`]+)` \| (\d\.\d{4} .*) \|$", line)
        if row is None:
            continue
        for n, cell in zip(windows, row[2].split(" | "), strict=True):
            text = f"{prefix}{row[1]}:{n}"
            loss = report["merged_loss"][text]
            assert cell == f"{loss:.4f} ({loss - report['annealed_loss']:+.4f})", text
            cells += 1
    assert cells == 36
    bits = {group["task"]: group for group in report["tasks"] if group["metric"] == GOLD_BITS}
    for task, documents, *values in re.findall(
        r"^\| `(pma:.+?)` \| (\d+) \| " + r"(.+) \| " * 3 + r"(.+) \|$", page, re.M
    ):
        models = ("raw", "sma:15", "demo-annealed", "demo-annealed-linear")
        ends = [bits[task]["curves"][model][-1] for model in models]
        assert values == [f"{value:.4f} ± {error:.4f}" for _, value, error in ends]
        assert int(documents) == bits.pop(task)["documents"]
    assert not bits
    for value in ("raw_loss", "annealed_loss"):
        assert f"**{report[value]:.4f}**" in page


def test_readme_sentences_about_the_demo_match_the_report():
    report = json.loads((ROOT / "experiments" / "demo" / "report.json").read_text())
    page, saved = " ".join(PAGES[0].read_text().split()), f"{report['tokens_saved'] / 1e6:.2f}M"
    windows = report["previews"]["sma:10"]
    for sentence in (
        f"A decoder of {report['parameters'] / 1e6:.2f}M parameters is trained",
        f"losses are on {report['held_out']['tokens']:,} tokens of {report['held_out']['documents']} documents",
        f"at a constant rate for {report['tokens'] / 1e6:.2f}M tokens. Two forks leave it at "
        f"{report['fork_tokens'] / 1e6:.2f}M tokens",
        f"The merges need no annealed fork of {saved} tokens: they are of the run's own snapshots. From 0.82M tokens "
        f"on, {'all ' if windows['below_raw'] == windows['count'] else ''}{windows['below_raw']} previews of `sma:10` "
        "are below the raw loss",
        f"(on other documents, all losses would be higher or lower together, by {report['raw_standard_error']:.2f} "
        "nats",
    ):
        assert sentence in page, sentence


def test_readme_table_matches_the_report():
    report = json.loads((ROOT / "experiments" / "demo" / "report.json").read_text())
    annealed = {run["annealing"]["shape"]: run["loss"] for run in report["annealed_runs"]}
    assert report["annealed_loss"] == min(annealed.values())
    losses = {
        "raw, constant rate": report["raw_loss"],
        "annealed, linear decay": annealed["linear"],
        "annealed, cosine decay": annealed["cosine"],
    } | report["merged_loss"]
    rows = re.findall(r"^\| (.+) \| (\d\.\d{4}) \| ([+-]?\d\.\d{4}) \|$", PAGES[0].read_text(), re.MULTILINE)
    for name, loss, less in rows:
        text = re.search(r"`(.+)`", name)
        value = losses[text[1] if text else name]
        assert (loss, less) == (f"{value:.4f}", f"{value - report['annealed_loss']:+.4f}"), name
    assert len(rows) == 6


def test_links_between_pages_resolve():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_model_sizes_page_matches_recommended_intervals():
    (block,) = blocks("python", ROOT / "docs" / "ladder.md")
    for line in block.splitlines():
        if "recommend_interval_and_window(" in line:
            names: dict = {}
            exec(f"from pma_jax.model.ladder import recommend_interval_and_window\n{line}", names)
            tokens, window = re.search(r"([\d.]+)B tokens, (\d+)", line).groups()
            assert (f"{names['interval_tokens'] / 1e9:.2g}", names["window"]) == (tokens, int(window))


def write_checkpoints(folder: Path) -> None:
    """Write the inputs of docs/merging.md: two runs of another trainer, and a Flax checkpoint."""
    rng = np.random.default_rng(0)
    for run in ("checkpoints", "other"):
        for step in range(1000, 5001, 1000):
            path = folder / run / f"step{step}"
            path.mkdir(parents=True)
            save_file({"w": rng.standard_normal((500, 300), np.float32)}, path / "model.safetensors")
            (path / "config.json").write_text("{}")
    for step in (100, 200):
        params = {"dense": {"kernel": rng.standard_normal((5, 3), np.float32)}}
        ocp.save(folder / "flax" / str(step), {"params": params, "step": np.array(step)})


def test_merging_page_commands_run(tmp_path, monkeypatch, capfd):
    write_checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments in commands("pma", ROOT / "docs" / "merging.md"):
        assert main(arguments) == 0, f"pma {shlex.join(arguments)}\n{capfd.readouterr().err}"
    made = sorted(str(path.relative_to("merged")) for path in Path("merged").rglob("provenance.json"))
    assert len(made) == 13, made


def write_trainer_trees(name: str, folder: Path) -> None:
    """Write three checkpoints of the trainer of a page, at steps 100, 200 and 300."""
    if name in ("maxtext", "levanter"):  # decoders, which the page exports
        made = hf_models.model("llama" if name == "maxtext" else "qwen3")
        trainer_models.write_config(folder / "config.json", made)
        for seed in (1, 2, 3):
            if name == "maxtext":
                tree = trainer_models.maxtext_tree(*trainer_models.maxtext_layers(made, seed), "scanned")
                trainer_models.save_maxtext(folder / name, tree, 100 * seed)
            else:
                trainer_models.save_levanter(folder / name, trainer_models.levanter_model(made, seed)[0], 100 * seed)
        return
    if name == "kauldron":
        trainer_trees.save_kauldron(folder / "saved", (1, 2, 3)).rename(folder / name)
        return
    for seed in (1, 2, 3):
        if name == "numpy":
            (folder / name).mkdir(exist_ok=True)
            np.savez(
                folder / name / f"step_{100 * seed}.npz",
                **{"params/w": np.full((3, 2), 1.0 * seed), "step": np.int64(100 * seed)},
            )
        else:
            save = {
                "big_vision": trainer_trees.save_big_vision,
                "easydel": trainer_trees.save_easydel,
                "t5x": trainer_trees.save_t5x,
            }[name]
            save(folder / name, seed)


@pytest.mark.parametrize("page", TRAINER_PAGES, ids=lambda page: page.stem)
def test_trainer_page_commands_run(tmp_path, monkeypatch, capfd, page):
    write_trainer_trees(page.stem, tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments in commands("pma", page):
        assert main(arguments) == 0, f"pma {shlex.join(arguments)}\n{capfd.readouterr().err}"
    assert len(list(Path("merged").rglob("provenance.json"))) == 1


def test_grids_page_commands_run(tmp_path, monkeypatch, capfd):
    rng, page = np.random.default_rng(0), ROOT / "docs" / "grids.md"
    for step in range(100, 1100, 100):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        weights = {"w": rng.standard_normal((50, 30), np.float32)}
        save_file(weights, tmp_path / "checkpoints" / f"step-{step}" / "model.safetensors")
    (tmp_path / "score.py").write_text(blocks("python", page)[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for arguments in commands("pma", page):
        # The default recipes are four; two are enough here.
        assert main([*arguments, "--recipes", "sma,wma", "--parallel", "2"]) == 0, capfd.readouterr().err
    scores = {
        (row["text"], row["end"]): row["score"] for row in json.loads(Path("scored/sweep.json").read_text())["rows"]
    }
    assert len(scores) == 12 and min(scores, key=scores.__getitem__)[0] == "sma:6"
    assert {path.name for path in Path("scored").iterdir() if path.suffix} >= {"sweep.json", "sweep.png", "ends.png"}


@pytest.mark.slow
def test_grids_of_runs_page_commands_run(tmp_path, monkeypatch, capfd):
    small = write_small_demo(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", processes.xla_flags(1))  # of the runs
    for arguments in commands("pma", ROOT / "docs" / "grids_of_runs.md"):
        short = ["--config.training.total_tokens=204800"] if arguments[0] == "grid" else []
        assert main([*(small if word == "demo" else word for word in arguments), *short]) == 0, capfd.readouterr().err
    assert sorted(path.name for path in Path("runs/grid").iterdir() if path.is_dir()) == [
        f"schedule.peak_rate={rate},training.seed={seed}" for rate in (0.001, 0.002) for seed in (0, 1)
    ]
    assert len(re.findall("^schedule.* finished ", capfd.readouterr().out, re.M)) == 8


def write_models(finished, folder: Path) -> None:
    """Write the inputs of docs/huggingface.md: three models with their tokenizer, a run, and texts."""
    for name, kind in (("llama", "llama"), ("other", "llama"), ("mixture", "mixture")):
        hf_models.write_random_hf_model(folder / "models" / name, hf_models.model(kind))
        byte_tokenizer().save(folder / "models" / name / "tokenizer.json")
    shutil.copytree(finished.path, folder / "runs" / "demo")
    tiny.write_corpus(folder / "texts")


def adapt_to_small_model(arguments: list[str], folder: Path) -> list[str]:
    """Return the same command with its token cache in `folder` and a sufficient held-out share of its text."""
    keys = {"data.cache_dir": folder / "cache", "data.held_out_percent": 20, "evaluation.tokens": 500}
    return arguments + [f"--config.{key}={value}" for key, value in keys.items() if arguments[0] == "evaluate"]


def test_hugging_face_page_commands_run(finished, tmp_path, monkeypatch, capfd):
    write_models(finished, tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments in commands("pma", ROOT / "docs" / "huggingface.md"):
        assert main(adapt_to_small_model(arguments, tmp_path)) == 0, (
            f"pma {shlex.join(arguments)}\n{capfd.readouterr().err}"
        )
    made = sorted(path.parent.name for path in Path("models").rglob("generation_config.json"))
    assert made == ["mixture-again", "newest", "sma-5", "soup"]


def test_hugging_face_page_python_runs(finished, tmp_path, monkeypatch, capfd):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    write_models(finished, tmp_path)
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "huggingface.md"
    for arguments in commands("pma", page):
        if "sma-5" in shlex.join(arguments):
            assert main(arguments) == 0, f"pma {shlex.join(arguments)}\n{capfd.readouterr().err}"
    capfd.readouterr()
    for block in blocks("python", page):
        exec(compile(block, page.name, "exec"), {})
    assert "def main" in capfd.readouterr().out


def test_cloud_page_launches_are_rendered_and_its_other_commands_parse(capfd):
    page = ROOT / "docs" / "cloud_tpu.md"
    launches = commands("pma", page)
    assert len(launches) == 4
    for arguments in launches:
        assert arguments[0] == "launch" and "--dry-run" in arguments
        assert main(arguments) == 0, f"pma {shlex.join(arguments)}\n{capfd.readouterr().err}"
        assert capfd.readouterr().out.startswith("apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\n")
    lines = "".join(blocks("text", page)).splitlines()
    others = [shlex.split(line)[1:] for line in lines if line.startswith("pma ")]
    assert {arguments[0] for arguments in others} == {"plan", "inspect", "watch", "report", "export"}
    for arguments in others:
        parser().parse_args(arguments)  # exits for a wrong command line


def test_grids_of_runs_page_commands_of_clusters_parse():
    lines = "".join(blocks("text", ROOT / "docs" / "grids_of_runs.md")).replace("\\\n", " ").splitlines()
    others = [shlex.split(line)[1:] for line in lines if line.startswith("pma grid --")]
    assert [parser().parse_args(arguments).engine for arguments in others] == ["slurm", "gke"]


def test_slurm_page_launches_are_rendered(capfd):
    launches = commands("pma", ROOT / "docs" / "slurm.md")
    assert len(launches) == 3
    for arguments in launches:
        assert arguments[0] == "launch" and "--dry-run" in arguments
        assert main(arguments) == 0, f"pma {shlex.join(arguments)}\n{capfd.readouterr().err}"
        assert capfd.readouterr().out.startswith("#!/usr/bin/env bash\n#SBATCH --job-name=pma-")


def test_safety_page_commands_run(finished, tmp_path, monkeypatch, capfd):
    shutil.copytree(finished.path, tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    for arguments in commands("pma", ROOT / "docs" / "safety.md"):
        assert main(arguments) == 0, f"pma {shlex.join(arguments)}\n{capfd.readouterr().err}"
    assert capfd.readouterr().out.count("all data matches its digests") == 4


@pytest.mark.parametrize(
    ("page", "verb"),
    [
        ("merging", "merge"),
        ("merging", "inspect"),
        ("huggingface", "import"),
        ("huggingface", "export"),
        ("planning", "plan"),
        ("grids", "sweep"),
        ("grids_of_runs", "grid"),
        ("hosts", "train"),
        ("cloud_tpu", "launch"),
    ],
)
def test_page_documents_every_option_of_the_verb(page, verb, capsys):
    assert main([verb, "--help"]) == 0
    options = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help", "--json", "--config", "--debug"}
    page = (ROOT / "docs" / f"{page}.md").read_text()
    assert not [option for option in sorted(options) if option not in page]


@pytest.mark.slow
def test_spikes_page_commands_run(tmp_path, monkeypatch, capfd):
    small = write_small_demo(tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments in commands("pma", ROOT / "docs" / "spikes.md"):
        short = ["--config.training.total_tokens=4e5"] if arguments[0] == "train" else []
        # The small demo has one step per snapshot interval, so a window of 16 steps is the minimum.
        short += ["--config.spikes.window_tokens=2e6"] if arguments[0] == "train" else []
        assert main([small if word == "demo" else word for word in arguments] + short) == 0, capfd.readouterr().err
    assert {path.name for path in Path("runs").iterdir()} == {"guarded", "careful", "skipping"}


def test_spikes_page_documents_every_key():
    page = (ROOT / "docs" / "spikes.md").read_text()
    keys = [f"spikes.{field}" for field in configuration.defaults().spikes]
    assert [key for key in keys if key not in page] == ["spikes.detect"]


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_planning_page_commands_run(tmp_path, monkeypatch, capfd):
    small = write_small_demo(tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments in commands("pma", ROOT / "docs" / "planning.md"):
        assert main([small if word == "demo" else word for word in arguments]) == 0, capfd.readouterr().err
    assert json.loads(Path("plan.json").read_text())["topology"]["chips"] == 4


@pytest.mark.long
def test_hosts_page_commands_run(tmp_path, monkeypatch):
    small, page = write_small_demo(tmp_path), ROOT / "docs" / "hosts.md"
    monkeypatch.chdir(tmp_path)
    for arguments in commands("pma", page):
        assert arguments.pop() == "--distributed"
        processes.pma([small if word == "demo" else word for word in arguments], 2).check()
    assert configuration.from_json(Path("runs/demo/config.json").read_text()).mesh.data == -1
    made = ["runs/demo/sweep.json", "runs/demo/watch.jsonl", "runs/demo/merged/wma-10", "runs/annealed/metrics.jsonl"]
    assert all(Path(path).exists() for path in made)


@pytest.mark.long
def test_pages_commands_run_in_reading_order(tmp_path, monkeypatch, capfd):
    small, task = write_small_demo(tmp_path), write_small_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    # In reading order: later pages use the runs and merges of the README.
    for name in ("README", "docs/training", "docs/sweeps_and_previews", "docs/tasks", "docs/averaging_while_training"):
        page = ROOT / f"{name}.md"
        for arguments in commands("pma", page):
            replaced = {"--config": small, "--tasks": task}
            small_words = [
                replaced.get(before, word).replace("tasks=pma:brackets", f"tasks={task}")
                for before, word in zip(["", *arguments], arguments, strict=False)
            ]
            assert main(small_words) == 0, f"{name}: pma {shlex.join(arguments)}\n{capfd.readouterr().err}"
        for block in blocks("python", page):
            exec(compile(block, page.name, "exec"), {})
