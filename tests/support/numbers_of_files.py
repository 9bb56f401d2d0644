"""A variable of a file, for tests of what forwards change in other files."""

calls = 0
