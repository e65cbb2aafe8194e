"""The report as one HTML file, and its head for notebooks, made of the figures of `--json` alone."""

from splitc.report.html.head import head
from splitc.report.html.page import page

__all__ = ["head", "page"]
