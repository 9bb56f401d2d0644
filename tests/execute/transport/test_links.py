"""Which backend carries a message; `test_contract.py` and tests/emulated have them between ranks."""

from penstock.execute.transport.links import NO_LINKS, Links
from penstock.execute.transport.protocol import Tag


def test_data_has_a_communicator_for_each_direction_and_control_one_of_its_own():
    links = Links("up", "down", "control", "sums")

    assert links.between(0, 2, Tag.DATA) == "up"
    assert links.between(2, 0, Tag.DATA) == "down"
    assert links.between(0, 2, Tag.CONTROL) == links.between(2, 0, Tag.CONTROL) == "control"


def test_each_backend_is_listed_once_to_be_closed():
    gloo = object()

    assert Links(gloo, gloo, gloo).distinct() == [gloo]
    assert len(Links(object(), object(), None, object()).distinct()) == 3
    assert NO_LINKS.distinct() == []
