"""Makes the certificates of a cluster (a CA, and a certificate for each role) and the secrets that its services share.

Each certificate has a folder with the files that `ballast.rpc.tls` describes. The CA's key is in the outer folder only:
whoever has it can make more certificates, so it does not belong on the machines that serve.
"""

import datetime
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ballast.common.errors import ConfigError
from ballast.rpc.tls import CA, CERTIFICATE, KEY
from ballast.service.security import Role
from tools.local.secrets import make_secrets, write_file

CA_KEY = "ca.key"
_CA_DAYS = 3650
_SKEW = datetime.timedelta(minutes=10)  # certificates become valid this long before now: other clocks may be behind
_ANY = "*"


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(
    folder: Path, *, days: int, hosts: Sequence[str], workers: Sequence[str], renew: bool = False
) -> list[Path]:
    """Make what is missing in `folder`; a certificate that exists is left as it is.

    Args:
        days: Number of days for which the certificates are valid.
        hosts: Names and addresses by which clients reach dispatchers and gateways.
        workers: Ids of workers that get a certificate of their own, which no other worker can use.
        renew: Replace all certificates with new ones, signed by the same CA.

    Returns:
        The folders of the certificates that were made.

    Raises:
        ConfigError: a file there cannot be read, used or written, or a worker's id cannot be a folder's name.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        authority = _authority(folder)
        make_secrets(folder)
        wanted = [(str(role), role, _ANY) for role in Role] + [(name, Role.WORKER, name) for name in workers]
        made: list[Path] = []
        for name, role, identity in wanted:
            if name != Path(name).name:
                raise ConfigError("--worker", f"{name!r} cannot be the name of a folder")
            if renew or not (folder / name / CERTIFICATE).exists():
                names = hosts if role in (Role.DISPATCHER, Role.GATEWAY) else ()
                _issue(authority, folder / name, role, identity, names, datetime.timedelta(days=days))
                made.append(folder / name)
    except OSError as error:
        raise ConfigError(str(error.filename or folder), f"cannot be written: {error.strerror}") from error
    except ValueError as error:  # raised by cryptography for invalid keys and certificates
        raise ConfigError(str(folder), f"holds files that cannot be used: {error}") from error
    return made


def _authority(folder: Path) -> _Authority:
    """The CA in `folder`, or a new one, which is written there."""
    if (folder / CA_KEY).exists():
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(str(folder / CA_KEY), "is not an EC key")
        return _Authority(x509.load_pem_x509_certificate((folder / CA).read_bytes()), key)
    if (folder / CA).exists():
        raise ConfigError(str(folder / CA_KEY), f"is missing, so {CA} cannot sign; restore it, or remove both")
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"ballast cluster {secrets.token_hex(4)}")
    usage = _usage(signs_certificates=True)
    certificate = (
        _builder(name, name, key, datetime.timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_file(folder / CA_KEY, _pem_of(key), secret=True)
    write_file(folder / CA, certificate.public_bytes(serialization.Encoding.PEM))
    return _Authority(certificate, key)


def _issue(
    authority: _Authority, folder: Path, role: Role, identity: str, hosts: Sequence[str], valid: datetime.timedelta
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    names = [x509.DNSName(f"{role}.ballast"), x509.UniformResourceIdentifier(f"ballast://{role}/{identity}")]
    extended = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(_name(f"{role}/{identity}"), issuer.subject, key, valid)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(extended), critical=False)
        .add_extension(x509.SubjectAlternativeName([*names, *map(_host, hosts)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True, mode=0o700)
    write_file(folder / KEY, _pem_of(key), secret=True)
    write_file(folder / CA, issuer.public_bytes(serialization.Encoding.PEM))
    write_file(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _SKEW).not_valid_after(now + valid)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return x509.DNSName(name)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())
