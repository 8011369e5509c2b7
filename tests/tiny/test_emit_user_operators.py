"""Copies of the user's files in a package: their names, and the statements that import them."""

from __future__ import annotations

from autoshard.emit.user_operators import copied_files, module_names, readme_section, registering_lines
from autoshard.ir.graph import Registration

FILES = (
    Registration("", ("a.unknown",)),
    Registration("kernels.fused", ("b.one", "b.two")),
    Registration("my-model", ("c.one",), "import torch\n"),
    Registration("my_model", ("d.one",), "import math\n"),
)


def test_files_get_names_that_can_be_imported() -> None:
    assert module_names(FILES) == ["", "kernels.fused", "user_operators.my_model", "user_operators.my_model2"]
    files = copied_files(FILES)
    assert files.pop("user_operators/__init__.py").startswith('"""')
    assert files == {"user_operators/my_model.py": "import torch\n", "user_operators/my_model2.py": "import math\n"}
    assert [module_names([Registration(name, (), "x")])[0] for name in ("2b", "class", "__init__")] == [
        "user_operators._2b", "user_operators.class_", "user_operators._init__"
    ]  # fmt: skip


def test_nothing_is_copied_where_names_do() -> None:
    assert copied_files(FILES[:2]) == {} and copied_files(()) == {}
    assert registering_lines(()) == [] and readme_section(()) == ""


def test_the_model_file_imports_each() -> None:
    assert registering_lines(FILES) == [
        "",
        'register_operators("", "a.unknown")',
        'register_operators("kernels.fused", "b.one", "b.two")',
        'register_operators("user_operators.my_model", "c.one")',
        'register_operators("user_operators.my_model2", "d.one")',
    ]
    text = readme_section(FILES)
    assert "`b.one`, `b.two`: `import kernels.fused`, which must be installed or on `PYTHONPATH`" in text
