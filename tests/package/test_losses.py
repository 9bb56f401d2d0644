"""The module of losses loads on first use, and has what its page says."""

import penstock as ps
from penstock import losses
from penstock.execute.losses.chunked import chunked_cross_entropy


def test_the_losses_are_public_by_their_short_name():
    assert ps.losses is losses
    assert losses.__all__ == ["chunked_cross_entropy"]
    assert ps.losses.chunked_cross_entropy is chunked_cross_entropy
