"""The intermediate representation: actions and instructions, their tables, dependencies, walks, texts, timelines."""
