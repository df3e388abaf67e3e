"""Training: schedule, optimizer, state, step and the loop that reads top to bottom."""
