"""What the servers of MLP hold: ranks 2 3 of 4.  Written by splitc 0.1.0; yours to edit.
"""

PLAN = "db4f632aa5bc"

SERVED = {  # role of the workers -> buckets, in the order in which backward fills them
    "worker": (
        {  # 4.95 kB; parameter: server, first row, one past the last
            "output.bias": ((2, 0, 10),),
            "output.weight": ((2, 0, 10),),
            "hidden.1.bias": ((2, 0, 33),),
            "hidden.1.weight": ((2, 0, 15), (3, 15, 33)),
            "hidden.0.bias": ((3, 0, 16),),
            "hidden.0.weight": ((3, 0, 16),),
        },
    ),
}
