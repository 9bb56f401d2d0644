"""The tests.

The folders mirror src/penstock (package/: its topmost files), but for acceptance/ (what a user sees, by subject),
exactness/, random_models/ and random_cut_models/ (comparisons with one process over everything), emulated/ (a device
without hardware), house/ (rules of the code), data/ and support/ (what tests share).
"""
