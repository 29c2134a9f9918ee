"""Conversion between records (dataclasses) and protobuf messages, field by field, by name.

    LOAD = Mapper(LoadReport, pb.LoadReport)
    LOAD.message(report)  # a pb.LoadReport
    LOAD.record(message)  # a LoadReport; raises InvalidRequest, which names the field

A mapper is constructed when its module is loaded, and raises InvariantViolation if the types do not match: each field
of the record needs one of the same name (and unit) in the message, and vice versa, except fields listed in `given` or
`ignored`. Conversions:

| record | message |
|---|---|
| int, float, str, bool, bytes, and NewTypes of them | the same |
| `T | None` | a field with presence, or an enum whose 0 (UNSPECIFIED) is None |
| T with a default | an optional field; if it is absent, the record has the default |
| enum | enum with the same member names after the type's prefix; UNSPECIFIED is the member NONE, if there is one |
| dataclass | message |
| `tuple[T, ...]`, `frozenset[T]` | repeated; sets are written in ascending order |
| `tuple[A, B]` | message whose first fields are an A and a B |
| `tuple[tuple[T, ...], ...]` | repeated message whose first field is repeated |
| `Mapping[K, V]` | map |

A field may have a check: `Annotated[int, check]`, where `check(value)` returns why the value is refused, or None.
"""

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Generic, TypeVar, cast, get_args, get_origin

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ballast.common.errors import InvalidRequest, InvariantViolation

R = TypeVar("R")
M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=enum.Enum)

# Any: the types of a converter depend on the two fields for which it was made.
_Convert = Callable[[Any], Any]
_PLAIN = (int, float, str, bool, bytes)


class _Refused(Exception):
    """A field's value is invalid. Outer mappers prepend their field to `field`; the outermost raises InvalidRequest."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(field, why)
        self.field, self.why = field, why


class Mapper(Generic[R, M]):
    """Converts records of one type to and from protobuf messages of one type."""

    def __init__(
        self,
        record_type: type[R],
        message_type: type[M],
        *,
        given: Sequence[str] = (),
        ignored: Sequence[str] = (),
        check: Callable[[M], None] | None = None,
    ) -> None:
        """`given`: fields, of either side, that the caller passes with each conversion. `ignored`: unused fields of the
        message. `check`: validates a message before its conversion; raises InvalidRequest, which names the field.

        Raises:
            InvariantViolation: the two types do not match.
        """
        self._check = check
        self.record_type, self.message_type, self.given = record_type, message_type, tuple(given)
        descriptor = cast(Descriptor, message_type.DESCRIPTOR)
        fields = [f for f in dataclasses.fields(cast(Any, record_type)) if f.init]
        hints = typing.get_type_hints(record_type, include_extras=True)
        mapped = [f for f in fields if f.name not in given]
        self._check_names({f.name for f in mapped}, set(descriptor.fields_by_name), {*given, *ignored})
        self._fields = [_Field(f, hints[f.name], descriptor) for f in mapped]
        self._message = _writer(self._fields, message_type)
        self._record = _reader(self._fields, record_type)
        _KNOWN.setdefault((record_type, descriptor.full_name), self)

    def _check_names(self, record: set[str], message: set[str], said: set[str]) -> None:
        for name in sorted((record ^ message) - said):
            where = "message" if name in record else "record"
            raise InvariantViolation(
                f"{self.record_type.__name__} <-> {self.message_type.DESCRIPTOR.full_name}:"
                f" {name} is no field of the {where}, and neither given nor ignored"
            )

    # Any: values of fields, each of its own type.
    def message(self, record: R, **given: Any) -> M:
        """Convert a record to a message. Raises InvalidRequest for a number that its field cannot hold."""
        try:
            return self._message(record, given)
        except (ValueError, TypeError) as error:
            raise self._refusal(record, error) from error

    def record(self, message: M, **given: Any) -> R:
        """Convert a message to a record. Raises InvalidRequest, with the path to the field, for an invalid value."""
        try:
            return self.inner_record(message, **given)
        except _Refused as error:
            raise InvalidRequest(error.field, error.why) from error

    # Any: values of fields, each of its own type.
    def inner_record(self, message: M, **given: Any) -> R:
        """Convert a message nested in another one; the outer mapper prepends its field to the path in errors."""
        if self._check is not None:
            self._check(message)
        return self._record(message, given)

    def to_bytes(self, record: R, **given: Any) -> bytes:
        return self.message(record, **given).SerializeToString()

    def from_bytes(self, data: bytes, **given: Any) -> R:
        """Parse and convert a message. Raises `google.protobuf.message.DecodeError` for malformed bytes, and
        InvalidRequest for invalid values.
        """
        return self.record(self.message_type.FromString(data), **given)

    def _refusal(self, record: R, error: Exception) -> Exception:
        for field in self._fields:
            value = getattr(record, field.name)
            try:
                self.message_type(**{field.name: value if field.to is None else field.to(value)})
            except (ValueError, TypeError) as why:
                return InvalidRequest(field.name, str(why))
        return error


def _writer(fields: "Sequence[_Field]", make: _Convert) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Generate the function that converts a record, as fast as hand-written code, because each engine step sends
    messages.
    """
    known: dict[str, Any] = {"make": make} | {f"to_{f.name}": f.to for f in fields}
    parts = [f"{f.name}=r.{f.name}" if f.to is None else f"{f.name}=to_{f.name}(r.{f.name})" for f in fields]
    return eval(f"lambda r, given: make({', '.join([*parts, '**given'])})", known)


def _reader(fields: "Sequence[_Field]", make: _Convert) -> Callable[[Any, Mapping[str, Any]], Any]:
    known: dict[str, Any] = {"make": make} | {f"of_{f.name}": f.value for f in fields}
    parts = [f"{f.name}=of_{f.name}(m, m.{f.name})" if f.is_converted else f"{f.name}=m.{f.name}" for f in fields]
    return eval(f"lambda m, given: make({', '.join([*parts, '**given'])})", known)


_KNOWN: dict[tuple[type, str], Mapper[Any, Any]] = {}
_SPECIAL: dict[tuple[Any, str], tuple[_Convert, _Convert]] = {}


def map_specially(
    record_type: type[R], message_type: type[M], to_message: Callable[[R], M], to_record: Callable[[M], R]
) -> None:
    """Register converters for a pair of types with different fields; mappers of enclosing records use them."""
    descriptor = cast(Descriptor, message_type.DESCRIPTOR)
    _SPECIAL[record_type, descriptor.full_name] = (to_message, to_record)


class EnumMapper(Generic[E]):
    """Converts members of an enum to and from the numbers of a protobuf enum, by name."""

    def __init__(
        self, enum_type: type[E], numbers: EnumDescriptor, *, absent: E | None = None, unknown: E | None = None
    ) -> None:
        """`absent`: the member for UNSPECIFIED. `unknown`: the member for numbers unknown to this version."""
        names = {value.name.removeprefix(_prefix(numbers)): value.number for value in numbers.values}
        self.absent = absent or next((m for m in enum_type if m.name == "NONE"), None)
        self._unknown = unknown
        self.number_of: dict[E, Any] = {m: 0 if m.name == "NONE" else names.get(m.name, 0) for m in enum_type}
        for member, number in self.number_of.items():
            if not number and member.name != "NONE":
                raise InvariantViolation(f"{numbers.full_name} has no value for {member!r}")
        self._of_number = {number: member for member, number in self.number_of.items() if number}
        self._known = ", ".join(name.lower() for name in names if name != "UNSPECIFIED")
        _ENUMS.setdefault((enum_type, numbers.full_name), self)

    def member(self, number: int, field: str = "") -> E:
        """The member for a number.

        Raises:
            InvalidRequest: naming `field`: the number is UNSPECIFIED or unknown, and there is no `absent` or `unknown`.
        """
        try:
            return self.inner_member(number)
        except _Refused as error:
            raise InvalidRequest(field, error.why) from error

    def inner_member(self, number: int) -> E:
        found = self._of_number.get(number, self._unknown if number else self.absent)
        if found is None:
            raise _Refused("", f"unknown value {number}; known are {self._known}")
        return found


_ENUMS: dict[tuple[type, str], EnumMapper[Any]] = {}


def _prefix(numbers: EnumDescriptor) -> str:
    """Prefix of an enum's value names: FINISH_REASON_ for FinishReason."""
    words = "".join(f"_{c}" if c.isupper() else c for c in numbers.name)
    return words.strip("_").upper() + "_"


class _Field:
    """Converts one field of a record to and from the field of its message."""

    def __init__(self, field: "dataclasses.Field[Any]", hint: Any, message: Descriptor) -> None:
        self.name = field.name
        descriptor = message.fields_by_name[self.name]
        self._checks, hint = _without_checks(hint)
        bare, self._may_be_none = _without_none(hint)
        self._default: Any = field.default
        has_default = field.default is not dataclasses.MISSING
        # An absent field becomes None or the default; a message field without either becomes an empty message.
        self._has_presence = descriptor.has_presence and (self._may_be_none or has_default)
        if self._may_be_none and not self._has_presence and descriptor.enum_type is None:
            raise InvariantViolation(f"{message.full_name}.{self.name} has no presence: it cannot represent None")
        self.to, self._of = _converters(bare, descriptor, none_is_zero=self._may_be_none and not self._has_presence)
        if self._may_be_none and self.to is not None:
            self.to = _unless_none(self.to, 0 if not self._has_presence else None)

    @property
    def is_converted(self) -> bool:
        return bool(self._of is not None or self._has_presence or self._checks)

    def value(self, message: Message, value: Any) -> Any:
        if self._has_presence and not message.HasField(self.name):
            return None if self._may_be_none else self._default
        try:
            if self._of is not None:
                value = self._of(value)
        except _Refused as error:
            raise _Refused(_within(self.name, error.field), error.why) from error
        for check in self._checks:
            if why := check(value):
                raise _Refused(self.name, str(why))
        return value


def _within(outer: str, inner: str) -> str:
    return f"{outer}.{inner}".rstrip(".").replace(".[", "[")


def _converters(hint: Any, field: FieldDescriptor, *, none_is_zero: bool) -> tuple[_Convert | None, _Convert | None]:
    """Converters of a field's value to the message and from it; None: the value needs no conversion."""
    origin, arguments = get_origin(hint), get_args(hint)
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if is_map:
        return dict, _in_order
    if field.is_repeated:
        return _repeated(hint, field)
    if origin is tuple and field.message_type is not None:
        return _positional(arguments, field.message_type)
    return _single(hint, field, none_is_zero=none_is_zero)


def _in_order(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return dict(sorted(values.items()))


def _repeated(hint: Any, field: FieldDescriptor) -> tuple[_Convert | None, _Convert | None]:
    origin, arguments = get_origin(hint), get_args(hint)
    make = frozenset if origin is frozenset else tuple
    order = sorted if origin is frozenset else None
    if origin not in (tuple, frozenset) or (origin is tuple and arguments[1:] != (Ellipsis,)):
        raise InvariantViolation(f"{field.full_name}: {hint} is no tuple or frozenset of one type")
    inner = arguments[0]
    if get_origin(inner) is tuple and field.message_type is not None:
        parts, [first, *_] = get_args(inner), field.message_type.fields
        if parts[1:] == (Ellipsis,) and first.is_repeated:
            to, of = _listed(first.name, field.message_type)
        else:
            to, of = _positional(parts, field.message_type)
    else:
        to, of = _single(inner, field, none_is_zero=False)
    if to is None or of is None:
        return order, make

    def all_to(values: Any) -> Any:
        return [to(value) for value in values]

    def all_of(values: Any) -> Any:
        try:
            return make([of(value) for value in values])
        except _Refused:
            return make([_at(i, of, value) for i, value in enumerate(values)])

    return all_to, all_of


def _at(index: int, convert: _Convert, value: Any) -> Any:
    try:
        return convert(value)
    except _Refused as error:
        raise _Refused(_within(f"[{index}]", error.field), error.why) from error


def _single(hint: Any, field: FieldDescriptor, *, none_is_zero: bool) -> tuple[_Convert | None, _Convert | None]:
    plain = _without_newtype(hint)
    if field.message_type is not None:
        name = field.message_type.full_name
        if special := _SPECIAL.get((plain, name)):
            return special
        known = _KNOWN.get((plain, name)) or Mapper(plain, GetMessageClass(field.message_type))
        return known.message, known.inner_record
    if field.enum_type is not None:
        mapper = _ENUMS.get((plain, field.enum_type.full_name)) or EnumMapper(plain, field.enum_type)
        return mapper.number_of.__getitem__, _member_or_none(mapper) if none_is_zero else mapper.inner_member
    if plain not in _PLAIN:
        raise InvariantViolation(f"{field.full_name}: {hint} cannot be stored in a scalar field")
    return None, None


def _positional(hints: Sequence[Any], message: Descriptor) -> tuple[_Convert, _Convert]:
    names = [field.name for field in message.fields][: len(hints)]
    for hint, field in zip(hints, message.fields, strict=False):
        _single(hint, field, none_is_zero=False)  # rejects types that are not plain
    make, get = GetMessageClass(message), _getter(names)
    return (lambda values: make(**dict(zip(names, values, strict=True)))), (lambda found: tuple(get(found)))


def _listed(name: str, message: Descriptor) -> tuple[_Convert, _Convert]:
    make = GetMessageClass(message)
    return (lambda values: make(**{name: values})), (lambda found: tuple(getattr(found, name)))


def _member_or_none(mapper: EnumMapper[Any]) -> _Convert:
    return lambda number: mapper.inner_member(number) if number or mapper.absent else None


def _unless_none(convert: _Convert, none: Any) -> _Convert:
    return lambda value: none if value is None else convert(value)


def _getter(names: Sequence[str]) -> Callable[[Any], Sequence[Any]]:
    if not names:
        return lambda _: ()
    if len(names) == 1:
        return lambda found: (getattr(found, names[0]),)
    return attrgetter(*names)


def _without_checks(hint: Any) -> tuple[list[Callable[[Any], object]], Any]:
    if get_origin(hint) is not Annotated:
        return [], hint
    inner, *said = get_args(hint)
    return [check for check in said if callable(check)], inner


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    rest = [argument for argument in get_args(hint) if argument is not type(None)]
    if len(rest) != 1 or len(rest) == len(get_args(hint)):
        raise InvariantViolation(f"{hint} is not one type or None")
    return rest[0], True


def _without_newtype(hint: Any) -> Any:
    while (inner := getattr(hint, "__supertype__", None)) is not None:
        hint = inner
    return hint


class Choice(Generic[M]):
    """Converts a message with a oneof, each of whose fields corresponds to one type of record."""

    def __init__(self, message_type: type[M], oneof: str, mappers: Mapping[str, Mapper[Any, Any]]) -> None:
        self._message_type, self._oneof, self._mappers = message_type, oneof, mappers
        self._names = {mapper.record_type: name for name, mapper in mappers.items()}

    def message(self, record: object, *, inner: Mapping[str, Any] | None = None, **outer: Any) -> M:
        """Convert a record. `inner`: `given` fields for the record's mapper; `outer`: fields outside the oneof."""
        name = self._names[type(record)]
        return self._message_type(**{name: self._mappers[name].message(record, **(inner or {}))}, **outer)

    def record(self, message: M, **given: Any) -> Any | None:
        """Convert the message in the oneof; None if it is unset or unknown (from a newer peer)."""
        name = message.WhichOneof(self._oneof)
        mapper = None if name is None else self._mappers.get(name)
        return None if mapper is None or name is None else mapper.record(getattr(message, name), **given)
