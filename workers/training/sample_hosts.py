"""Find the hosts that store the bytes of samples."""

from __future__ import annotations

import numpy as np

from dataplane import DataPlaneClient, KVBatchMeta


def hosts_of_samples(client: DataPlaneClient, meta: KVBatchMeta) -> list[str | None]:
    """Return, for each sample, the host with the most bytes of the fields that `meta` names; None without any bytes.

    It makes two requests to the service. Later puts and moves can change the hosts. Raises the errors of a read.
    """
    places = client.locate(meta).places
    host_of = {unit.unit: unit.host for unit in client.stats().units}
    names = list(dict.fromkeys(host_of.values()))
    numbers = {unit: names.index(host) for unit, host in host_of.items()}
    nbytes = np.zeros((meta.size, len(names) + 1), np.int64)  # the last column: units dropped after `locate`
    rows = np.arange(meta.size)
    for cells in places.values():
        hosts = np.array([numbers.get(unit, len(names)) for unit in cells.units.tolist()], np.int64)
        nbytes[rows, hosts] += cells.lengths * cells.spec.unit_bytes
    most = nbytes[:, :-1].argmax(axis=1) if names else rows
    return [names[host] if names and nbytes[row, host] else None for row, host in enumerate(most.tolist())]
