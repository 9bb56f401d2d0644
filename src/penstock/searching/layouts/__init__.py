"""Which layout of a training on a cluster takes least time: how many ranks, replicas, shards, of which microbatches.

layout     `Layout`, and all layouts that a cluster and a batch allow
cluster    `Cluster`: its devices, and which link two ranks, or the replicas of a stage, have between them
problem    `LayoutProblem`: what the layers of a model cost in one layout, and what a rank may hold
bounds     seconds that no order of a layout goes below, and bytes that its fullest rank holds at least
planned    `PlannedLayout`: a schedule of a layout, proved, lowered and simulated with its gathers and reductions
families   the best family of a layout that fits, with a split by weights or by memory
searched   split and order of a layout searched together
choosing   branch and bound over all layouts, then the search of the best few
refusing   why nothing fits, and what would do
"""
