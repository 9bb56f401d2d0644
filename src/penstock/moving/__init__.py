"""Ways into Penstock from other pipeline systems, with their words; docs/moving/ has a page on each."""
