"""Settings of the jobs service."""

import secrets
from pathlib import Path
from typing import ClassVar

from pydantic import ByteSize, Field

from ballast.service.security import ServiceSettings


class JobsSettings(ServiceSettings):
    service: ClassVar[str] = "jobs"
    summary: ClassVar[str] = "Stores batches of requests and sends them to gateways, line by line."
    developer: ClassVar[frozenset[str]] = frozenset(
        {
            "shutdown_timeout_s",
            "max_window_s",
            "line_timeout_s",
            "max_lines",
            "max_line_bytes",
            "max_key_lines",
            "max_key_batches",
            "leadership_ttl_s",
        }
    )

    port: int = Field(default=50054, ge=0, le=65535)
    """Port to listen on; 0: any free one. Set it in the --jobs flag of gateways."""
    jobs_id: str = Field(default_factory=lambda: f"jobs-{secrets.token_hex(4)}", min_length=1)
    """Name of this replica. Default: generated at every start."""
    folder: Path
    """Folder for jobs and files, on a local disk. A standby needs the same folder."""
    gateways: str = "http://127.0.0.1:8000"
    """URLs of the gateways that lines are sent to: http://HOST:PORT or https://HOST:PORT, comma-separated."""
    tokens_file: Path | None = None
    """File with the tokens of clients, the same as for dispatchers. Each token sees only its own jobs and files."""
    leadership_ttl_s: float = Field(default=3.0, ge=0.3)
    """Seconds after which a silent active replica loses its role to a standby."""
    shutdown_timeout_s: float = Field(default=5.0, ge=0)
    """Seconds for which open calls may finish. Lines in flight are sent again after the next start."""

    in_flight: int = Field(default=256, ge=1, le=65536)
    """Maximum number of lines in flight. A large cluster needs more; each holds its answer in memory."""
    line_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a line without an answer is sent again."""
    max_window_s: float = Field(default=7 * 86400.0, gt=0)
    """Maximum completion window of a batch, in seconds."""
    keep_s: float = Field(default=30 * 86400.0, gt=0)
    """Seconds after which files and finished batches are deleted."""

    max_file_bytes: ByteSize = Field(default=ByteSize(200 << 20), ge=1024)
    """Maximum size of an input file."""
    max_lines: int = Field(default=50_000, ge=1)
    """Maximum number of lines of one batch."""
    max_line_bytes: ByteSize = Field(default=ByteSize(8 << 20), ge=1024)
    """Maximum size of a line; at most the gateways' --max-body-bytes."""
    max_bytes: ByteSize = Field(default=ByteSize(100 << 30), ge=1024)
    """Maximum total size of all files; more are refused with status 507."""
    max_key_bytes: ByteSize = Field(default=ByteSize(20 << 30), ge=1024)
    """Maximum total size of the files of one token; more are refused with status 429."""
    max_key_batches: int = Field(default=100, ge=1)
    """Maximum number of open batches of one token; more are refused with status 429."""
    max_key_lines: int = Field(default=1_000_000, ge=1)
    """Maximum number of lines without a result in the batches of one token; with more, further batches are refused with
    status 429."""
