"""The text of an SVG figure."""

from xml.etree import ElementTree


def texts(svg: str) -> list[str]:
    """Return each text of a figure, on one line."""
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [" ".join("".join(text.itertext()).split()) for text in found]
