"""Distributions as an installer leaves them, in a folder of their own on the path."""

import sys
from contextlib import contextmanager
from textwrap import dedent


@contextmanager
def installing(folder, monkeypatch):
    """Give a function that installs a distribution: its name, lines of its entry points, texts of its modules."""
    before = set(sys.modules)
    sites = []

    def install(distribution, entry_points, **modules):
        site = folder / f"site{len(sites)}"
        information = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text("[penstock.schedules]\n" + "\n".join(entry_points) + "\n")
        for name, text in modules.items():
            (site / f"{name}.py").write_text(dedent(text))
        monkeypatch.syspath_prepend(str(site))
        sites.append(site)

    yield install
    for name in set(sys.modules) - before:
        if any(str(site) in str(getattr(sys.modules[name], "__file__", "")) for site in sites):
            del sys.modules[name]


ZIGZAG = """
    from penstock.schedules import Choice, Family

    def rows(shape, options):
        order = "BF" if options.is_on("wrong") else "FB"
        for rank in range(shape.num_ranks):
            yield [f"{rank}{kind}{index}" for index in range(shape.num_microbatches) for kind in order]

    FAMILY = Family(
        name="zigzag", summary="forward, backward, in turn", source="a plug-in", placement="line",
        restrictions="one stage per rank", bubble="much", memory="1", advice="a test", generate=rows,
        options={"wrong": Choice("false", ("false", "true"), "backwards first")}, example=(2, 3),
    )
    NO_FAMILY = rows
    """
"""A module with a family whose rows are lists of texts."""
