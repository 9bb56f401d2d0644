"""A report says in one line whether the parts are right, and shows what was compared."""

from math import inf

import pytest

from penstock.errors import PenstockError
from penstock.tables import Screen
from penstock.verifying.report import Comparison, Difference, VerifyReport

ROWS = (Comparison("training", "gradient", 12, 3e-9), Comparison("training", "buffer", 0, 0.0))
WRONG = Difference("training", 1, "gradient", "blocks.2.weight", "blocks.2", 0.25)


def test_a_right_report():
    report = VerifyReport("Model in 3 layers", 1e-5, ROWS, notes=("dropout is off",))

    assert report.is_right
    assert str(report).splitlines() == [
        "Model in 3 layers",
        "",
        "mode      kind      tensors  largest difference",
        "───────────────────────────────────────────────",
        "training  gradient       12               3e-09",
        "",
        "note: dropout is off",
        "",
        "right: no difference is larger than 3e-09 of the largest of its kind",
    ]
    report.raise_if_wrong()


def test_a_wrong_report_names_the_first_tensor_its_module_and_by_how_much():
    missing = Difference("training", 1, "gradient", "blocks.1.weight", "blocks.1", inf, "is missing")
    report = VerifyReport("Model", 1e-5, ROWS, (WRONG, missing))

    with pytest.raises(PenstockError) as raised:
        report.raise_if_wrong()

    assert not report.is_right
    assert str(raised.value) == str(report).splitlines()[-1]
    assert str(raised.value) == (
        "wrong: training, batch 1: gradient 'blocks.2.weight' of module 'blocks.2': differs by 0.25 of the largest "
        "gradient. Tensors that differ: gradient 2"
    )
    assert str(missing).endswith("is missing")


def test_a_refused_report_has_the_words_of_the_refusal():
    report = VerifyReport("Model", 1e-5, refusal="'a' is called twice")

    assert not report.is_right
    assert str(report) == "Model\n\nrefused: 'a' is called twice"


def test_a_report_fits_a_screen():
    text = VerifyReport("Model " * 20, 1e-5, ROWS, notes=("a note " * 20,)).text(Screen(width=60))

    assert max(map(len, text.splitlines())) <= 60


def test_the_largest_error_is_finite():
    assert VerifyReport("Model", 1e-5, (Comparison("training", "gradient", 1, inf), *ROWS)).largest_error == 3e-9
    assert VerifyReport("Model", 1e-5).largest_error == 0
