"""From a model and a cluster to a run file: `ps.plan_run`.

model          `PlannedModel`: the layers of a folder, a run file, a function or a list, and what they train in
model_work     the work of these layers, for microbatches of any size
state_bytes    what a gradient and the state of an optimizer take, in the precision of the run
costs_source   the costs of these layers: measured, or sizes by `sizing` and seconds by the roofline
clusters       devices by name, what a rank may hold, and the links between them
plan_run       `plan_run`: the layouts of `searching.layouts` for these costs
run_plan       `RunPlan` and its rows, as JSON
run_file       the run file of a row, which `penstock train` runs as it is
exports        the schedule and the names of modules of a row, as torchtitan and Automodel read them
"""
