"""The word that says who has a guard: 0, or the owner's tag, with PARKED where somebody may sleep until it is free."""

PARKED = 1 << 62
SLOT_BITS = 16
MAX_GENERATION = PARKED >> SLOT_BITS


def tag_of(slot: int, generation: int) -> int:
    """What a worker writes into an owner word."""
    return generation << SLOT_BITS | slot + 1


def owner_of(word: int) -> tuple[int, int]:
    """(slot, generation) of an owner word."""
    word &= ~PARKED
    return (word & (1 << SLOT_BITS) - 1) - 1, word >> SLOT_BITS
