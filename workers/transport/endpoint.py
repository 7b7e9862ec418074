"""The address of a stream server as one string."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """host: boot id of the machine; name: of the abstract Unix socket on that machine; address: "host:port" for
    clients on other machines; token: the secret that clients present. None of them may contain spaces."""

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
            raise ValueError("not the endpoint of a server: expected host, name, address and token separated by spaces")
        return cls(host=parts[0], name=parts[1], address=parts[2], token=parts[3])
