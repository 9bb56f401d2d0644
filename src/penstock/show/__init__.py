"""Pictures of timelines: figures in text, charts, pages, and traces for a trace viewer."""

PICTURES = ("svg", "png", "html", "trace")
"""All formats of pictures; `trace` is for Perfetto or chrome://tracing."""
CHARTS = ("svg", "png", "html")
"""The formats that have colours, and so a theme."""
CHART_SUFFIXES = {".svg": "svg", ".png": "png", ".html": "html", ".htm": "html"}
SUFFIXES = CHART_SUFFIXES | {".trace": "trace"}
"""The format of a picture, by the suffix of its file's name."""
