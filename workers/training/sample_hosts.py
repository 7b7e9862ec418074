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
    hosts = list(dict.fromkeys(host_of.values()))
    # In the following, a column is one of `nbytes`.
    column_of = {unit: hosts.index(host) for unit, host in host_of.items()}
    unknown = len(hosts)  # the column of units that were dropped after `locate`
    nbytes = np.zeros((meta.size, len(hosts) + 1), np.int64)  # bytes of each sample on each host
    rows = np.arange(meta.size)
    for cells in places.values():  # one entry per field, with one cell per sample
        columns = np.array([column_of.get(unit, unknown) for unit in cells.units.tolist()], np.int64)
        nbytes[rows, columns] += cells.lengths * cells.spec.unit_bytes  # lengths are in units of `unit_bytes`
    if not hosts:
        return [None] * meta.size
    most = nbytes[:, :unknown].argmax(axis=1)
    return [hosts[column] if nbytes[row, column] else None for row, column in enumerate(most.tolist())]
