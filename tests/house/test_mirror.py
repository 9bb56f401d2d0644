"""Every source file has its test file at the same place under tests/, those of the package's top in tests/package."""

import ast

from tests.house.source import FUNCTIONS, ROOT, SOURCE, modules, parse

# Files without a test file of their own, each with the reason.
EXCEPTIONS = {
    f"penstock.execute.transport.{name}": "execute/transport/test_contract.py holds all transports to one contract"
    for name in ("over_links", "protocol", "torch_dist")
} | {
    "penstock.version": "one constant, printed in tests/cli/test_entry.py",
}


def expected_tests(module):
    """List the places where the tests of a file may lie; empty where it needs none."""
    inner = module.path.relative_to(SOURCE).parent
    place = ROOT / "tests" / (inner if inner.parts else "package")
    if not module.is_package:
        return [place / f"test_{module.path.stem.strip('_')}.py"]
    if not any(isinstance(node, (*FUNCTIONS, ast.ClassDef)) for node in module.tree.body):
        return []
    package = module.path.parent.name
    return [place / f"test_{package}.py", place.parent / f"test_{package}.py", place / "test_init.py"]


def test_every_source_file_has_its_test_file():
    places = {module.name: expected_tests(module) for module in modules()}
    untested = {name for name, paths in places.items() if paths and not any(path.exists() for path in paths)}

    assert sorted(untested) == sorted(EXCEPTIONS), "a file has no tests, or no reason to have none any more"


def test_a_file_is_tested_at_the_same_place_and_a_package_only_where_it_defines_something():
    path, folder = SOURCE / "ir" / "__init__.py", ROOT / "tests" / "ir"

    assert expected_tests(parse("x = 1", "penstock.ir.walk", path.with_name("walk.py"))) == [folder / "test_walk.py"]
    assert expected_tests(parse('"""Doc."""\nfrom a import b', "penstock.ir", path)) == []
    assert folder / "test_ir.py" in expected_tests(parse("def f(): ...", "penstock.ir", path))
