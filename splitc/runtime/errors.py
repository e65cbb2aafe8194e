"""The errors of running ranks that a user can catch.  They import nothing, so that messages come quickly."""


class SplitcError(Exception):
    """What splitc raises about the user's model, cluster, plan or launch."""


class LaunchError(SplitcError):
    """The ranks cannot be started, or do not fit what was compiled."""


class RanksFailed(LaunchError):
    """Ranks were started, and one of them failed; its own error is in the text."""
