"""Run directories: snapshots and states, restoring, retention, the lock."""
