import pytest

from pma_jax.runtime import formatting


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (formatting.format_count(1_234_567), "1.235M"),
        (formatting.format_count(999), "999"),
        (formatting.format_count(999.96, digits=3), "1000"),
        (formatting.format_count(8.05e9, digits=3), "8.05B"),
        (formatting.format_memory_bytes(2**30), "1 GiB"),
        (formatting.format_memory_bytes(1023 * 2**20), "1023 MiB"),
        (formatting.format_memory_bytes(1023 * 2**20, digits=3), "1023 MiB"),
        (formatting.format_storage_bytes(96.6e9, digits=3), "96.6 GB"),
        (formatting.format_storage_bytes(5), "5 B"),
        (formatting.format_duration(7200), "2 h"),
        (formatting.format_duration(90), "1.5 min"),
        (formatting.format_duration(0.61, digits=2), "610 ms"),
        (formatting.format_duration(0.0036), "3.6 ms"),
        (formatting.format_duration(0), "0 ms"),
    ],
)
def test_numbers_are_formatted_for_readers(written, read):
    assert written == read
