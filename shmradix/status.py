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
