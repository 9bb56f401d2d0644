"""Every source file has its test file at the same place under tests/."""

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
    place = ROOT / "tests" / module.path.relative_to(SOURCE).parent
    if not module.is_package:
        return [place / f"test_{module.path.stem.strip('_')}.py"]
    if not any(isinstance(node, (*FUNCTIONS, ast.ClassDef)) for node in module.tree.body):
        return []
    package = module.path.parent.name
    return [place / f"test_{package}.py", place.parent / f"test_{package}.py", place / "test_init.py"]


def test_every_source_file_has_its_test_file():
    missing = []
    for module in modules():
        places = expected_tests(module)
        if places and module.name not in EXCEPTIONS and not any(place.exists() for place in places):
            missing.append(f"{module.name}: {places[0].relative_to(ROOT)}")
    assert not missing, "\n" + "\n".join(missing)


def test_every_exception_is_still_needed():
    untested = {m.name for m in modules() if not any(place.exists() for place in expected_tests(m))}
    assert [name for name in EXCEPTIONS if name not in untested] == []


def test_a_package_file_needs_tests_only_where_it_defines_something():
    path = SOURCE / "ir" / "__init__.py"

    assert expected_tests(parse('"""Doc."""\nfrom a import b', "penstock.ir", path)) == []
    assert ROOT / "tests" / "ir" / "test_ir.py" in expected_tests(parse("def f(): ...", "penstock.ir", path))


def test_a_file_is_tested_at_the_same_place():
    module = parse("x = 1", "penstock.ir.walk", SOURCE / "ir" / "walk.py")

    assert expected_tests(module) == [ROOT / "tests" / "ir" / "test_walk.py"]
