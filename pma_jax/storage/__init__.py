"""Storage: paths on disks and in buckets, atomic writes, locks, digests, small files."""
