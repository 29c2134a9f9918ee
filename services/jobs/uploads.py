"""Parses multipart forms with a file piece by piece, and streams the file into the store."""

from collections.abc import Callable
from typing import Final

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from ballast.service.failures import Failure, invalid
from services.jobs.store import Upload

_MAX_FIELD_BYTES: Final = 4096
_MAX_FIELDS: Final = 16


class FileForm:
    """A body of type `multipart/form-data` with one file named `file` and small fields.

    Args:
        content_type: The content-type header.
        max_file_bytes: Maximum size of the file.
        open_file: Called with the client's file name; begins the upload.

    Raises:
        Failure: the content type has no valid boundary.
    """

    def __init__(self, content_type: str, max_file_bytes: int, open_file: Callable[[str], Upload]) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise invalid(None, "the body must be multipart/form-data, with the fields purpose and file")
        self.fields: dict[str, str] = {}
        self.upload: Upload | None = None
        self._max_file_bytes = max_file_bytes
        self._open_file = open_file
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._field: str | None = None  # name of the current field; None within the file
        self._value = bytearray()
        self._is_whole = False
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._name_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise invalid(None, f"the form has an invalid boundary: {error}") from error

    def feed(self, data: bytes) -> None:
        """Parse a piece of the body.

        Raises:
            Failure: the form is malformed, or a part of it is too large.
            Full: the disk is full.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise invalid(None, f"the form cannot be read: {error}") from error

    def end(self) -> Upload:
        """End the form and return the complete upload, which is not committed yet.

        Raises:
            Failure: the form is incomplete, or has no file.
        """
        if not self._is_whole:
            raise invalid(None, "the form is truncated")
        if self.upload is None:
            raise invalid("file", "is missing", code="missing_required_parameter")
        return self.upload

    def abort(self) -> None:
        if self.upload is not None:
            self.upload.abort()

    # The remaining methods are callbacks of the parser.

    def _begin_part(self) -> None:
        self._disposition = b""
        self._value.clear()

    def _end_header(self) -> None:
        if bytes(self._header[0]).lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])
        self._header = (bytearray(), bytearray())

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if name != "file":
            if len(self.fields) >= _MAX_FIELDS:
                raise invalid(None, f"the form has more than {_MAX_FIELDS} fields")
            self._field = name
        elif self.upload is not None:
            raise invalid("file", "may be given only once")
        else:
            self._field = None
            self.upload = self._open_file(options.get(b"filename", b"").decode(errors="replace")[:255])

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            self._value += data[start:end]
            if len(self._value) > _MAX_FIELD_BYTES:
                raise invalid(self._field, f"is longer than {_MAX_FIELD_BYTES} bytes")
            return
        assert self.upload is not None, "the part has a name"
        if self.upload.bytes + end - start > self._max_file_bytes:
            why = f"has more than {self._max_file_bytes} bytes; split it into several"
            raise Failure(413, "invalid_request_error", "file_too_large", f"file: {why}", "file")
        self.upload.write(data[start:end])

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self._is_whole = True
