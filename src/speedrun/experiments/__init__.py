"""Many runs and what they prove."""
