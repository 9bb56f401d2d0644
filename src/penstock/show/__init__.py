"""Pictures of timelines: figures in text, charts, pages, and traces for a trace viewer."""
