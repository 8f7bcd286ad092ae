"""Plan schedules: search for the shortest one that fits in memory."""
