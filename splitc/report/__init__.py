"""Report a plan: the placement of every layer, the reasons, and the predicted step of every strategy."""

from splitc.report.figures import as_json
from splitc.report.text import report

__all__ = ["as_json", "report"]
