"""Checksums of rows: computed by the writer, stored in the ledger, and compared by the reader.

The checksum of a row is the low 32 bits of the 64-bit XXH3 hash of its stored bytes. A checksum of 0 is replaced by 1,
because 0 means "no checksum". Checksums detect damage by memory, disk and network, but not forgery.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

UInt8s = npt.NDArray[np.uint8]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

_FEW_SHORT_ROWS = 16
"""Below this number of short rows, rows are hashed one by one."""
# Constants of XXH3 for inputs of 4 to 8 bytes.
_SHORT_KEY = np.uint64(0xC73AB174C5ECD5A2)
_SHORT_FACTOR = np.uint64(0x9FB21C651E98DF25)
_LOW_HALF = (1 << 32) - 1


def checksums_of(memory: UInt8s, offsets: Int64s, sizes: Int64s) -> UInt32s:
    """Return the checksum of each row. Row i has `sizes[i]` bytes at `offsets[i]` of `memory`, which is contiguous."""
    short = (sizes >= 4) & (sizes <= 8)  # rows that can be hashed together
    count = int(np.count_nonzero(short))
    if count < _FEW_SHORT_ROWS:
        return settled(_hash_one_by_one(memory, offsets, sizes))
    if count == len(sizes):
        return settled(_hash_short_rows(memory, offsets, sizes))
    hashes = np.empty(len(sizes), np.uint64)
    hashes[short] = _hash_short_rows(memory, offsets[short], sizes[short])
    hashes[~short] = _hash_one_by_one(memory, offsets[~short], sizes[~short])
    return settled(hashes)


def settled(digests: npt.ArrayLike) -> UInt32s:
    """Convert 64-bit hashes to checksums: the low 32 bits, and 1 in place of 0."""
    low: UInt32s = (np.asarray(digests, np.uint64) & np.uint64(_LOW_HALF)).astype(np.uint32)
    low[low == 0] = 1
    return low


def damaged(memory: UInt8s, offsets: Int64s, sizes: Int64s, checksums: UInt32s) -> tuple[Int64s, UInt32s]:
    """Return the indices of rows whose bytes do not match their checksum, and the checksums of these bytes. Rows
    without a checksum (0) are skipped."""
    actual = checksums_of(memory, offsets, sizes)
    wrong = np.flatnonzero((actual != checksums) & (checksums != 0))
    return wrong, actual[wrong]


def _hash_one_by_one(memory: UInt8s, offsets: Int64s, sizes: Int64s) -> UInt64s:
    """Return the XXH3 hashes of rows of any size."""
    digest = xxhash.xxh3_64_intdigest
    view = memory.data
    ranges = zip(offsets.tolist(), (offsets + sizes).tolist(), strict=True)
    return np.array([digest(view[start:stop]) for start, stop in ranges], np.uint64)


def _hash_short_rows(memory: UInt8s, offsets: Int64s, sizes: Int64s) -> UInt64s:
    """Return the XXH3 hashes of rows of 4 to 8 bytes, vectorized. One scalar per sample is the most common row."""
    # The first and the last 4 bytes of each row, which may overlap.
    first = _read_words(memory, offsets)
    last = _read_words(memory, offsets + sizes - 4)
    mixed: UInt64s = (last + (first << np.uint64(32))) ^ _SHORT_KEY
    mixed ^= _rotated(mixed, 49) ^ _rotated(mixed, 24)
    mixed *= _SHORT_FACTOR
    mixed ^= (mixed >> np.uint64(35)) + sizes.astype(np.uint64)
    mixed *= _SHORT_FACTOR
    mixed ^= mixed >> np.uint64(28)
    return mixed


def _read_words(memory: UInt8s, offsets: Int64s) -> UInt64s:
    """Return the little-endian 4-byte integer at each offset."""
    words: UInt64s = memory[offsets[:, None] + np.arange(4)].view("<u4").reshape(-1).astype(np.uint64)
    return words


def _rotated(values: UInt64s, bits: int) -> UInt64s:
    """Return the values rotated left by `bits`."""
    return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))
