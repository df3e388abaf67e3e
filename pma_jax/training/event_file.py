"""The TensorBoard event file of a run."""

import os
import time
from collections.abc import Iterable
from typing import Any

from etils import epath

_START = 1  # SessionLog.START: TensorBoard discards events of earlier processes at this event's step and later


class EventFile:
    """Event file in RUN/tensorboard that is opened, and whose library is imported, at the first scalar.

    The import takes 0.2 s where google-cloud-storage is installed: at the first scalar, a train step runs meanwhile.

    Args:
        folder: Directory of the event files.
        tokens: Number of tokens already trained on; TensorBoard discards later events of earlier processes.
    """

    def __init__(self, folder: epath.Path, tokens: int):
        self._folder, self._tokens = folder, tokens
        self._writer: Any = None

    def write(self, scalars: Iterable[tuple[str, float]], tokens: int) -> None:
        """Append the values of tags at a token count.

        Raises:
            OSError: The file cannot be written.
        """
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        event: Any = vars(event_pb2)["Event"]  # created by protobuf at import: type checkers do not see it
        if not self._writer:
            self._folder.mkdir(parents=True, exist_ok=True)
            # tensorboardX's public writers use a thread: on a full disk it dies, and training waits for it forever.
            self._writer = EventsWriter(str(self._folder / "events"), filename_suffix=f".{os.getpid()}")
            self._writer.write_event(event(step=self._tokens + 1, session_log={"status": _START}))
        for tag, value in scalars:
            self._writer.write_event(event(wall_time=time.time(), step=tokens, summary=summary.scalar(tag, value)))

    def close(self) -> None:
        """Flush and close the file if it was opened."""
        if self._writer:
            self._writer.close()
