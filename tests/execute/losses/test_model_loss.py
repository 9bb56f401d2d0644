"""A model that brings a loss along trains by it, unless the caller gives one."""

from functools import partial

from penstock.execute.losses.chunked import chunked_cross_entropy
from penstock.execute.losses.model_loss import LayersWithLoss, with_model_loss


class Layers(LayersWithLoss):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)

    def loss(self, output, target):
        return output

    @staticmethod
    def count(target):
        return 1


LAYERS = Layers()


def test_a_count_goes_with_the_loss_of_the_model_alone():
    for layers, loss, options, expected in [
        (LAYERS, None, {"seed": 1}, (LAYERS.loss, {"seed": 1, "count": Layers.count})),
        (LAYERS, LAYERS.loss, {}, (LAYERS.loss, {})),
        (LAYERS, None, {"count": None}, (LAYERS.loss, {"count": None})),
        (LAYERS, None, {"count": len}, (LAYERS.loss, {"count": len})),
        (LAYERS, None, {"reduction": "sum"}, (LAYERS.loss, {"reduction": "sum"})),
        (LAYERS, max, {}, (max, {})),
        ([], None, {}, (None, {})),
    ]:
        assert with_model_loss(layers, loss, options) == expected


def test_the_chunked_cross_entropy_is_the_loss_of_the_model_unless_the_caller_says_how_it_shifts():
    layers = Layers()
    layers.shifts_labels = True

    loss, options = with_model_loss(layers, partial(chunked_cross_entropy, chunk=3), {})
    assert (loss.func, loss.keywords, options) == (
        chunked_cross_entropy,
        {"chunk": 3, "shift": True},
        {"count": Layers.count},
    )
    own = partial(chunked_cross_entropy, shift=False)
    assert with_model_loss(layers, own, {}) == (own, {})
    assert with_model_loss([], chunked_cross_entropy, {}) == (chunked_cross_entropy, {})
