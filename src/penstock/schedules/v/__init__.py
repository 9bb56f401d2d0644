"""V schedules from a building block: repeat it, reorder it, squeeze it (arXiv 2405.15362).

A rank holds two stages of a V: the earlier one, r on rank r, and the later one, 2p-1-r. A building block says in which
slots of time microbatch 0 makes its four passes on each rank: F and f are the forwards of the earlier and of the later
stage, b and B the backwards of the later and of the earlier one, and w is a weight gradient. V-Min on 2 ranks:

    rank 0:  F  .  .  f  b  w  .  B  w
    rank 1:  .  F  f  .  .  b  B  w  w

1. `slots.repeat`: each further microbatch follows 6 slots later, since 6 are what it costs a rank. The four slots of a
   rank differ modulo 6, so microbatches never meet, and two of six slots are left for weight gradients. V-Min on 4
   ranks, three microbatches:

    rank 0:  F  .  .  .  .  .  F  f  b  w  .  .  F  f  b  B  w  w  .  f  b  B  w  w  .  .  .  B  w
    rank 1:  .  F  .  .  .  .  f  F  .  b  w  .  f  F  B  b  w  w  f  .  B  b  w  w  .  .  B  w
    rank 2:  .  .  F  .  .  f  .  .  F  .  b  f  w  B  F  w  b  f  w  B  w  .  b  w  .  B  w
    rank 3:  .  .  .  F  f  .  .  .  .  F  f  b  B  w  w  F  f  b  B  w  w  .  .  b  B  w  w

2. `reorder`: while the first microbatches come in and the last ones go out, ranks idle. Passes move to earlier idle
   slots, as far as dependencies and memory allow.
3. `slots.squeeze`: every rank keeps its order, and runs each pass as early as the rank before allows.

The block decides the memory. An activation lives from its forward to its weight gradient, so on average a rank holds a
sixth of the slots that the two activations of one microbatch live on it. No step after `repeat` exceeds the most that
any rank holds there: reordering counts, squeezing keeps orders, and weight gradients run as soon as a slot is idle.
Durations have no part in this: an order depends on the block and on the number of microbatches alone.

`block` puts the steps together; `v_min`, `v_half`, `v_zb` and `one_f_one_b_v` each bring a block.
"""
