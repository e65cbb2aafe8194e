"""The parameters that the servers of MLP hold: ranks 2 3 of 4.  Written by splitc 0.1.0; yours to edit."""

from splitc.runtime import Rows

PLAN = "db4f632aa5bc"

SERVED = {  # role of the workers -> buckets, in the order in which backward fills them
    "worker": (
        {  # 4.95 kB
            "output.bias": (Rows(server=2, first=0, last=10),),
            "output.weight": (Rows(server=2, first=0, last=10),),
            "hidden.1.bias": (Rows(server=2, first=0, last=33),),
            "hidden.1.weight": (Rows(server=2, first=0, last=15), Rows(server=3, first=15, last=33)),
            "hidden.0.bias": (Rows(server=3, first=0, last=16),),
            "hidden.0.weight": (Rows(server=3, first=0, last=16),),
        },
    ),
}
