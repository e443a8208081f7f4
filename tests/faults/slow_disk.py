"""Components for the runs of the fault tests; building them makes the process's disk slow or bad."""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import Any

import torch

from tests.distributed.fixtures import VOCAB, Samples

#: Seconds that each fsync takes longer: a save of a tiny model then lasts long enough to be hit.
SLOW_FSYNC_VARIABLE = "FAULTS_SLOW_FSYNC_S"
#: No file of this process may grow beyond so many bytes: the kernel refuses the write (EFBIG).
FILE_LIMIT_VARIABLE = "FAULTS_FILE_LIMIT_BYTES"


def samples(tokenizer: Any = None, *, count: int = 16) -> Samples:
    """Random samples of unequal lengths; built on every rank before training starts."""
    seconds = float(os.environ.get(SLOW_FSYNC_VARIABLE, "0"))
    if seconds:
        fsync = os.fsync

        def slow_fsync(handle: int) -> None:
            time.sleep(seconds)
            fsync(handle)

        os.fsync = slow_fsync
    limit = int(os.environ.get(FILE_LIMIT_VARIABLE, "0"))
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as a full disk: an error, not a signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    g = torch.Generator().manual_seed(5)
    made = []
    for i in range(count):
        tokens = torch.randint(0, VOCAB, (20 + i,), generator=g).tolist()
        made.append({"tokens": tokens, "labels": tokens})
    return Samples(made)
