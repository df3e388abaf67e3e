import pytest

from pma_jax.planning import units


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (units.count(1_234_567), "1.235M"),
        (units.count(999), "999"),
        (units.count(999.96, digits=3), "1000"),
        (units.count(8.05e9, digits=3), "8.05B"),
        (units.memory(2**30), "1 GiB"),
        (units.memory(1023 * 2**20), "1023 MiB"),
        (units.memory(1023 * 2**20, digits=3), "1023 MiB"),
        (units.data(96.6e9, digits=3), "96.6 GB"),
        (units.data(5), "5 B"),
        (units.duration(7200), "2 h"),
        (units.duration(90), "1.5 min"),
        (units.duration(0.61, digits=2), "610 ms"),
        (units.duration(0.0036), "3.6 ms"),
        (units.duration(0), "0 ms"),
    ],
)
def test_numbers_as_people_read_them(written, read):
    assert written == read
