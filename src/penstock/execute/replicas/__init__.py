"""Replicas of a pipeline: ranks that hold the same stages, work on other rows, and add up or share out what they hold.

mesh.py          reads a DeviceMesh, and connects a rank along its dimensions
agreement.py     the second hop of the agreement on a step: what replicas compare, and their weights
exchanges.py     gathers and sums over the replicas, by messages of Penstock's own, in the order of the program
rows.py          which rows of a parameter each replica has, where they share it out
early.py         shards layers while they are built; whole_state.py: their state as whole tensors
first_replica.py what all take from the first replica: parameters and buffers
"""
