"""Addresses that name a service instead of saying where it is."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.core.addresses import join_address, split_address

Resolver = Callable[[str], str]

_resolvers: dict[str, Resolver] = {}


def register_resolver(scheme: str, resolve: Resolver) -> None:
    """From now on addresses "scheme:REST" mean the "host:port" that `resolve(REST)` returns, asked at each connect."""
    _resolvers[scheme] = resolve


def resolve(address: str) -> str:
    """The "host:port" behind an address. ValueError for one that is neither that nor of a registered scheme."""
    scheme, _, rest = address.partition(":")
    if scheme in _resolvers:
        return resolve(_resolvers[scheme](rest))
    if scheme == "actor":
        raise ValueError(f"address {address!r} names a Ray actor: import workers first, which knows how to find it")
    return join_address(*split_address(address))
