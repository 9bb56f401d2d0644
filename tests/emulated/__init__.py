"""A device without hardware: asynchronous, with several streams, on the CPU, repeatable, and with a checker.

It is torch's PrivateUse1 device under the name `emu`, with 8 devices. Kernels are the CPU's, so numbers are equal to
the bit; they run when a policy or somebody's wait says so. A vector-clock checker reports every access that nothing
orders, under each policy, with operation, stream and lines of both sides. It cannot show speed, a GPU's numerics,
kernels that share a GPU, or drivers.

    extension/     the C++ part: guard, allocators, hooks, generators, a backend of c10d; passes all on to runtime.py
    build.py       compiles it once per version of torch, into ~/.cache/penstock-tests
    install.py     makes this process one that has the device
    runtime.py     what the extension asks, and `launch`, by which kernels, copies and messages are queued
    queues.py      streams, marks, policies (lazy, eager, random), the simulated clock, waits of the host, hangs
    clocks.py      vector clocks
    checker.py     accesses, and the reports of what nothing orders
    stacks.py      where something was launched, at little cost
    memory.py      pools, record_stream, poison, figures
    pinned.py      pinned memory that a queued copy still needs, guarded by pages
    kernels.py     operations of aten; `slow(tensor, seconds)`
    copies.py      copies and values that the host reads
    module.py      torch.emu
    nccl.py        communicators
    rank_threads.py    ranks as threads of one process; `communicator()`
    failing_steps.py   steps that fail, for test_failures.py
    kept_process.py    that process, one per process of pytest
    rank_processes.py  ranks as processes, for what only they show
    pipelines.py       pipelines of rank threads, and what they train
    timed_pipelines.py steps on the simulated clock, with what computations, messages and reductions take
    planting.py        replaces a name of the process while ranks run
    scenarios.py   what the fixture `emulated` of conftest.py gives

How to write a scenario: a function at the top of a test module, `f(rank, num_ranks, *arguments)`, whose arguments and
result travel by pickle. It runs in a thread per rank. Rank r's tensors belong on `emu:r`, which is its current device.

    pytestmark = pytest.mark.emulated

    def _double(rank, num_ranks):
        side = torch.Stream("emu")
        values = torch.ones(4, device="emu")
        side.wait_stream(torch.accelerator.current_stream())  # without it: "unordered accesses"
        with side:
            return (values * 2).cpu().tolist()

    @pytest.mark.parametrize(("policy", "seed"), POLICIES)
    def test_it_doubles(emulated, policy, seed):
        assert emulated.run(_double, policy=policy, seed=seed) == [[2.0] * 4]

`emulated.run` fails on any report, error or hang. `emulated.attempt` returns an Outcome with the reports, for faults
of a scenario; look at their `kind`, `operations` and `text`. Every scenario begins with empty queues and pools.
A clean run of code that never ran says nothing: return counts, or look at `Outcome.host_waits`.

Limits. What the host does is seen where it touches pinned memory, frees, launches and waits. Threads of one rank count
as one host, so a missing lock between them is not seen. A message orders the two ranks' queues when it runs, but its
receiver does not learn what its sender's stream has ended: where only a chain of messages orders an access, the checker
reports it. Memory that autograd or an optimizer frees in a thread without frames of Python has the node's name as its
place. Two queued copies to the host may share a page of pinned memory: an instruction that begins in a free part of
that page, and reads beyond, is not seen; on other processors than x86-64, neither is what follows it. Compiled layers
(inductor), autocast and `Work.get_future`, which DDP needs, are not there.
"""
