"""Training from a run file. `loop.py` reads from top to bottom; each rank runs it.

    settings/     sections of keys, rules between them, and what follows from them by arithmetic
    data/         from files to the batch of any step
    folder/       the names in a run folder, its log, and the processes that hold it
    optimizing/   optimizer, precision, and the update of the weights
    watching/     steps shown, written and diagnosed
    measuring/    seconds of layers and channels, and the split that follows

    claim         which folder a run begins in            setup, model_source     what is built of the settings
    world                                                 how many processes, and the place of each
    step_runner, step                                     one step, and what it was like
    resuming, stopping                                    checkpoints, signals
    generation, profiling                                 the other two commands that run a model

A folder imports those above it, and such files as `together` (what stops one rank stops all) and `devices`; the files
that run a model import all of them.
"""
