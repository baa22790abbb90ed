"""Make the JSON Schema that the model sees from a function's signature and docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.tools.schema.arguments_model import function_schema as function_schema
    from agentenv.tools.schema.arguments_model import returns_schema as returns_schema
    from agentenv.tools.schema.dialects import Dialect as Dialect
    from agentenv.tools.schema.dialects import Schema as Schema
    from agentenv.tools.schema.dialects import in_dialect as in_dialect
    from agentenv.tools.schema.dialects import tidy as tidy
    from agentenv.tools.schema.docstrings import FunctionDoc as FunctionDoc
    from agentenv.tools.schema.docstrings import ParameterDoc as ParameterDoc
    from agentenv.tools.schema.docstrings import read_docstring as read_docstring
    from agentenv.tools.schema.signature import Parameter as Parameter
    from agentenv.tools.schema.signature import Signature as Signature
    from agentenv.tools.schema.signature import UnresolvedAnnotation as UnresolvedAnnotation
    from agentenv.tools.schema.signature import read_signature as read_signature

__all__ = door(__name__)
