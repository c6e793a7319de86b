"""The quick start: a tiny model learns to sort digits on a laptop's CPU, first from examples and then from rewards."""
