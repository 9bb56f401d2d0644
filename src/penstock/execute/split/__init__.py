"""Split backwards: which weight gradients wait for W, and what I keeps for them.

deferred          what all weight gradients that wait have in common, and how those of many are added up
formulas          the products of activations and weights, and the gradient of each side
deferred_product  one product whose weight gradients wait
products          the table: where each product is found, in a graph or in a forward
weight_graph      the part of a graph that computes weights from parameters
weight_branch     a branch of it that meets the activations elsewhere than in a product
wanted, custom_function    functions of the user's whose backward asks which half is wanted
graph_cut, compiled_block  a compiled block, whose backward is cut in two halves
own_weight_gradients       layers that compute their weight gradients later by themselves
weight_grad_mode  a forward that splits its products, for layers that run again
graph_search      which of all these in a graph can wait
deferred_weights  what one forward leaves for I and W
watched_layers, plan       what the next step's forwards do, from what earlier ones have shown
"""
