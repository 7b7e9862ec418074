"""The address of a stream server as one string."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """host: boot id of the machine; name: of the abstract Unix socket there; address: "host:port"
    for other machines; token: the secret that clients present. None of them may contain spaces."""

    host: str
    name: str
    address: str
    token: str

    def __str__(self) -> str:
        return " ".join((self.host, self.name, self.address, self.token))

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Parse an endpoint. ValueError if the text is malformed."""
        parts = text.split(" ")
        if len(parts) != 4:
            raise ValueError("this is not the endpoint of a server: it has a host, a name, an address and a token")
        return cls(host=parts[0], name=parts[1], address=parts[2], token=parts[3])
