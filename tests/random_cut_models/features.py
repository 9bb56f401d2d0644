"""What a feature of a random model may do, and the vocabulary of all features."""

from contextlib import nullcontext

FEATURES = {}
"""Classes of features by name."""


class Feature:
    """One thing that a forward does around its blocks. It holds drawn numbers alone, so copies of a model share it."""

    has_state = False
    """Whether a forward changes what a later call reads. All calls train then, since an evaluation changes nothing."""
    weight = 1.0
    """How often it is drawn; less where most of its kinds can only be refused, so that other features are seen too."""
    has_options = False
    """Whether some batches bring keywords that others lack."""

    def __init_subclass__(cls, is_base=False):
        if not is_base:
            FEATURES[cls.__name__] = cls

    def __init__(self, draw, depth):
        self.draw, self.depth = draw, depth
        self.place = draw.randrange(depth)
        """Index of a call of a block."""
        self.later = draw.randrange(self.place, depth)
        self.kind = draw.choice(self.kinds)

    kinds = ("",)

    def __str__(self):
        return f"{type(self).__name__}({self.kind or '-'}, {self.place}, {self.later})"

    def build(self, model):
        """Add modules, parameters, buffers and attributes to a model."""

    def batch(self, draw, rows, length):
        """Return keywords of a batch that has what the feature looks for."""
        return {}

    def change(self, model, number):
        """Change the model as its owner, before a call of this number."""

    def order(self, order):
        """Return the indices of blocks in the order of their calls."""
        return order

    # ---- hooks of the forward, each with the model and the values of one forward

    def begin(self, model, run): ...

    def before(self, model, run, place, block): ...

    def around(self, model, run, place, block):
        return nullcontext()

    def after(self, model, run, place, block): ...

    def end(self, model, run): ...

    def output(self, model, run, output):
        return output
