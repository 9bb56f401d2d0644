"""Parameters that every replica holds as a whole need nothing done about them."""

import inspect

from penstock.execute.parameters.averaged import Averaged
from penstock.execute.parameters.layout import ParameterLayout, Replicated


def methods(kind):
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_whole_parameters_launch_nothing():
    layout = Replicated()

    layout.begin_step(is_synced=True, sums_tied=True, is_training=True)

    assert not layout.launches
    assert (layout.unshard(), layout.reduce(0, is_last=True), layout.reshard()) == (None, None, None)


def test_every_layout_has_the_methods_of_the_protocol():
    assert methods(ParameterLayout) <= methods(Replicated) & methods(Averaged)
