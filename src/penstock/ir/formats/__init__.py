"""Texts of schedules and programs: torch's CSV and JSON, as rows of cells; what cells mean is read in `entries`."""
