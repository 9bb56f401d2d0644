"""Split backwards: which weight gradients wait for W, and what I keeps for them.

formulas          the products of activations and weights, and the gradient of each side
deferred          what every kind of weight gradients that wait has in common, and how those of many are added up
deferred_product  one product whose weight gradients wait
products          the table: where each product is found, in a graph or in a forward
graph_cut         the graph of a compiled backward in two halves
compiled_block    a compiled block whose weight half waits
weight_grad_mode  a forward that splits its products, for layers that run again
graph_search      which products of a graph can wait
deferred_weights  what one forward leaves for I and W
watched_layers, plan    what the next step's forwards do, from what earlier ones have shown
"""
