"""How the parameters of a rank lie, and who writes their gradients.

layout.py         the protocol of layouts; a plain one leaves parameters whole, and reduces nothing
averaged.py       parameters in DistributedDataParallel, whose gradients are averaged
fully_sharded.py  parameters in fully_shard, which reduces their gradients
summed.py         parameters that each replica has, and whose gradients are summed
sharded.py        parameters of which each replica has some rows; gathered.py holds them, and the whole ones
gradient_store.py the gradients; gradient_sums.py adds up those of parameters that stages share (tied.py)
"""
