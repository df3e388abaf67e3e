"""Errors of a file of lines name it."""

import errno
import resource
import signal
from contextlib import closing

import pytest
from etils import epath

from pma_jax.storage.lines import LineFile


def test_lines_that_cannot_be_written_name_the_file_also_when_it_is_closed(tmp_path):
    path = epath.Path(tmp_path / "metrics.jsonl")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl") as raised, closing(LineFile(path)) as file:
            file.write_lines("a complete line\n")
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
            file.write_lines("a line that is cut short\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.errno == errno.EFBIG
    assert path.read_text() == "a complete line\na li"
