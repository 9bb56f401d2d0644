"""Split backwards: which weight gradients wait for W, what I keeps for them, and why the others do not wait.

In the order of a step:

    planner, plan      before a step: one `SplitPlan` from what earlier steps have shown; the reasons that are reported
    deferred_weights   I: a backward to all leaves but the weights that wait; W: what it has left
    graph_search       the walk of I through the graph: asks the finders at each node, settles conflicts
    finders            who is asked, and in what order
    deferred_node      what every node has in common whose weight gradients wait: watch, keep, release, gradients
    weight_graph       which nodes lead to parameters alone

One file per way to wait; none of them knows another one, and neither does the walk:

    products                    products of activations and weights
    weight_branch               what is made of weights alone and meets the activations elsewhere
    custom_function, wanted     functions of the user's whose backward asks which half is wanted
    compiled_block, graph_cut   compiled blocks, whose backward is cut in two halves
    own_weight_gradients        layers that compute their weight gradients later by themselves

Why does a weight not wait? Vectors, such as biases and norms, stay in I by design. `SplitPlanner.immediate` has the
reason of each matrix (`Reason`):

    small                   `SplitPlan.small`: its size is under `planner.SMALL`; `SplitPlanner.is_small` says so
    cannot be told apart    no finder has found it: its node is of no kind that one knows, or a function that does not
                            ask, or hooks of the user's keep the activations (`is_saved_elsewhere`), or
                            `WeightGraph.origin_behind` has returned None; or `_Search.settle` has refused it; or a
                            reentrant checkpoint is in the same graph (`Survey.is_opaque`)
    its layer computes it   no gradient has come to it in I, and no finder has found it
"""
