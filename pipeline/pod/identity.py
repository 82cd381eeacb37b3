"""A key and its certificate, for one conversation of a worker with a helper pod."""

from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["make"]

_AROUND: Final = timedelta(days=8)  # longer than a helper pod lives, whatever the clocks


def make(name: str) -> bytes:
    """Make a key (P-256) and a certificate of it that it signs itself, both in PEM.

    Args:
        name: What it is called; nobody looks at that.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]), datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _AROUND)
        .not_valid_after(now + _AROUND)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    unencrypted = serialization.NoEncryption()
    encoding, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, pkcs8, unencrypted) + certificate.public_bytes(encoding)
