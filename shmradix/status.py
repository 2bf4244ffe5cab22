"""What an entry point answers first."""

OK = 0
BUSY = 1  # the guard is taken
CORRUPT = 2  # an index read from the segment points nowhere
LEASES_FULL = 3
NAMESPACES_FULL = 4
NOT_HELD = 5  # no such lease, or not this worker's
MISMATCH = 6  # the tokens do not go through the lease
STALE = 7  # the lease is older than the last clear()
BUSY_SNAPSHOTS = 8  # the snapshots' guard is taken
SNAPSHOTS_FULL = 9
SLOTS_FULL = 10
SLOT_NOT_HELD = 11  # a slot that is not this worker's to use
NOT_FOUND = 12
BLOCKS_FULL = 13  # fewer blocks are free or evictable than asked for
BLOCK_NOT_HELD = 14  # a managed block that is not this worker's
UNSURE = 15  # whether enough blocks are evictable takes counting
CLAIMS_FULL = 16
CLAIMED = 17  # by somebody else
