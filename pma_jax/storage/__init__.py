"""Storage: paths of a disk or a bucket, locks, digests, small files."""
