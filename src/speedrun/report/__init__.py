"""Pictures and pages about runs and recipes."""
