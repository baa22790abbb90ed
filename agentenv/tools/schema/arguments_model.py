"""Make the pydantic model of a function's arguments, and the JSON Schema that the model of the run is shown.

Calls are validated by the same model, so they cannot disagree with the schema. The descriptions
come from the docstring. The schema of a function has the same bytes in every process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, cast

import typing_extensions
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, SchemaError, core_schema

from agentenv.core.errors import ToolDefinitionError
from agentenv.tools.schema.dialects import Dialect, Schema, in_dialect, tidy
from agentenv.tools.schema.signature import EMPTY, Parameter, Signature

__all__ = ["arguments_model", "arguments_schema", "check_name", "function_schema", "returns_schema"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def check_name(name: str) -> str:
    """Return the name if every provider accepts it as a tool's name.

    Raises:
        ToolDefinitionError: The name is empty, too long or has other characters.
    """
    if _NAME.fullmatch(name):
        return name
    better = re.sub(r"[^a-zA-Z0-9_-]+", "_", name).strip("_")[:64] or "my_tool"
    raise ToolDefinitionError(
        f"tool name {name!r} is refused by providers: 1 to 64 of the characters a-z A-Z 0-9 _ - are allowed",
        remedy=f"pass name={better!r}",
    )


def function_schema(
    name: str, description: str, parameters: Mapping[str, Any], dialect: Dialect = "openai"
) -> Schema:
    """Return a tool's schema in the shape that chat templates and OpenAI-compatible APIs expect.

    Raises:
        ToolDefinitionError: The strict dialect cannot express a parameter; the message names it.
    """
    function: Schema = {
        "name": name,
        "description": description,
        "parameters": in_dialect(parameters, dialect, name),
    }
    if dialect == "strict":
        function["strict"] = True
    return {"type": "function", "function": function}


def returns_schema(signature: Signature) -> Schema | None:
    """Return the schema of a function's result; None if its annotation is missing or has no schema."""
    if signature.returns is EMPTY:
        return None
    try:
        schema = TypeAdapter(cast("Any", signature.returns)).json_schema(
            mode="serialization", schema_generator=_Generator
        )
    except (PydanticUserError, SchemaError, TypeError):
        return None
    schema = tidy(schema)
    if signature.doc.returns:
        schema["description"] = signature.doc.returns
    return schema


def arguments_schema(model: type[BaseModel], signature: Signature) -> Schema:
    """Return the JSON Schema of a tool's arguments as a new object."""
    schema = model.model_json_schema(schema_generator=_Generator)
    if schema.get("additionalProperties") is False:
        del schema["additionalProperties"]
    rest = _rest(signature)
    if rest is not None and rest.doc.description:
        extra = schema.get("additionalProperties")
        schema["additionalProperties"] = {
            **(extra if isinstance(extra, dict) else {}),
            "description": rest.doc.description,
        }
    return tidy(schema)


def _rest(signature: Signature) -> Parameter | None:
    """Return the `**kwargs` of a signature; None if it has none."""
    return next((p for p in signature.visible if p.kind == "kwargs"), None)


def _field(parameter: Parameter) -> tuple[Any, Any]:
    """Return the type and the pydantic field of one parameter."""
    annotation: Any = parameter.annotation
    settings: dict[str, Any] = {}
    if isinstance(parameter.default, FieldInfo):  # x: int = Field(3, ge=0)
        annotation = Annotated[annotation, parameter.default]
    elif parameter.kind == "args":
        settings["default_factory"] = list
    elif parameter.default is not EMPTY:
        settings["default"] = parameter.default
    annotated = FieldInfo.from_annotation(annotation)
    if parameter.kind == "args":
        annotation = list[annotation]
    settings["alias"] = annotated.alias or parameter.name
    description = annotated.description or _plain_description(annotated.metadata) or parameter.doc.description
    if description:
        settings["description"] = description
    if parameter.doc.choices:
        annotation = Annotated[annotation, AfterValidator(_one_of(parameter))]
        settings["json_schema_extra"] = {"enum": list(parameter.doc.choices)}
    return annotation, Field(**settings)


def _plain_description(metadata: list[Any]) -> str:
    """Return the text of `Annotated[str, "text"]` or `Annotated[str, Doc("text")]`."""
    for entry in metadata:
        if isinstance(entry, str):
            return entry
        if isinstance(entry, typing_extensions.Doc):
            return entry.documentation
    return ""


def _one_of(parameter: Parameter) -> Callable[[Any], Any]:
    """Return a validator that accepts only the choices listed in the docstring."""
    choices = parameter.doc.choices

    def check(value: Any) -> Any:
        plain = value.value if isinstance(value, Enum) else value
        if plain in choices or value is None:
            return value
        shown = ", ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        raise PydanticCustomError("choices", "Input should be one of {shown}", {"shown": shown})

    return check


def arguments_model(signature: Signature, names: Mapping[str, object]) -> type[BaseModel]:
    """Return the pydantic model of a tool's arguments; its fields are `p0`, `p1` and so on, in their order.

    Args:
        signature: the signature of the tool's function.
        names: what annotations may name besides the globals of the function's module.

    Raises:
        ToolDefinitionError: A parameter's type cannot be expressed; the message names it.
    """
    base = _base(signature)
    fields = {
        f"p{index}": _field(parameter)
        for index, parameter in enumerate(signature.visible)
        if parameter.kind != "kwargs"
    }
    try:
        return _complete(base, fields, names)
    except _REFUSALS as error:
        for field, parameter in zip(fields, signature.visible, strict=False):
            try:
                _complete(base, {field: fields[field]}, names)
            except _REFUSALS as reason:
                raise _refusal(signature, parameter, reason) from reason
        raise ToolDefinitionError(f"tool {signature.name}: {_first_line(error)}") from error


def _complete(
    base: type[BaseModel], fields: Mapping[str, Any], names: Mapping[str, object]
) -> type[BaseModel]:
    made: Any = create_model
    model: type[BaseModel] = made("Arguments", __base__=base, **fields)
    if model.model_fields.keys() != fields.keys():
        raise TypeError("it is not the type of a value")
    model.model_rebuild(raise_errors=True, _types_namespace=dict(names))
    model.model_json_schema(schema_generator=_Generator)
    return model


def _base(signature: Signature) -> type[BaseModel]:
    """Return the model's base class: it forbids unknown arguments, or sets the type of `**kwargs`."""
    rest = _rest(signature)
    if rest is None:
        return _Closed
    try:
        TypeAdapter(cast("Any", rest.annotation)).json_schema(schema_generator=_Generator)
    except _REFUSALS as reason:
        raise _refusal(signature, rest, reason) from reason
    namespace = {
        "__module__": __name__,
        "__annotations__": {"__pydantic_extra__": dict[str, rest.annotation]},  # pyright: ignore[reportInvalidTypeForm]
        "model_config": ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=()),
    }
    metaclass: Any = type(BaseModel)
    return metaclass("Open", (BaseModel,), namespace)


class _Closed(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class _Generator(GenerateJsonSchema):
    """Pydantic's generator with sets in a stable order and without defaults that JSON cannot express."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - as pydantic declares it

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonSchemaValue:
        odd = [
            member for member in schema["members"] if not isinstance(member.value, str | int | float | None)
        ]
        if odd:
            raise TypeError(f"an enum's values must be text or numbers, not {odd[0].value!r}")
        return super().enum_schema(schema)

    def is_subclass_schema(self, schema: core_schema.IsSubclassSchema) -> JsonSchemaValue:
        raise TypeError("a class cannot be written in JSON")

    def encode_default(self, dft: Any) -> Any:
        encoded = super().encode_default(dft)
        if isinstance(dft, set | frozenset):
            encoded.sort(key=_sort_key)
        return encoded


def _sort_key(entry: object) -> str:
    return json.dumps(entry, sort_keys=True, default=str)


_REFUSALS = (PydanticUserError, SchemaError, TypeError, ValueError, NameError, RecursionError)


def _refusal(signature: Signature, parameter: Parameter, reason: Exception) -> ToolDefinitionError:
    return ToolDefinitionError(
        f"tool {signature.name}: parameter {parameter.name!r} has type {parameter.annotation!r}, "
        f"which cannot be an argument: {_first_line(reason)}"
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].split(". Set `arbitrary")[0] if lines else type(error).__name__
