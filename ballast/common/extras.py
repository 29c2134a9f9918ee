"""Names of the distributions, and the optional parts that an installation may lack.

The SDK and the services are separate distributions; extras of the SDK install the services, so that users need only
one name.
"""

from ballast.common.errors import ConfigError

DISTRIBUTION = "ballast-serve"
CLUSTER_DISTRIBUTION = "ballast-serve-cluster"


def install_command(*extras: str) -> str:
    """The command that installs the SDK with these extras: pip install 'ballast-serve[worker]'."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'" if extras else f"pip install {DISTRIBUTION}"


def lacking(what: str, package: str, extra: str) -> ConfigError:
    """The error for a flag or setting `what` that needs `package`, with the command that installs its extra."""
    return ConfigError(what, f"needs {package}: {install_command(extra)}")
