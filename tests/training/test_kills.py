"""Real processes, killed (SIGKILL) at random times and at moments picked from what appears on disk; seeded.

After each kill everything published is bitwise that of a run that was never killed, by the digests of every leaf and
by reading the files again; the same command then goes on, and the losses, states and parameters at the end are those
of that run too. A merge is whole or absent, and so are prepared tokens.
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

# A snapshot every second step, a state every fourth, and few of each are kept: something is always being written or
# removed.
OFTEN = {"checkpoint__interval_tokens": 512, "checkpoint__state_interval_tokens": 1024, "preview__windows": ()}
FEW = {"checkpoint__window": 2, "checkpoint__keep_windows": 1, "checkpoint__keep_states": 1}
TMP = ".orbax-checkpoint-tmp"
FORK_TOKENS = 4096


@pytest.fixture(scope="module")
def whole(workspace):
    """The run that was never killed, on one device as they all; it keeps every snapshot and every state."""
    file = tiny.write_config(workspace / "whole.py", workspace, checkpoint__keep_states=100, **OFTEN)
    done = pma("train", "--config", file, "--workdir", workspace / "whole")
    assert done.returncode == 0, done.stderr
    return open_run(workspace / "whole")


@pytest.fixture(scope="module")
def kills():
    counted = collections.Counter()
    yield counted
    print(f"\nkills survived: {sum(counted.values())}: {dict(sorted(counted.items()))}")


# --- When to kill: functions of a folder that say whether the moment has come -----------------------------------------


def names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_writing(folder):
    return lambda run: any(TMP in name for name in names(run / folder))


def is_new(folder):
    before = []

    def appeared(run):
        now = {name for name in names(run / folder) if name.isdigit()}
        before.append(now)
        return bool(now - before[0])

    return appeared


def is_removing(run):
    for folder in ("snapshots", "states"):
        for name in names(run / folder):
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


def pma(*words) -> subprocess.CompletedProcess:
    return tiny.pma(*words, devices=1)


def killed(words, moment, folder: Path, delay: float) -> bool:
    """Start `pma`, kill it `delay` seconds after the moment; False when it ended by itself before."""
    process = subprocess.Popen(
        tiny.command(*words),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=tiny.environment(1),
    )
    until = time.monotonic() + 300
    while process.poll() is None and not moment(folder):
        assert time.monotonic() < until, "the moment never comes"
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    _, err = process.communicate(timeout=240)
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode == -signal.SIGKILL


# --- Training, snapshots, states, retention ---------------------------------------------------------------------------


def assert_published_is(path: Path, whole) -> None:
    """Everything that a killed run published is bitwise what the whole run has."""
    if not is_run(path):
        return
    run = open_run(path)
    assert verify(run.path) == []
    for folder in ("snapshots", "states"):
        for step in steps.published(run.path / folder):
            assert restore.recorded_digests(step) == restore.recorded_digests(whole.path / folder / step.name), step
    numbers = tiny.numbers(run)
    assert numbers == tiny.numbers(whole)[: len(numbers)]


def assert_ends_as(path: Path, whole, words) -> None:
    """The same command again, not killed, ends as the whole run did."""
    done = pma(*words)
    assert done.returncode == 0, done.stderr
    assert_published_is(path, whole)
    run = open_run(path)
    assert len(tiny.numbers(run)) == len(tiny.numbers(whole))
    assert [s.step for s in run.states] == [24] and [s.step for s in run.snapshots] == [22, 24]
    left = [name for folder in ("snapshots", "states") for name in names(path / folder) if not name.isdigit()]
    assert left == [] and not (path / "damaged").exists()


def kill_training(words, path, whole, kills, rng, count) -> None:
    """`count` kills of one run, each followed by the same command."""
    for number in range(count):
        name, moment = rng.choice(list(moments(rng).items()))
        delay = rng.uniform(0, 6) if name == "start" else rng.choice([0.0, rng.uniform(0, 0.02)])
        if killed(words, moment, path, delay):
            kills[name] += 1
        assert_published_is(path, whole)
        if number + 1 < count and is_run(path):
            newest = open_run(path).newest_state
            if newest and newest.step == 24:  # it was done: a new run for the kills that are left
                shutil.rmtree(path)
    assert_ends_as(path, whole, words)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), [(0, 4), *((seed, 6) for seed in (1, 2, 3, 4))])
def test_training(whole, workspace, tmp_path, kills, seed, count):
    file = tiny.write_config(tmp_path / "config.py", workspace, **OFTEN, **FEW)
    words = ["train", "--config", file, "--workdir", tmp_path / "run"]
    kill_training(words, tmp_path / "run", whole, kills, random.Random(seed), count)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retention", "published state", "state", "snapshot"])
def test_training_at_one_moment_again_and_again(whole, workspace, tmp_path, kills, name):
    file = tiny.write_config(tmp_path / "config.py", workspace, **OFTEN, **FEW)
    words = ["train", "--config", file, "--workdir", tmp_path / "run"]
    for _ in range(3):
        kills[name] += killed(words, moments(random.Random(0))[name], tmp_path / "run", 0.0)
        assert_published_is(tmp_path / "run", whole)
    assert_ends_as(tmp_path / "run", whole, words)


@pytest.mark.slow
def test_what_a_run_killed_at_its_horizon_had_still_to_remove_goes_when_it_is_called_again(whole, workspace, tmp_path):
    file = tiny.write_config(tmp_path / "config.py", workspace, **OFTEN, **FEW)
    words = ["train", "--config", file, "--workdir", tmp_path / "run"]
    assert pma(*words).returncode == 0
    for name in ("snapshots/20", "snapshots/18", "states/20"):  # as they were before the last step was published
        shutil.copytree(whole.path / name, tmp_path / "run" / name)
    (tmp_path / "run" / "snapshots/18" / steps.COMMIT_MARKER).unlink()
    assert_ends_as(tmp_path / "run", whole, words)


# --- Forking ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_forking(whole, tmp_path, kills, seed):
    rng = random.Random(seed)
    path = tmp_path / "fork"
    keys = [f"--config.{key.replace('__', '.')}={value}" for key, value in FEW.items()]
    words = ["fork", whole.path, "--at-tokens", FORK_TOKENS, "--workdir", path, *keys]
    copying = [
        lambda run: any(name.endswith(".copying") for name in names(run / "states")),
        lambda run: bool(names(run / "states")),
        lambda run: (run / "run.json").exists(),
        is_writing("states"),
    ]
    for moment in copying if seed else copying[:1]:
        kills["fork"] += killed(words, moment, path, rng.choice([0.0, rng.uniform(0, 0.01)]))
        for step in steps.published(absolute_path(path) / "states"):
            assert restore.recorded_digests(step) == restore.recorded_digests(whole.path / "states" / step.name)
    done = pma(*words)
    assert done.returncode == 0, done.stderr
    run = open_run(path)
    assert tiny.numbers(run) == tiny.numbers(whole, FORK_TOKENS) and verify(path) == []
    tiny.assert_equal(tiny.read(run.snapshots[-1]), tiny.read(whole.snapshots[-1]))


# --- Preparing data ---------------------------------------------------------------------------------------------------

PREPARES = """
import sys, json
from pathlib import Path
from pma_jax import config
from pma_jax.data import shards
shards.prepare_tokens(config.from_json(Path(sys.argv[1]).read_text()).data, shard_bytes=20_000)
"""


@pytest.mark.parametrize("count", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_preparing_data(workspace, tmp_path, kills, count):
    from pma_jax import config as configuration

    rng = random.Random(count)
    config = tiny.config(workspace, data__cache_dir=str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(configuration.to_json(config))
    words, cache = tiny.python(PREPARES, tmp_path / "config.json"), tmp_path / "cache"
    for _ in range(count):
        shutil.rmtree(cache, ignore_errors=True)
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(name.endswith(".tmp") for name in names(cache)):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()
        kills["data"] += process.wait() == -signal.SIGKILL
        for name in names(cache):
            if not name.startswith("."):
                shards.open_tokens(cache / name)
    tokens = shards.prepare_tokens(config.data)
    known = shards.prepare_tokens(tiny.config(workspace).data)
    assert tiny.contents(tokens.directory).keys() >= {"meta.json", "tokenizer.json"}
    assert tokens.digest == known.digest and tokens.train.tokens == known.train.tokens
    assert b"".join(s.tobytes() for s in tokens.train.shards) == b"".join(s.tobytes() for s in known.train.shards)
    assert not any(name.endswith(".tmp") for name in names(cache))


# --- Merging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_merging(whole, tmp_path, kills, count):
    rng = random.Random(count)
    words = ["merge", whole.path, "--last", "6", "--recipe", "sma", "--out"]
    assert pma(*words, tmp_path / "never-killed").returncode == 0
    expected = {
        name: content for name, content in tiny.contents(tmp_path / "never-killed").items() if name != "provenance.json"
    }
    for number in range(count):
        out = tmp_path / f"merged-{number}"
        is_working = lambda _, out=out: out.exists() or any(f".{out.name}." in n for n in names(tmp_path))  # noqa: E731
        kills["merge"] += killed([*words, out], is_working, tmp_path, rng.uniform(0, 0.03))
        for again in (False, True):
            if again:
                done = pma(*words, out)
                assert done.returncode == 0 or "exists already" in done.stderr, done.stderr
            assert not out.exists() or verify(out) == [], "whole or absent"
        found = {name: content for name, content in tiny.contents(out).items() if name != "provenance.json"}
        assert found == expected
    assert not [name for name in names(tmp_path) if name.startswith(".")]
