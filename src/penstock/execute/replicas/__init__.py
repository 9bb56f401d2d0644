"""Replicas of a pipeline: ranks that hold the same stages, work on other rows, and add up or share out what they hold.

mesh.py          reads a DeviceMesh, and connects a rank along its dimensions
agreement.py     the second hop of the agreement on a step: what replicas compare, and their weights
lane.py          gathers and sums over the replicas, by messages of Penstock's own, in the order of the program
summed.py        the layout of parameters that each replica has, and whose gradients are summed
sharded.py       the layout of parameters of which each replica has some rows: gathered.py holds them, and shards of
                 them; packed_parts.py packs their gradients; rows.py says which rows these are
first_replica.py what all take from the first replica: parameters and buffers
"""
