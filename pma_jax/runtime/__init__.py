"""Runtime: devices and their mesh, the processes of one job, signals, the C allocator, errors."""
