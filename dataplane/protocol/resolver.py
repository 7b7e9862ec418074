"""Resolution of addresses that name a service instead of its host and port."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.core.addresses import join_address, split_address

Resolver = Callable[[str], str]

_resolvers: dict[str, Resolver] = {}


def register_resolver(scheme: str, resolve: Resolver) -> None:
    """Resolve addresses "scheme:REST" to the "host:port" that `resolve(REST)` returns, at each connect."""
    _resolvers[scheme] = resolve


def resolve(address: str) -> str:
    """Return the "host:port" of an address. Raises ValueError if it has neither that form nor a registered scheme."""
    scheme, _, rest = address.partition(":")
    if scheme in _resolvers:
        return resolve(_resolvers[scheme](rest))
    if scheme == "actor":
        raise ValueError(f"address {address!r} names a Ray actor; run `import workers` first, which can resolve it")
    return join_address(*split_address(address))
