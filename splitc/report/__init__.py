"""The placement report: which layer runs where, why, and what every family of plans would cost."""

from splitc.report.figures import as_json
from splitc.report.text import report

__all__ = ["as_json", "report"]
