"""Executes a program on one rank. `runner.py` is the way of a step, in these numbered lines:

    1  begin        control/    after a failed step, all ranks start afresh; watchdog, positions, errors
    2  admit        batch/      what the caller passes, cut into microbatches and slices; control/ agrees on the step
    3  make a step  step.py     the data, the losses, the registers: all that the step works on, and nothing beside it
    4  observe      observing/  what looks at the calls of this step: recorder, ranges, checks, memory
    5  run          run.py      the loop over bound calls
    6  share        losses/     every rank gets the losses; outputs.py moves the outputs to one rank

A bound call of 5 is a row of the program, compiled once: compile/ has one small file per role of a row (compute,
messages, collectives), and calls stages/ and transport/.

    runner -> run_step -> forward -> StagePasses.forward -> run_layers -> the layer           a forward
    runner -> run_step -> send_forward -> Sender.send_forward -> Transport.post_send          a send

From below to above; a part imports those before it:

    undocumented.py, undocumented_compiler.py           what torch does not promise
    values/          trees of tensors, layouts, version guard
    transport/       messages                           control/    collectives, agreement, what stops a step
    batch/           microbatches, slices, streams      losses/     loss functions, weights, results
    step.py          `Step`, and `Bound`, one call of it
    split/           which weight gradients wait        stages/     layers, their passes, their features
    backend.py       torch.compile for split backwards
    observing/       what looks at calls                compile/    rows -> bound calls
    run.py           the loop                           gradients.py, outputs.py, runner.py
"""
