"""Metrics of the jobs service."""

from typing import Final

from prometheus_client import Counter, Gauge

from ballast.service.metrics import REGISTRY

LINES: Final = Counter("ballast_jobs_lines_total", "Lines of batches that got a result", ["result"], registry=REGISTRY)
for _result in ("success", "failure"):
    LINES.labels(_result)
RETRIES: Final = Counter(
    "ballast_jobs_retries_total", "Retries of lines of batches by cause", ["cause"], registry=REGISTRY
)
BATCHES: Final = Gauge("ballast_jobs_open_batches", "Batches that have not ended", registry=REGISTRY)
OPEN_LINES: Final = Gauge("ballast_jobs_open_lines", "Lines of batches that have no result", registry=REGISTRY)
IN_FLIGHT: Final = Gauge("ballast_jobs_in_flight", "Lines of batches in flight at gateways", registry=REGISTRY)
FILE_BYTES: Final = Gauge("ballast_jobs_file_bytes", "Total size of the files of batches", registry=REGISTRY)
IS_FULL: Final = Gauge(
    "ballast_jobs_store_full", "1 if the disk of the jobs service is full; results wait in memory", registry=REGISTRY
)
