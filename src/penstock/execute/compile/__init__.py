"""From the rows of one rank to bound calls, once per program; one small file per role."""
