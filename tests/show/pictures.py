"""What tests read in pictures."""

import re
from html import unescape
from xml.etree import ElementTree


def texts_of(picture):
    """Return the texts of an SVG, which stay text, so that a reader can search them."""
    if picture.startswith(b"<?xml"):
        ElementTree.fromstring(picture)
    return [unescape(text).strip() for text in re.findall(r"<text[^>]*>(.*?)</text>", picture.decode(), re.DOTALL)]
