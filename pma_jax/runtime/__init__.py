"""Runtime: the device mesh, the processes of a job, signals, the C allocator; errors, numbers and tables as text."""
