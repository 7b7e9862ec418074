"""Settings of TLS for tests: what `certificates/make.sh` made."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent / "certificates"


def tls(certificate: str = "node", authority: str = "ca", **more: str) -> dict[str, str]:
    """A certificate (for 127.0.0.1; `named`: for tq.test; `stranger`: of another authority; `expired`), and the
    authority whose certificates are taken."""
    return {
        "tls_cert_file": str(HERE / f"{certificate}.pem"),
        "tls_key_file": str(HERE / f"{certificate}.key"),
        "tls_ca_file": str(HERE / f"{authority}.pem"),
        **more,
    }
