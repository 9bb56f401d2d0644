"""Living storages are counted from when they are made until nobody holds them."""

import torch

from penstock.sizing.live_bytes import LiveBytes

BYTES = 400


def made(live, number=100):
    tensor = torch.empty(number)
    live.note([tensor])
    return tensor


def test_the_workspace_of_a_forward_is_what_it_takes_beside_what_it_keeps():
    live = LiveBytes()
    live.begin()

    kept = made(live)
    passing = made(live, 200)
    live.note([passing[1:]])  # a view
    del passing
    other = made(live)

    assert live.num_bytes == 2 * BYTES
    assert live.forward_workspace() == BYTES
    del kept, other
    assert live.num_bytes == 0


def test_the_workspace_of_a_backward_is_what_it_takes_beside_what_was_there():
    live = LiveBytes()
    activation = made(live, 300)
    live.begin()

    gradient = made(live)
    del activation  # freed on the way, for what comes next
    following = made(live, 200)

    assert live.backward_workspace() == BYTES
    assert live.living_bytes() != {}
    del gradient, following
    assert live.living_bytes() == {}
