"""`ps.cut`: a model of one's own trains in a pipeline as in one process."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ConfigError
from penstock.models.cutting.cut import cut, segments
from penstock.models.cutting.points import cut_model
from tests.support.local_pipelines import on_ranks
from tests.support.local_pipelines import token_loss as loss_of


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, hidden, padding):
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, key_padding_mask=padding, need_weights=False)[0]
        return hidden + self.mlp(hidden)


class Model(nn.Module):
    """Positions as a parameter, a mask for all blocks, a value changed behind the norm, and a tied head."""

    def __init__(self, words=11, width=8, depth=4, length=6):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words, padding=None):
        hidden = self.words(words) + self.places[: words.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, padding)
        return self.head(self.norm(hidden) * 2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().double()


@pytest.fixture
def batch():
    words = torch.arange(48).reshape(8, 6) * 7 % 11
    padding = torch.zeros(8, 6, dtype=torch.bool)
    padding[:, 5:] = True
    return words, padding, words.roll(-1, 1)


@pytest.fixture
def expected(model, batch):
    """The loss and the gradients of the whole model in one process."""
    words, padding, target = batch
    loss = loss_of(model(words, padding), target)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


def step_twice(pipeline, batch):
    """Return the loss of the second step, which goes the short way."""
    words, padding, target = batch
    pipeline.step(words=words, padding=padding, target=target)
    return pipeline.step(words=words, padding=padding, target=target).loss


CASES = [("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2), pytest.param("1f1b", 4, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("schedule", "num_ranks"), CASES)
def test_losses_and_gradients_are_those_of_one_process(model, batch, expected, schedule, num_ranks):
    loss, wanted = expected

    def train(transport):
        ranks = {"ranks": 1} if num_ranks == 1 else {"transport": transport}
        pipeline = ps.Pipeline(cut(model, ["blocks.*"]), schedule, 4, loss_of, **ranks)
        return step_twice(pipeline, batch), {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    for found_loss, gradients in on_ranks(num_ranks, train):
        torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            twice = 2 * wanted["words.weight" if name == "head.weight" else name]
            torch.testing.assert_close(gradient, twice, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"recompute": True}, 1e-12),
        ({"seed": 3}, 1e-12),
        ({"debug": "values"}, 1e-12),
        pytest.param({"compile": "aot_eager"}, 1e-10, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_features_of_a_pipeline_hold(model, batch, expected, options, tolerance):
    parts = cut(model, ["blocks.*"])
    modules = [model.words, *model.blocks, model.norm, model.head]
    assert [module for part in parts for module in part.working_modules] == modules
    pipeline = ps.Pipeline(parts, "1f1b", 4, loss_of, ranks=1, **options)

    step_twice(pipeline, batch)

    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * expected[1][name], rtol=tolerance, atol=tolerance)
    assert pipeline.state_dict().keys() == model.state_dict().keys()


def test_a_chain_is_cut_without_a_layer_before_it():
    chain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Tanh())
    parts = cut(chain, ["0", "2"])
    rows = torch.randn(7, 3)

    assert [part.layer_name for part in parts] == ["0", "2"]
    for _ in range(2):
        assert torch.equal(parts[1](parts[0](input=rows), input=rows), chain(rows))


def test_layers_between_points_have_names_of_their_own_and_one_before_them_has_what_names_share():
    found = segments(cut_model(Model(), ["blocks.*"]))
    assert list(found) == ["words", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]
    joined = segments(cut_model(Model(), ["blocks.*"]), "blocks.3")
    assert list(joined) == ["words", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert joined["blocks.3"].stop == joined["head"].start == "norm"
    assert joined["head"].modules == ("norm", "head")
    inner = nn.Module()
    inner.base = Model()
    assert next(iter(segments(cut_model(inner, ["base.blocks.*"])))) == "base"


def by_position(words, padding, target):
    return (words, padding), {"target": target}


def mixed(words, padding, target):
    return (words,), {"padding": padding, "target": target}


def by_name(words, padding, target):
    return (), {"padding": padding, "target": target, "words": words}


def streamed(words, padding, target):
    rows = [slice(begin, begin + 2) for begin in range(0, 8, 2)]
    return (ps.Stream(ps.Part(words[row], padding[row], target=target[row]) for row in rows),), {}


@pytest.mark.parametrize("passed", [by_position, pytest.param(mixed, marks=pytest.mark.slow), streamed])
def test_a_batch_by_position_has_the_bits_of_one_by_name_on_every_rank(model, batch, passed):
    def train(form, transport):
        pipeline = ps.Pipeline(cut(model, ["blocks.*"]), "1f1b", 4, loss_of, transport=transport)
        losses = []
        for call in (pipeline.step, pipeline.evaluate):
            args, kwargs = form(*batch)
            losses.append(call(*args, **kwargs).loss)
        return losses, {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    wanted, found = (on_ranks(2, lambda transport, form=form: train(form, transport)) for form in (by_name, passed))

    for (losses, gradients), (other_losses, other_gradients) in zip(wanted, found, strict=True):
        assert losses == other_losses
        assert gradients.keys() == other_gradients.keys()
        assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_specs_name_a_batch_as_it_is_passed(model, batch):
    words, padding, target = batch
    given = {"": ps.BatchSpec(args=(ps.Split(0), ps.Replicate())), "padding": ps.BatchSpec(kwargs={"padding": None})}
    losses = []
    for name, specs in given.items():
        pipeline = ps.Pipeline(cut(model, ["blocks.*"]), "1f1b", 4, loss_of, ranks=1, specs=specs)
        passed = ((), {name: padding}) if name else ((padding[:2],), {})
        losses.append(pipeline.evaluate(words, *passed[0], target=target, **passed[1]).loss)

    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        (ps.BatchSpec(args=(ps.Split(0), ps.Replicate())), "specs has args, .* are passed by name.* by position"),
        (ps.BatchSpec(kwargs={"padding": ps.Replicate()}), "specs has kwargs for 'padding', .* by position"),
        (ps.BatchSpec(args=ps.Split(0)), "the ranks disagree on keywords"),
    ],
)
def test_ranks_that_pass_a_batch_as_specs_do_not_name_it_are_refused(model, batch, specs, text):
    words, padding, target = batch

    def refusal(transport):
        pipeline = ps.Pipeline(cut(model, ["blocks.*"]), "1f1b", 4, loss_of, transport=transport, specs=specs)
        is_mixed = text.endswith("keywords")
        by_name = {"padding": padding} if is_mixed else {"words": words, "padding": padding}
        passes_names = (transport.rank == 0) is (specs.args is None)
        args, kwargs = ((words,) if is_mixed else (), by_name) if passes_names else ((words, padding), {})
        with pytest.raises(ps.StepRefused, match=text):
            pipeline.step(*args, target=target, **kwargs)

    on_ranks(2, refusal)


def test_a_batch_that_does_not_fit_is_refused_before_the_step(model, batch):
    words, padding, target = batch
    pipeline = ps.Pipeline(cut(model, ["blocks.*"]), "1f1b", 4, loss_of, ranks=1)

    with pytest.raises(ps.StepRefused, match="the forward of Model: missing a required argument: 'words'"):
        pipeline.step(padding=padding, target=target)
    with pytest.raises(ps.StepRefused, match="Did you mean 'padding'"):
        pipeline.step(words, paddin=padding, target=target)
    with pytest.raises(ps.StepRefused, match="as target="):
        pipeline.step(words, labels=target)


def test_layers_are_measured_on_a_batch_by_position_or_by_name(model, batch):
    parts = cut(model, ["blocks.*"])
    words, padding, _ = batch
    for args, kwargs in (((words, padding), {}), ((), {"words": words, "padding": padding})):
        assert len(ps.measure_layers(parts, args, kwargs, num_rounds=1).forward_s) == len(parts)


class Bridge(nn.Module):
    """Hands the encoder's output on to the decoder, which begins with an embedding."""

    def __init__(self, memory):
        super().__init__()
        self.words, self.memory = nn.Embedding(11, 8), memory

    def forward(self, hidden, words):
        self.memory.put(hidden)
        return self.words(words)


class Decoding(nn.Linear):
    def __init__(self, memory):
        super().__init__(8, 8)
        self.memory = memory

    def forward(self, hidden):
        return super().forward(hidden).tanh() * self.memory.get()


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        memory = ps.Skip("memory")
        self.encoder, self.bridge = nn.Embedding(11, 8), Bridge(memory)
        self.decoder = nn.ModuleList(Decoding(memory) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, source, words):
        hidden = self.bridge(self.encoder(source), words)
        for block in self.decoder:
            hidden = block(hidden)
        return self.head(hidden)


def test_a_skip_inside_points_carries_the_output_of_an_encoder_to_all_blocks_of_its_decoder(batch):
    torch.manual_seed(0)
    model, (words, _, target) = Translator().double(), batch
    loss_of(model(words, target), target).backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    def train(transport):
        pipeline = ps.Pipeline(cut(model, ["bridge", "decoder.*"]), "1f1b", 4, loss_of, transport=transport)
        pipeline.step(words, target, target=target)
        return {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    for gradients in on_ranks(4, train):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12)


def test_slices_are_refused_before_a_step(model):
    with pytest.raises(ConfigError, match="whole sequences"):
        ps.Pipeline(cut(model, ["blocks.*"]), "seq1f1b", 4, loss_of, slices=2, ranks=1)


def test_what_is_no_module_compiled_or_not_made_yet_is_refused():
    with pytest.raises(ConfigError, match="compiled as a whole"):
        cut(torch.compile(nn.Sequential(nn.Linear(2, 2))), ["0"])
    with pytest.raises(ConfigError, match=r"'1\.weight' has no shape before its first input"):
        cut(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), ["0"])
    with pytest.raises(ConfigError, match=r"expected an nn\.Module"):
        cut([nn.Linear(2, 2)], ["0"])
    with pytest.raises(ConfigError, match=r"model: is on the meta device, where '0\.weight' .* pass ps\.cut weights="):
        cut(nn.Sequential(nn.Linear(2, 2, device="meta")), ["0"])
