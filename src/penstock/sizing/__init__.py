"""Sizes of the layers of a model from its own code, on tensors without values: no weights, no device, no training.

In the order of a count:

    fake_layers    layers whose parameters have shapes and types, but no memory
    batch          one microbatch of real tokens, and what the loss compares the outputs with
    trace          one call of a layer at work: operations, products, bytes moved, bytes that live
    products       the formula of each operation that computes a matrix product
    layer_run      a forward and its backwards of one layer, whole and split
    walk           all layers, stage by stage; each kind of layer runs its backwards once
    layer_work     the result, as `LayerWork` of each layer
    estimate       with the seconds of a device, as `LayerCosts`

Weights that wait for W are those that `execute/split` finds in the graph, and bytes that are kept are counted by the
code that `Pipeline.memory_report` counts them with.
"""
