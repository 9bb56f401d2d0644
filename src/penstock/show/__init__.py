"""Pictures of timelines: tables in text, charts, and traces for a trace viewer."""

from penstock.show.chart import draw_overlay, draw_timeline
from penstock.show.text import format_bytes, format_seconds, summary_table
from penstock.show.trace import to_trace

__all__ = ["draw_overlay", "draw_timeline", "format_bytes", "format_seconds", "summary_table", "to_trace"]
