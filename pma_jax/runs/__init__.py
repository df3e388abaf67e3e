"""Run directories: snapshots, states, restoring, retention and the lock."""
