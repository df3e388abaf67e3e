"""Kill real processes (SIGKILL) at random times and at moments detected on disk; seeded.

After each kill everything published is bitwise equal to an uninterrupted run's, by the digests of every leaf and by
reading the files again. The same command then resumes, and its losses, states and final parameters are those of that
run. A merge is complete or absent, and so are prepared tokens.
"""

import collections
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tiny

from pma_jax.data import shards
from pma_jax.merging.verify import verify
from pma_jax.runs import restore, steps
from pma_jax.runs.directory import is_run, open_run
from pma_jax.storage.paths import absolute_path

# A snapshot every 2nd step, a state every 4th, and few of each are kept, so that some write or removal is always in
# progress.
OFTEN = {"checkpoint__interval_tokens": 512, "checkpoint__state_interval_tokens": 1024, "preview__windows": ()}
FEW = {"checkpoint__window": 2, "checkpoint__keep_windows": 1, "checkpoint__keep_states": 1}
TMP = ".orbax-checkpoint-tmp"
FORK_TOKENS = 4096


@pytest.fixture(scope="module")
def uninterrupted(workspace):
    """Train the uninterrupted run, on one device like the others; it keeps every snapshot and every state."""
    file = tiny.write_config(workspace / "uninterrupted.py", workspace, checkpoint__keep_states=100, **OFTEN)
    done = pma("train", "--config", file, "--workdir", workspace / "uninterrupted")
    assert done.returncode == 0, done.stderr
    return open_run(workspace / "uninterrupted")


@pytest.fixture(scope="module")
def kills():
    counted = collections.Counter()
    yield counted
    print(f"\nkills survived: {sum(counted.values())}: {dict(sorted(counted.items()))}")


# --- When to kill: functions of a folder that return whether to kill now ----------------------------------------------


def names_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_writing(folder):
    return lambda run: any(TMP in name for name in names_in(run / folder))


def is_new(folder):
    before = []

    def appeared(run):
        now = {name for name in names_in(run / folder) if name.isdigit()}
        before.append(now)
        return bool(now - before[0])

    return appeared


def is_removing(run):
    for folder in ("snapshots", "states"):
        for name in names_in(run / folder):
            if name.isdigit() and not (run / folder / name / steps.COMMIT_MARKER).exists():
                return True
    return False


def has_steps(count):
    before = []

    def trained(run):
        try:
            lines = (run / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            lines = 0
        before.append(lines)
        return lines - min(before) >= count

    return trained


def moments(rng: random.Random) -> dict:
    return {
        "start": lambda run: True,
        "steps": has_steps(rng.randrange(1, 12)),
        "snapshot": is_writing("snapshots"),
        "state": is_writing("states"),
        "published snapshot": is_new("snapshots"),
        "published state": is_new("states"),
        "retention": is_removing,
    }


def pma(*arguments) -> subprocess.CompletedProcess:
    return tiny.pma(*arguments, devices=1)


def start_and_kill(arguments, moment, folder: Path, delay: float) -> bool:
    """Start `pma` and kill it `delay` seconds after the moment; return False if it had already exited."""
    process = subprocess.Popen(
        tiny.command(*arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=tiny.environment(1),
    )
    until = time.monotonic() + 300
    while process.poll() is None and not moment(folder):
        assert time.monotonic() < until, "the moment never came"
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    _, err = process.communicate(timeout=240)
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode == -signal.SIGKILL


# --- Training, snapshots, states, retention ---------------------------------------------------------------------------


def assert_published_equals(path: Path, uninterrupted) -> None:
    """Assert that everything a killed run published is bitwise equal to the uninterrupted run's."""
    if not is_run(path):
        return
    run = open_run(path)
    assert verify(run.path) == []
    for folder in ("snapshots", "states"):
        for step in steps.published_steps(run.path / folder):
            assert restore.read_digests(step) == restore.read_digests(uninterrupted.path / folder / step.name), step
    numbers = tiny.numbers(run)
    assert numbers == tiny.numbers(uninterrupted)[: len(numbers)]


def assert_finishes_like(path: Path, uninterrupted, arguments) -> None:
    """Run the same command to its end and assert that it finishes like the uninterrupted run."""
    done = pma(*arguments)
    assert done.returncode == 0, done.stderr
    assert_published_equals(path, uninterrupted)
    run = open_run(path)
    assert len(tiny.numbers(run)) == len(tiny.numbers(uninterrupted))
    assert [s.step for s in run.states] == [24] and [s.step for s in run.snapshots] == [22, 24]
    leftovers = [name for folder in ("snapshots", "states") for name in names_in(path / folder) if not name.isdigit()]
    assert leftovers == [] and not (path / "damaged").exists()


def kill_training(arguments, path, uninterrupted, kills, rng, count) -> None:
    """Kill one run `count` times and run the same command after each kill."""
    for number in range(count):
        name, moment = rng.choice(list(moments(rng).items()))
        delay = rng.uniform(0, 6) if name == "start" else rng.choice([0.0, rng.uniform(0, 0.02)])
        if start_and_kill(arguments, moment, path, delay):
            kills[name] += 1
        assert_published_equals(path, uninterrupted)
        if number + 1 < count and is_run(path):
            newest = open_run(path).newest_resumable_state
            if newest and newest.step == 24:  # The run was complete: start a new one for the remaining kills.
                shutil.rmtree(path)
    assert_finishes_like(path, uninterrupted, arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), [(0, 4), *((seed, 6) for seed in (1, 2, 3, 4))])
def test_killed_training_resumes_bitwise(uninterrupted, workspace, tmp_path, kills, seed, count):
    file = tiny.write_config(tmp_path / "config.py", workspace, **OFTEN, **FEW)
    arguments = ["train", "--config", file, "--workdir", tmp_path / "run"]
    kill_training(arguments, tmp_path / "run", uninterrupted, kills, random.Random(seed), count)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retention", "published state", "state", "snapshot"])
def test_repeated_kill_at_one_moment_resumes_bitwise(uninterrupted, workspace, tmp_path, kills, name):
    file = tiny.write_config(tmp_path / "config.py", workspace, **OFTEN, **FEW)
    arguments = ["train", "--config", file, "--workdir", tmp_path / "run"]
    for _ in range(3):
        kills[name] += start_and_kill(arguments, moments(random.Random(0))[name], tmp_path / "run", 0.0)
        assert_published_equals(tmp_path / "run", uninterrupted)
    assert_finishes_like(tmp_path / "run", uninterrupted, arguments)


@pytest.mark.slow
def test_resume_at_horizon_completes_pending_removals(uninterrupted, workspace, tmp_path):
    file = tiny.write_config(tmp_path / "config.py", workspace, **OFTEN, **FEW)
    arguments = ["train", "--config", file, "--workdir", tmp_path / "run"]
    assert pma(*arguments).returncode == 0
    for name in ("snapshots/20", "snapshots/18", "states/20"):  # As they were before the last step was published.
        shutil.copytree(uninterrupted.path / name, tmp_path / "run" / name)
    (tmp_path / "run" / "snapshots/18" / steps.COMMIT_MARKER).unlink()
    assert_finishes_like(tmp_path / "run", uninterrupted, arguments)


# --- Forking ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_killed_fork_resumes_bitwise(uninterrupted, tmp_path, kills, seed):
    rng = random.Random(seed)
    path = tmp_path / "fork"
    keys = [f"--config.{key.replace('__', '.')}={value}" for key, value in FEW.items()]
    arguments = ["fork", uninterrupted.path, "--at-tokens", FORK_TOKENS, "--workdir", path, *keys]
    copying = [
        lambda run: any(name.endswith(".copying") for name in names_in(run / "states")),
        lambda run: bool(names_in(run / "states")),
        lambda run: (run / "run.json").exists(),
        is_writing("states"),
    ]
    for moment in copying if seed else copying[:1]:
        kills["fork"] += start_and_kill(arguments, moment, path, rng.choice([0.0, rng.uniform(0, 0.01)]))
        for step in steps.published_steps(absolute_path(path) / "states"):
            assert restore.read_digests(step) == restore.read_digests(uninterrupted.path / "states" / step.name)
    done = pma(*arguments)
    assert done.returncode == 0, done.stderr
    run = open_run(path)
    assert tiny.numbers(run) == tiny.numbers(uninterrupted, FORK_TOKENS) and verify(path) == []
    tiny.assert_equal(tiny.read(run.snapshots[-1]), tiny.read(uninterrupted.snapshots[-1]))


# --- Preparing data ---------------------------------------------------------------------------------------------------

PREPARES = """
import sys, json
from pathlib import Path
from pma_jax import config
from pma_jax.data import shards
shards.prepare_tokens(config.from_json(Path(sys.argv[1]).read_text()).data)
"""


@pytest.mark.parametrize("count", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_preparation_leaves_only_complete_tokens(workspace, tmp_path, kills, count):
    from pma_jax import config as configuration

    rng = random.Random(count)
    config = tiny.config(workspace, data__cache_dir=str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(configuration.to_json(config))
    arguments, cache = tiny.python(PREPARES, tmp_path / "config.json"), tmp_path / "cache"
    for _ in range(count):
        shutil.rmtree(cache, ignore_errors=True)
        process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(name.endswith(".tmp") for name in names_in(cache)):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        kills["data"] += process.wait() == -signal.SIGKILL
        for name in names_in(cache):
            if not name.startswith("."):
                shards.open_tokens(cache / name)
    tokens = shards.prepare_tokens(config.data)
    known = shards.prepare_tokens(tiny.config(workspace).data)
    assert tiny.contents(tokens.directory).keys() >= {"meta.json", "tokenizer.json"}
    assert tokens.digest == known.digest and tokens.train.tokens == known.train.tokens
    assert tokens.train.ids.tobytes() == known.train.ids.tobytes()
    assert not any(name.endswith(".tmp") for name in names_in(cache))


# --- Merging ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 16])
def test_killed_merge_is_complete_or_absent(uninterrupted, tmp_path, kills, count):
    rng = random.Random(count)
    arguments = ["merge", uninterrupted.path, "--last", "6", "--recipe", "sma", "--out"]
    assert pma(*arguments, tmp_path / "never-killed").returncode == 0
    expected = {
        name: content for name, content in tiny.contents(tmp_path / "never-killed").items() if name != "provenance.json"
    }
    for number in range(count):
        out = tmp_path / f"merged-{number}"
        is_working = lambda _, out=out: out.exists() or any(f".{out.name}." in n for n in names_in(tmp_path))  # noqa: E731
        kills["merge"] += start_and_kill([*arguments, out], is_working, tmp_path, rng.uniform(0, 0.03))
        for again in (False, True):
            if again:
                done = pma(*arguments, out)
                assert done.returncode == 0 or "exists already" in done.stderr, done.stderr
            assert not out.exists() or verify(out) == [], "complete or absent"
        actual = {name: content for name, content in tiny.contents(out).items() if name != "provenance.json"}
        assert actual == expected
    assert not [name for name in names_in(tmp_path) if name.startswith(".")]
