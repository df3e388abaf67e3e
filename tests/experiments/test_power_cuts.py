"""The simulated file system of experiments/faults/power_cuts.py: what a cut may undo, and undoing it."""

import json
import random

import forked
import power_cuts


def entries(tmp_path, *operations):
    return [{"event": event, "path": str(tmp_path / path)} | more for event, path, more in operations]


def test_only_what_is_not_flushed_later_may_be_lost(tmp_path):
    recorded = entries(
        tmp_path,
        ("os.mkdir", "tmp", {}),
        ("open", "tmp/a", {"existed": False}),
        ("open", "tmp/b", {"existed": False}),
        ("os.rename", "done", {"source": str(tmp_path / "tmp")}),
        ("fsync", "done/a", {"size": 3}),
        ("fsync", "done", {"size": 0}),
        ("fsync", "", {"size": 0}),
        ("open", "done/c", {"existed": False}),
        ("os.remove", "done/d", {"copy": "copy"}),
    )
    lost = power_cuts.lost_operations(recorded)
    summary = [(e["event"], e["path"].removeprefix(f"{tmp_path}/"), e["flushed"], e["is_name_durable"]) for e in lost]
    assert summary == [
        ("open", "tmp/a", 3, True),
        ("open", "tmp/b", 0, True),
        ("open", "done/c", 0, False),
        ("os.remove", "done/d", 0, False),
    ]


def test_cut_restores_the_state_before_operations_that_were_not_flushed(tmp_path):
    root, journal = tmp_path / "root", tmp_path / "journal"
    root.mkdir()
    for name in ("old", "replaced", "removed"):
        (root / name).write_text(name)
    recorder = forked.Recorder(root, None, journal)
    steps = [
        ("open", (str(root / "new"), "wb", 0), lambda: (root / "new").write_text("lost")),
        ("os.rename", (str(root / "new"), str(root / "replaced")), lambda: (root / "new").replace(root / "replaced")),
        ("os.remove", (str(root / "removed"), -1), lambda: (root / "removed").unlink()),
        ("os.mkdir", (str(root / "folder"), 0o777, -1), lambda: (root / "folder").mkdir()),
        ("open", (str(root / "old"), "a", 0), lambda: (root / "old").open("a").write(" and more")),
    ]
    for event, values, act in steps:
        recorder._handle(event, values)
        act()
    with journal.open("a") as file:
        file.write(json.dumps({"event": "fsync", "path": str(root / "old"), "size": 3}) + "\n")
    rng = random.Random(0)
    rng.choice = lambda choices: choices[0]
    assert power_cuts.apply_loss(journal, rng) == 5
    assert {path.name: path.read_text() for path in root.iterdir()} == {
        "old": "old",
        "replaced": "replaced",
        "removed": "removed",
    }
    assert list(tmp_path.iterdir()) == [root]


def test_phases_name_the_action_and_the_part():
    assert forked.phase_of("os.rename", "run/states/12") == "publish states"
    assert forked.phase_of("open", "run/snapshots/4.orbax-checkpoint-tmp/params/x") == "write unpublished snapshots"
    assert forked.phase_of("os.remove", "run/snapshots/4/commit_success.txt") == "remove marker of snapshots"
    assert forked.phase_of("fsync", "run/.sweep.json.1-2.writing") == "flush sweep.json"
