"""Runtime: the device mesh, the processes of a job, signals, the C allocator, formatting of errors."""
