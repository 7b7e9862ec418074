"""Where a server of streams is, as one string."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """host: the boot id of its machine; name: of its socket there (Linux, abstract); address: "host:port" for others;
    token: what its clients have to show. Has no spaces in any of them."""

    host: str
    name: str
    address: str
    token: str

    def __str__(self) -> str:
        return " ".join((self.host, self.name, self.address, self.token))

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """ValueError for what is no endpoint."""
        parts = text.split(" ")
        if len(parts) != 4:
            raise ValueError("this is not the endpoint of a server: it has a host, a name, an address and a token")
        return cls(host=parts[0], name=parts[1], address=parts[2], token=parts[3])
