"""Pictures of timelines: figures in text, charts, pages, and traces for a trace viewer."""

PICTURES = ("svg", "png", "html", "trace")
"""`trace` is for Perfetto or chrome://tracing."""
CHARTS = ("svg", "png", "html")
"""These have colours, and so a theme."""
CHART_SUFFIXES = {".svg": "svg", ".png": "png", ".html": "html", ".htm": "html"}
SUFFIXES = CHART_SUFFIXES | {".trace": "trace"}
"""In which format a picture is drawn whose name ends so."""
