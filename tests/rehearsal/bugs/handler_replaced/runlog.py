"""The laboratory's run log: a line of JSON per call, flushed when the process is terminated."""

import json
import signal
import sys


class Log:
    def __init__(self, project, enabled):
        self.file = open(f"{project}.jsonl", "a") if enabled else None
        signal.signal(signal.SIGTERM, self._terminated)

    def log(self, **values):
        if self.file:
            self.file.write(json.dumps(values) + "\n")

    def finish(self):
        if self.file:
            self.file.close()

    def _terminated(self, signum, frame):
        self.finish()
        sys.exit(128 + signum)


def init(project, enabled=True):
    return Log(project, enabled)
