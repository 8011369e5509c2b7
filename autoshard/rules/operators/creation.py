"""Tensors made from the shape of another. Others (arange, zeros) are made on every device."""

from __future__ import annotations

from autoshard.rules.algebra.operator_record import CodeWriter, Given, Names, Operator
from autoshard.rules.algebra.saved_for_backward import NOTHING


def spell_constant(writer: CodeWriter, operands: Names, arguments: Given) -> str:
    """Code of a literal tensor; `values` are flat."""
    values, shape = arguments["values"], arguments["shape"]
    assert isinstance(values, tuple) and isinstance(shape, tuple)
    text = writer.literal(values[0]) if not shape else f"[{', '.join(map(writer.literal, values))}]"
    tensor = f"torch.tensor({text}, dtype={writer.literal(arguments['dtype'])}, device={writer.device})"
    return tensor if len(shape) < 2 else f"{tensor}.reshape({', '.join(map(writer.literal, shape))})"


OPERATORS: dict[str, Operator] = {
    "aten.arange": Operator(
        repeated=True,
        explicit_dtype=True,
        spelling="torch.arange(<@start><@end><@step=1><dtype>, device={device})",
        takes_device=True,
        result_name="positions",
    ),
    "autoshard.constant": Operator(repeated=True, explicit_dtype=True, spelling=spell_constant, takes_device=True),
    "aten.empty": Operator(repeated=True, takes_device=True),
    "aten.empty_like": Operator(rule="... -> ...", no_gradient=True),
    "aten.eye": Operator(repeated=True, takes_device=True),
    "aten.full": Operator(
        repeated=True,
        saves=NOTHING,
        explicit_dtype=True,
        spelling="torch.full({size}, {fill_value}<dtype>, device={device})",
        takes_device=True,
    ),
    "aten.full_like": Operator(
        rule="... -> ...", no_gradient=True, spelling="torch.full_like({0}, {fill_value}<dtype>)"
    ),
    "aten.linspace": Operator(repeated=True, in_torch=True, takes_device=True),
    "aten.new_empty": Operator(repeated=True, no_gradient=True),
    "aten.new_full": Operator(repeated=True, no_gradient=True, spelling="{0}.new_full({size}, {fill_value}<dtype>)"),
    "aten.new_ones": Operator(repeated=True, no_gradient=True, spelling="{0}.new_ones({size}<dtype>)"),
    "aten.new_zeros": Operator(repeated=True, no_gradient=True, spelling="{0}.new_zeros({size}<dtype>)"),
    "aten.ones": Operator(repeated=True, spelling="torch.ones({size}<dtype>, device={device})", takes_device=True),
    "aten.ones_like": Operator(rule="... -> ...", no_gradient=True, spelling="torch.ones_like({0}<dtype>)"),
    "aten.scalar_tensor": Operator(
        repeated=True, spelling="torch.tensor({s}<dtype>, device={device})", takes_device=True
    ),
    "aten.zeros": Operator(repeated=True, spelling="torch.zeros({size}<dtype>, device={device})", takes_device=True),
    "aten.zeros_like": Operator(rule="... -> ...", no_gradient=True, spelling="torch.zeros_like({0}<dtype>)"),
}
