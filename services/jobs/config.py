"""Settings of the jobs service."""

import secrets
from pathlib import Path
from typing import ClassVar

from pydantic import ByteSize, Field

from ballast.service.security import ServiceSettings


class JobsSettings(ServiceSettings):
    service: ClassVar[str] = "jobs"
    summary: ClassVar[str] = "Keeps batches of requests and has gateways answer them, line by line."
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
    """Port to listen on; 0: any free one. Gateways are told of it by --jobs."""
    jobs_id: str = Field(default_factory=lambda: f"jobs-{secrets.token_hex(4)}", min_length=1)
    """Name of this replica. Default: made up at every start."""
    folder: Path
    """Where jobs and files are kept, on a disk of this machine. A standby needs the same folder."""
    gateways: str = "http://127.0.0.1:8000"
    """Who answers the lines: http://HOST:PORT or https://HOST:PORT, several with commas."""
    tokens_file: Path | None = None
    """File with the tokens of clients, as dispatchers have it: each sees its own jobs and files only."""
    leadership_ttl_s: float = Field(default=3.0, ge=0.3)
    """Seconds after which a silent active replica loses its role to a standby."""
    shutdown_timeout_s: float = Field(default=5.0, ge=0)
    """Seconds that open calls get to end. Lines under way are sent again after the next start."""

    in_flight: int = Field(default=256, ge=1, le=65536)
    """Lines that are being answered at once. More keep a large cluster busy; each holds its answer in memory."""
    line_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a line without an answer is sent again."""
    max_window_s: float = Field(default=7 * 86400.0, gt=0)
    """Longest completion window that a batch may ask for."""
    keep_s: float = Field(default=30 * 86400.0, gt=0)
    """Seconds after which files and finished batches are deleted."""

    max_file_bytes: ByteSize = Field(default=ByteSize(200 << 20), ge=1024)
    """Longest input file."""
    max_lines: int = Field(default=50_000, ge=1)
    """Most lines of one batch."""
    max_line_bytes: ByteSize = Field(default=ByteSize(8 << 20), ge=1024)
    """Longest line. Not above the gateways' --max-body-bytes."""
    max_bytes: ByteSize = Field(default=ByteSize(100 << 30), ge=1024)
    """Bytes of all files together; more are refused with status 507."""
    max_key_bytes: ByteSize = Field(default=ByteSize(20 << 30), ge=1024)
    """Bytes of the files of one key; more are refused with status 429."""
    max_key_batches: int = Field(default=100, ge=1)
    """Open batches of one key; more are refused with status 429."""
    max_key_lines: int = Field(default=1_000_000, ge=1)
    """Lines without a result of one key's batches; with more of them further batches are refused with status 429."""
