"""From a model and a cluster to a run file: `ps.plan_run`.

model          `PlannedModel`: the layers of a folder, a run file, a function or a list, and what they train in
model_costs    their costs on a device that nobody has: sizes by `sizing`, seconds by the roofline
plan_run       `plan_run`: the layouts of `searching.layouts` for these costs
run_plan       `RunPlan` and its rows, as text and JSON
run_file       the run file of a row, which `penstock train` runs as it is
exports        the schedule and the names of modules of a row, as torchtitan and Automodel read them
"""
