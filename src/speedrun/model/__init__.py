"""The GPT: one model code for every recipe."""
