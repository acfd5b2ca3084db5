"""Masks and changes of scores as expressions that kernels, references and block maps all compute from.

`expression` has the nodes and their text, `operations` what they can do, `trace` makes them of functions,
`evaluate` computes them, `intervals` bounds them over whole blocks, `hoist` takes out what a kernel can't do.
"""

from tpu_kernels.expressions.expression import Apply as Apply
from tpu_kernels.expressions.expression import Constant as Constant
from tpu_kernels.expressions.expression import Expression as Expression
from tpu_kernels.expressions.expression import Load as Load
from tpu_kernels.expressions.expression import Variable as Variable
from tpu_kernels.expressions.expression import parse as parse
from tpu_kernels.expressions.expression import text as text
from tpu_kernels.expressions.operations import ExpressionError as ExpressionError
