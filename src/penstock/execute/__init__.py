"""Executes a program on one rank. `runner.py` is the way of a step, in these numbered lines, as its files say too:

    1  begin        control/failures.py     after a failed step, all ranks start afresh; position, watchdog
    2  admit        batch/local_batch.py   a batch, cut; batch/admission.py, control/agreement.py: all run the same step
    3  make a step  step.py                 the data, the losses, the values: all that the step works on
    4  observe      observing/selection.py  what looks at the calls of a step: recorder, ranges, checks, memory
    5  run          run.py                  the loop over bound calls; outputs.py moves the outputs to one rank
    6  share        losses/exchange.py      every rank gets the losses

A bound call of 5 is a row of the program, or a wait before it, made once: compile/ has the handler of its operation,
in ops/, make it. Handlers call stages/ and transport/.

    runner -> run_step -> run_forward -> StagePasses.forward -> run_layers -> the layer           a forward
    runner -> run_step -> send_outputs -> Sender.send_forward -> Transport.post_send          a send

From below to above; a part imports those before it, and no others:

    undocumented.py, undocumented_backends.py, undocumented_compiler.py,  what torch does not promise
    undocumented_kernels.py, undocumented_modules.py, undocumented_trees.py
    accelerator.py   what is asked of a device
    values/          trees of tensors, layouts, version guard
    transport/       messages                           control/    collectives, agreement, what stops a step
    replicas/        a mesh: gathers and reductions over replicas, what they agree on, what the first one gives
    batch/           microbatches, slices, streams,     losses/     loss functions, weights, results
                     their copies to the device
    parameters/      how they lie, and who writes their gradients
    step.py          `Step`, and `Bound`, one call of it
    split/           which weight gradients wait        backend.py  torch.compile for split backwards
    stages/          layers, their passes, their features
    lost_device.py   what is kept where a device fails
    own_parameters.py     what the modules of a rank hold now
    rank_parameters.py    the units of a rank: what shares parameters
    ops/             what each operation does           observing/  what looks at calls
    overlap.py       overlapped pairs, by the caller's hook
    arguments.py     looks at what the caller passes    options.py  what `Pipeline` takes by keyword
    session.py       what construction hands to the runner
    compile/         rows -> bound calls                run.py      the loop
    joining.py       how a rank joins its group         model_part.py  what one rank holds, as a module
    outputs.py       outputs, on one rank
    runner.py        the way of a step
"""
