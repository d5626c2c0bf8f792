"""Every decision of the pool. Pure: events in, effects out, no clock, no I/O."""
