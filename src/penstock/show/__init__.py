"""Pictures of timelines: tables in text, charts, pages, and traces for a trace viewer."""

from penstock.show.chart import draw_overlay, draw_timeline, overlay_chart, timeline_chart
from penstock.show.page import to_page
from penstock.show.text import format_bytes, format_seconds, summary_table
from penstock.show.trace import to_trace

__all__ = [
    "draw_overlay",
    "draw_timeline",
    "format_bytes",
    "format_seconds",
    "overlay_chart",
    "summary_table",
    "timeline_chart",
    "to_page",
    "to_trace",
]
