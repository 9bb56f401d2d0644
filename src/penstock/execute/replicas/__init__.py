"""Replicas of a pipeline: ranks that hold the same stages, work on other rows, and add up their gradients.

mesh.py          reads a DeviceMesh, and connects a rank along its dimensions
agreement.py     the second hop of the agreement on a step: what replicas compare, and their weights
reductions.py    sums over the replicas, by messages of Penstock's own
summed.py        the layout of parameters whose gradients are summed
first_replica.py what all take from the first replica: parameters and buffers
"""
