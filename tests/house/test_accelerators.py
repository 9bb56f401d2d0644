"""No file but those listed asks for one kind of accelerator: `execute/accelerator.py` asks for any."""

import ast

from tests.house.source import ROOT

ALLOWED = {
    "src/penstock/execute/observing/ranges.py": "NVTX is NVIDIA's",
    "bench/gpu.py": "the default of an argument",
    "bench/in_megatron.py": "Megatron-core allocates on cuda by name",
}


def kinds_named(tree):
    """Return the lines that use torch.cuda or name a device of this kind."""
    lines = set()
    for node in ast.walk(tree):
        is_module = isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "torch"
        is_import = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda")
        is_text = isinstance(node, ast.Constant) and str(node.value).partition(":")[0] == "cuda"
        is_asked = isinstance(node, ast.Attribute) and node.attr == "is_cuda"
        if is_module or is_import or is_text or is_asked:
            lines.add(node.lineno)
    return lines


def test_no_file_asks_for_cuda_by_name():
    found = {
        str(path.relative_to(ROOT)): sorted(lines)
        for folder in ("src", "bench", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "cuda" in (text := path.read_text(encoding="utf-8")) and (lines := kinds_named(ast.parse(text)))
    }

    assert sorted(found) == sorted(ALLOWED), found


def test_each_way_to_name_it_is_seen():
    lines = ["from torch.cuda import nvtx", "torch.cuda.synchronize()", "x.type == 'cuda'", "'cuda:1'", "x.is_cuda"]

    assert kinds_named(ast.parse("\n".join([*lines, "x = torch.cpu"]))) == {1, 2, 3, 4, 5}
