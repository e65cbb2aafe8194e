"""What ranks tell each other through the store of their start: signed with a token of the run, and read only then.

torch's store asks nobody who he is, and what is read from it is unpickled.  `splitc run` gives the ranks SPLITC_TOKEN,
random text; where torchrun alone starts them the id of its run (--rdzv-id) stands for it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
from typing import Any

from ..errors import LaunchError

TOKEN = "SPLITC_TOKEN"
_SIZE = hashlib.sha256().digest_size


def sealed(value: Any) -> bytes:
    """A value as bytes that `opened` reads in a process with the same token."""
    data = pickle.dumps(value)
    return _signature(data) + data


def opened(message: bytes) -> Any:
    """The value.  Raises LaunchError, before any of it is read, where another token signed it."""
    data = message[_SIZE:]
    if not hmac.compare_digest(message[:_SIZE], _signature(data)):
        raise LaunchError(
            f"a process that is not of this run has met its ranks: it has not their {TOKEN}, or --rdzv-id of torchrun; "
            f"give each run a port of its own (MASTER_PORT), and all its ranks the same token"
        )
    return pickle.loads(data)


def _signature(data: bytes) -> bytes:
    token = os.environ.get(TOKEN) or os.environ.get("TORCHELASTIC_RUN_ID", "")
    return hmac.digest(token.encode(errors="surrogateescape"), data, "sha256")
