"""The loop and what surrounds it: schedule, clock, device, run folder, checkpoints."""
